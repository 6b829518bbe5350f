"""Weight pushes as the driver orders them, with the proofs that an engine holds what the trainer has.

Before the first generation, with `--check-weight-update-equal`: the engines load the trainer's weights from a scratch
checkpoint and report checksums, their tensors are overwritten, the weights are pushed in the normal way, and the
checksums must be the same. After the first push (with the flag: after every push) the log-probs of fixed tokens are
compared between trainer and engines.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime.observability.console import StartupClock
from slime.observability.waiting import wait_for_all
from slime.ray.rollout_manager import ServingInfo
from slime.ray.train_group import TrainGroup
from slime.utils.errors import RunError
from slime.utils.filesystem import make_scratch_directory, remove_scratch_directory
from slime.weights.equality import check_all_reset, check_equal_checksums

logger = logging.getLogger(__name__)

# Largest mean absolute difference of log-probs between trainer and engine, by the dtype of the weights.
LOG_PROB_TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2, "float16": 1e-2}
_PROBE_SEQUENCES, _PROBE_LENGTH = 4, 24
# Between the end of an engine's own time limit and its answer.
_ANSWER_SECONDS = 60.0


class WeightSync:
    """Pushes the trainer's weights to the engines of a run."""

    def __init__(self, args: argparse.Namespace, train_group: TrainGroup, serving: ServingInfo) -> None:
        self._args = args
        self._train_group = train_group
        self._engines = serving.engines
        self._pushes = 0
        train_group.connect_rollout_engines(serving.engines, serving.gpu_counts, serving.gpu_offsets)

    def push(self) -> dict[str, float]:
        """Push the weights, check what the flags ask for, and return transfer metrics.

        Raises:
            RunError: an engine does not hold the trainer's weights.
        """
        first = self._pushes == 0
        check = self._args.check_weight_update_equal
        metrics = self._push_with_checksums() if first and check else self._train_group.update_weights()
        self._pushes += 1
        if first or check:
            self._compare_log_probs()
        if first:
            StartupClock().mark("first weights")
        return metrics

    def _push_with_checksums(self) -> dict[str, float]:
        with self._scratch_directory() as directory:
            self._train_group.export_hf(str(directory))
            self._call_engines("update_weights_from_disk", str(directory))
        from_disk = self._call_engines("weights_checksum")
        self._call_engines("reset_weights")
        check_all_reset(from_disk, self._call_engines("weights_checksum"))
        metrics = self._train_group.update_weights()
        check_equal_checksums(from_disk, self._call_engines("weights_checksum"))
        logger.info("weight check: %d tensors equal on %d engines", len(from_disk[0]), len(self._engines))
        return metrics

    def _compare_log_probs(self) -> None:
        sequences = probe_sequences(self._args.vocab_size)
        trainer = self._train_group.probe_log_probs(sequences)
        tolerance = LOG_PROB_TOLERANCE[self._args.params_dtype_name]
        for rank, answers in enumerate(self._call_engines("generate", _probe_request(sequences))):
            # The first entry has no log-prob: nothing predicts the first token.
            entries = [answer["meta_info"]["input_token_logprobs"][1:] for answer in answers]
            difference = mean_difference(trainer, [[entry[0] for entry in of_sample] for of_sample in entries])
            # Written so that a NaN fails too.
            if difference <= tolerance:
                continue
            message = (
                f"weight check: the log-probs of engine {rank} differ from the trainer's by {difference:.2e} on average "
                f"(allowed: {tolerance:.0e}); it does not serve the weights that were pushed, or computes differently"
            )
            # In 16 bits two right implementations differ by more on some models: then only who asked for proof is stopped.
            if self._args.params_dtype_name == "float32" or self._args.check_weight_update_equal:
                raise RunError(message)
            logger.warning("%s", message)

    @contextmanager
    def _scratch_directory(self) -> Iterator[Path]:
        # Engines of other nodes must see it, so it lies beside the checkpoints where there are any.
        if not self._args.save:
            root = make_scratch_directory("weight-check")
            try:
                yield root / "hf"
            finally:
                remove_scratch_directory(root)
            return
        parent = Path(self._args.save)
        parent.mkdir(parents=True, exist_ok=True)
        for left_by_a_killed_run in parent.glob(".weight-check-*"):
            shutil.rmtree(left_by_a_killed_run, ignore_errors=True)
        root = Path(tempfile.mkdtemp(prefix=".weight-check-", dir=parent))
        try:
            yield root / "hf"
        finally:
            shutil.rmtree(root, ignore_errors=True)

    def _call_engines(self, method: str, *arguments: Any) -> list[Any]:
        refs = [getattr(engine, method).remote(*arguments) for engine in self._engines]
        return wait_for_all(
            refs,
            f"{method} on the engines",
            self._args.engine_load_timeout + _ANSWER_SECONDS,
            pending=lambda ranks: "engine " + ", ".join(map(str, ranks)),
            flag="--engine-load-timeout",
        )


def probe_sequences(vocab_size: int) -> list[list[int]]:
    """The fixed token sequences of the log-prob probe: the same in every run with this vocabulary."""
    generator = random.Random(0)
    return [[generator.randrange(vocab_size) for _ in range(_PROBE_LENGTH)] for _ in range(_PROBE_SEQUENCES)]


def mean_difference(left: list[list[float]], right: list[list[float]]) -> float:
    """Mean absolute difference of two sets of log-probs of equal shape."""
    pairs = [(a, b) for row_a, row_b in zip(left, right, strict=True) for a, b in zip(row_a, row_b, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


def _probe_request(sequences: list[list[int]]) -> dict[str, Any]:
    return {
        "input_ids": sequences,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
