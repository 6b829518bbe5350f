"""Weight pushes as the driver orders them, and two proofs that an engine holds what the trainer has.

- Checksums, once, with `--check-weight-update-equal`. Before the first generation the engines load the trainer's weights from a
  scratch checkpoint and report checksums; their tensors are overwritten; the weights are pushed in the normal way, and the
  checksums must be the same again.
- Log-probs of fixed tokens, which trainer and engine both compute, after the first push that an engine gets; with the flag,
  after every push.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime.arguments.config_files.serving_config import arguments_of_group, served_groups
from slime.arguments.server_flags import attention_groups
from slime.observability.console import StartupClock
from slime.observability.waiting import wait_for_all, wait_for_each
from slime.ray.driver import SharedDevices
from slime.ray.rollout_manager import RolloutClient
from slime.ray.train_group import CALL_DEADLINE_SECONDS, TrainGroup
from slime.scheduling.device_turns import Turn
from slime.serving.fleet import EngineName, FleetSnapshot
from slime.utils.errors import RunError
from slime.utils.filesystem import (
    make_scratch_directory,
    make_shared_scratch_directory,
    remove_scratch_directory,
)
from slime.weights.push import PushReport, WeightPush
from slime.weights.quantisers import quantisation_settings
from slime.weights.transports import Receiver
from slime.weights.transports.transport import naming_engines
from slime.weights.verification import check_all_reset, check_equal_checksums

logger = logging.getLogger(__name__)

# Largest mean absolute difference of log-probs between trainer and engine, by the dtype of the weights.
LOG_PROB_TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2, "float16": 1e-2, "quantised": 0.5}
_PROBE_SEQUENCES, _PROBE_LENGTH = 4, 24
# An engine has time limits of its own; after their end, its answer may still take this long to arrive.
_ANSWER_SECONDS = 60.0
# With `--use-fault-tolerance`: how often all engines may fail one push and be replaced before the run ends.
_ROUNDS = 3


class WeightSync:
    """Pushes the trainer's weights to the engines that the rollout manager owns.

    It also gives shared devices their turns: to the push, and then to generation.
    """

    def __init__(
        self, args: argparse.Namespace, train_group: TrainGroup, rollout_manager: RolloutClient, devices: SharedDevices
    ) -> None:
        self._args = args
        self._devices = devices
        self._train_group = train_group
        self._rollout_manager = rollout_manager
        self._weight_push = WeightPush(args, train_group)
        self._pushes = 0
        # How many rollouts this start had trained when it last pushed: by this, later ones show that the weights have changed.
        self._trained_at_push = 0
        # The trainer's log-probs of the fixed tokens, under the weights of the last push. They are kept for engines that get
        # these weights later, when the ranks may have ended (`--release-train`).
        self._log_probs: list[list[float]] = []
        # Engines whose log-probs were compared already.
        self._proven: set[EngineName] = set()
        rollout_manager.bring_weights_by(self.push_to_stale)

    def push(self) -> dict[str, float]:
        """Push the weights, check what the flags ask for, and return transfer metrics. Where nothing was trained since the last
        push of this start, which may have come between two of the loop's, the version stays.

        With `--use-fault-tolerance` engines that fail are replaced: their successors get the weights while samples are
        generated, or at once if nobody else serves.

        Raises:
            RunError: an engine does not hold the trainer's weights.
        """
        first = self._pushes == 0
        is_new = first or self._train_group.rollouts_trained != self._trained_at_push
        self._trained_at_push = self._train_group.rollouts_trained
        check = self._args.check_weight_update_equal
        before = self._weight_push.version
        for _ in range(_ROUNDS):
            self._devices.turn_to(Turn.PUSH)
            fleet = self._rollout_manager.begin_push()
            # If all engines took the weights and then failed to prove them, the version is taken, and their successors get the
            # same one: another number for the same weights would make all samples that wait look older than they are.
            is_taken = not is_new or self._weight_push.version != before
            send = self._weight_push.repeat if is_taken else self._weight_push.push
            report = self._push_with_checksums(fleet, send) if first and check else send(_receivers(fleet))
            served, failed = self._give_up_failed(fleet, report), {}
            # Without an engine that has the weights the trainer does not go to sleep: it still has to give them to new engines.
            if served.engines and (not report.failed or self._args.use_fault_tolerance):
                failed = self._turn_to_generation(served if check else self._unproven_of(served))
            self._rollout_manager.end_push(served.names, report.version, failed)
            served, failed = _without(served, failed), report.failed | failed
            if served.engines or not self._args.use_fault_tolerance:
                break
        if failed and not (self._args.use_fault_tolerance and served.engines):
            raise RunError(next(iter(failed.values())))
        self._pushes += 1
        if first:
            StartupClock().mark("first weights")
        return report.metrics

    def push_to_stale(self) -> None:
        """Give engines that have missed the last push its weights, under its version, and prove it; the others go on.

        If the trainer has trained since, nobody has those weights any more, and such engines wait for the next push. Only if
        nothing can be generated without them, and no request is under way that a push would cut off, all engines get what the
        trainer has now, as a version of its own.
        """
        if self._train_group.rollouts_trained != self._trained_at_push:
            if not self._rollout_manager.is_working():
                self._push_between()
            return
        fleet = self._rollout_manager.begin_push_to_stale()
        if not fleet.engines:
            return
        if self._train_group.lives:
            self._devices.turn_to(Turn.PUSH)
            report = self._weight_push.repeat(_receivers(fleet))
        else:
            report = self._weight_push.repeat_from_files(_receivers(fleet))
        served = self._give_up_failed(fleet, report)
        failed = self._turn_to_generation(served)
        self._rollout_manager.end_push(served.names, report.version, failed)
        served = _without(served, failed)
        if served.engines:
            logger.info("%s: weights of version %d", ", ".join(map(str, served.names)), report.version)

    def _push_between(self) -> None:
        limit = self._args.max_weight_staleness
        if limit is not None:
            raise RunError(
                "no engine is left that serves, and newer weights for those in their place would make waiting samples older "
                f"than --max-weight-staleness {limit}; start the run again, and it goes on from its last checkpoint"
            )
        self.push()

    def _push_with_checksums(self, fleet: FleetSnapshot, send: Callable[[list[Receiver]], PushReport]) -> PushReport:
        """Push, and compare checksums. Engines that fail to answer are among those that failed the push."""
        failed: dict[int, str] = {}

        def answers(method: str, *arguments: Any) -> dict[int, Any]:
            """Of the engines that have not failed, by id."""
            found = self._call(_without(fleet, failed), method, *arguments)
            failed.update({engine: str(answer) for engine, answer in found.items() if isinstance(answer, RunError)})
            return {engine: answer for engine, answer in found.items() if engine not in failed}

        with self._scratch_directory() as directory:
            self._train_group.export_hf(str(directory))
            answers("update_weights_from_disk", str(directory))
        from_disk = answers("weights_checksum")
        answers("reset_weights")
        after_reset = answers("weights_checksum")
        check_all_reset({engine: from_disk[engine] for engine in after_reset}, after_reset)
        report = send(_receivers(_without(fleet, failed)))
        failed |= report.failed
        # If one failed and the run goes on, the others serve from here on, so they are checked all the same.
        if _without(fleet, failed).engines and (not failed or self._args.use_fault_tolerance):
            after_push = answers("weights_checksum")
            alike = {engine.name.engine_id: engine.alike for engine in fleet.engines}
            check_equal_checksums({engine: from_disk[engine] for engine in after_push}, after_push, alike)
            tensors = sum(map(len, after_push.values()))
            logger.info("weight check: %d tensors equal on %d engines", tensors, len(after_push))
        return dataclasses.replace(report, failed=failed)

    def _give_up_failed(self, fleet: FleetSnapshot, report: PushReport) -> FleetSnapshot:
        """The engines of `fleet` that took a push. The push is over for the others: one that hangs would also be waited for in
        the turn to generation."""
        served = _without(fleet, report.failed)
        if lost := [name for name in fleet.names if name not in served.names]:
            self._rollout_manager.end_push(lost, report.version, report.failed)
        return served

    def _turn_to_generation(self, unproven: FleetSnapshot) -> dict[int, str]:
        """End a push: let the engines generate, and compare the log-probs of those that are `unproven`.

        Returns:
            As `_compare_log_probs`.
        """
        # An engine deals sequences to its data-parallel groups in turn, and each of these has to show what it holds.
        groups = (arguments_of_group(self._args, group) for group in served_groups(self._args))
        count = max([_PROBE_SEQUENCES, *map(attention_groups, groups)])
        sequences = probe_sequences(self._args.vocab_size, count)
        # Before the turn the trainer still has its weights; after it the engines have the caches that they compute with.
        if self._train_group.lives and (unproven.engines or self._args.release_train):
            self._log_probs = self._train_group.probe_log_probs(sequences)
        self._devices.turn_to(Turn.GENERATION)
        return self._compare_log_probs(unproven, sequences, self._log_probs) if unproven.engines else {}

    def _compare_log_probs(
        self, fleet: FleetSnapshot, sequences: list[list[int]], trainer: list[list[float]]
    ) -> dict[int, str]:
        """Compare the log-probs of `sequences` that engines tell with the `trainer`'s.

        An engine that only decodes reads no prompt, so it cannot tell them and counts as proven.

        Returns:
            The engines that failed to tell, engine id → reason; with fault tolerance alone.

        Raises:
            RunError: the log-probs of an engine differ, in float32 or where the proof was asked for (else that is a warning);
                or, without fault tolerance, one failed to tell them.
        """
        failed: dict[int, str] = {}
        telling = [engine for engine in fleet.engines if engine.role != "decode"]
        self._proven.update(engine.name for engine in fleet.engines if engine not in telling)
        # Engines that quantise compute with coarser weights than the trainer.
        is_quantised = quantisation_settings(Path(self._args.hf_checkpoint)) is not None
        tolerance = LOG_PROB_TOLERANCE["quantised" if is_quantised else self._args.params_dtype_name]
        refs = [engine.handle.generate.remote(_probe_request(sequences)) for engine in telling]
        limit = self._args.engine_load_timeout + _ANSWER_SECONDS
        names = [engine.name for engine in telling]
        pending = naming_engines(name.engine_id for name in names)
        told = wait_for_each(refs, "log-probs of the engines", limit, pending=pending)
        for name, answers in zip(names, map(_log_probs_in, told), strict=True):
            if isinstance(answers, RunError):
                if not self._args.use_fault_tolerance:
                    raise answers
                logger.warning("weight check: %s", answers)
                failed[name.engine_id] = str(answers)
                continue
            self._proven.add(name)
            difference = mean_difference(trainer, answers)
            # Written so that a NaN fails too.
            if difference <= tolerance:
                continue
            message = (
                f"weight check: the log-probs of {name} differ from the trainer's by {difference:.2e} on average "
                f"(allowed: {tolerance:.0e}); it does not serve the weights that were pushed, or computes differently"
            )
            # With fewer bits, two correct implementations may differ by more than this on some models. So a run below float32
            # is only stopped if it asked for the proof.
            if (self._args.params_dtype_name == "float32" and not is_quantised) or self._args.check_weight_update_equal:
                raise RunError(message)
            logger.warning("%s", message)
        return failed

    @contextmanager
    def _scratch_directory(self) -> Iterator[Path]:
        # Engines on other nodes must see it. `--save` is on a disk that all nodes share, so it lies there if that is given.
        if self._args.save:
            seconds = CALL_DEADLINE_SECONDS + self._args.engine_load_timeout + _ANSWER_SECONDS
            root = make_shared_scratch_directory(Path(self._args.save), "weight-check", seconds)
        else:
            root = make_scratch_directory("weight-check")
        try:
            yield root / "hf"
        finally:
            remove_scratch_directory(root)

    def _unproven_of(self, fleet: FleetSnapshot) -> FleetSnapshot:
        engines = tuple(engine for engine in fleet.engines if engine.name not in self._proven)
        return dataclasses.replace(fleet, engines=engines)

    def _call(self, fleet: FleetSnapshot, method: str, *arguments: Any) -> dict[int, Any]:
        """Engine id → its answer; with fault tolerance the error of one that failed stands in place of it.

        Raises:
            RunError: without fault tolerance, that of the first that fails.
        """
        refs = [getattr(handle, method).remote(*arguments) for handle in fleet.handles]
        wait = wait_for_each if self._args.use_fault_tolerance else wait_for_all
        answers = wait(
            refs,
            f"{method} on the engines",
            self._args.engine_load_timeout + _ANSWER_SECONDS,
            pending=lambda positions: ", ".join(str(fleet.names[position]) for position in positions),
            flag="--engine-load-timeout",
        )
        return {name.engine_id: answer for name, answer in zip(fleet.names, answers, strict=True)}


def _receivers(fleet: FleetSnapshot) -> list[Receiver]:
    return [
        Receiver(engine.name.engine_id, engine.handle, engine.num_gpus, engine.gpu_offset) for engine in fleet.engines
    ]


def _without(fleet: FleetSnapshot, failed: Collection[int]) -> FleetSnapshot:
    """The engines of `fleet` whose ids are not in `failed`."""
    engines = tuple(engine for engine in fleet.engines if engine.name.engine_id not in failed)
    return dataclasses.replace(fleet, engines=engines)


def probe_sequences(vocab_size: int, count: int = _PROBE_SEQUENCES) -> list[list[int]]:
    """The fixed token sequences of the log-prob probe: the same in every run with this vocabulary."""
    generator = random.Random(0)
    return [[generator.randrange(vocab_size) for _ in range(_PROBE_LENGTH)] for _ in range(count)]


def _log_probs_in(answers: Any) -> list[list[float]] | RunError:
    """Those of each sequence but for its first token, which nothing predicts; an error where these are no answers of an
    engine, but the page of a proxy before it, say."""
    if isinstance(answers, RunError):
        return answers
    try:
        return [[entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]] for answer in answers]
    except (KeyError, TypeError, IndexError):
        return RunError(f"an engine that was asked for log-probs answered {str(answers)[:500]!r}")


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
