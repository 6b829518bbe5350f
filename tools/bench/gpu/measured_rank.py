"""A single training rank on a real device: it goes through the phases of `--rehearse`, with real tensors in place of fake ones.

The flags are those of a run. The model has the shape of a published one and random weights, and micro-batches are packed full
with samples of one length. So the step that is measured here is the one that is rehearsed and planned.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from slime.backends.megatron_utils import cpu_runtime
from slime.estimates.flops import model_flops
from slime.plan.setup import parallel_layout, shape_of
from slime.rehearsal.actor import RehearsedActor
from slime.rehearsal.report import Task
from slime.rehearsal.run import micro_batches, rehearse_rank
from slime.rehearsal.stand_in import find_or_build
from slime.utils.errors import RunError, UserError
from tools.bench.gpu.common import make_parser
from tools.published_models import DENSE

SHAPES = ("qwen3-0.6B", "qwen3-1.7B")
_TINY_CONFIG = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
}  # fmt: skip
_TOKENS, _TINY_TOKENS = 8192, 256
_SAMPLES_IN_A_MICRO_BATCH = 4
REHEARSED_MICRO_BATCHES = 2


@dataclasses.dataclass(frozen=True)
class Case:
    """A step: the model's shape, the number of micro-batches, and the tokens of each."""

    shape: str
    micro_batches: int
    tokens: int
    tiny: bool

    @property
    def name(self) -> str:
        return f"{self.shape}, tiny" if self.tiny else self.shape

    def words(self, directory: Path) -> list[str]:
        """The command line of the run. The files that it names are written into `directory`."""
        config = {**DENSE[self.shape], **(_TINY_CONFIG if self.tiny else {})}
        (directory / "config.json").write_text(json.dumps(config))
        (directory / "prompts.jsonl").write_text('{"prompt": "1 + 1", "label": "2"}\n')
        sample, samples = self.tokens // _SAMPLES_IN_A_MICRO_BATCH, self.micro_batches * _SAMPLES_IN_A_MICRO_BATCH
        text = (
            f"--hf-checkpoint {directory} --model-args-from-hf --random-init --prompt-data {directory}/prompts.jsonl "
            "--rm-type math --num-rollout 2 --actor-num-gpus-per-node 1 --rollout-num-gpus 1 "
            f"--rollout-batch-size {samples // 4} --n-samples-per-prompt 4 --global-batch-size {samples} "
            f"--use-dynamic-batch-size --max-tokens-per-gpu {self.tokens} --rollout-max-prompt-len {sample // 4} "
            f"--rollout-max-response-len {sample - sample // 4} --bf16 --transformer-impl local"
        )
        return text.split()

    def arguments(self, directory: Path) -> argparse.Namespace:
        """The checked arguments of `words`."""
        from slime.arguments import parse_args

        return parse_args(argv=self.words(directory))

    def batches(self, args: argparse.Namespace) -> list[list[tuple[int, int]]]:
        """The samples of each micro-batch, as (tokens of the sample, tokens of its response)."""
        return micro_batches(args, parallel_layout(args))[:1] * self.micro_batches


def make_shape_parser(description: str, *, micro_batches: int | None = None) -> argparse.ArgumentParser:
    """A parser for measurements of a step. `micro_batches` is the default of `--micro-batches`; None: no such option."""
    parser = make_parser(description)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--tokens", type=int, help=f"of a micro-batch; unset {_TOKENS}, with --tiny {_TINY_TOKENS}")
    if micro_batches is not None:
        parser.add_argument("--micro-batches", type=int, default=micro_batches, help="of a step")
    return parser


def cases_of(options: argparse.Namespace) -> list[Case]:
    """The cases that the options of `make_shape_parser` ask for; with `--tiny` only the first one."""
    tokens = options.tokens or (_TINY_TOKENS if options.tiny else _TOKENS)
    count = getattr(options, "micro_batches", REHEARSED_MICRO_BATCHES)
    cases = [Case(shape, count, tokens, options.tiny) for shape in options.shapes]
    return cases[:1] if options.tiny else cases


def of_every_case(
    options: argparse.Namespace, measure: Callable[[Case], list[dict[str, Any]]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns (the rows of all cases, a sentence for each that stopped). A shape that does not fit a GPU stops no other."""
    rows, stopped = [], []
    for case in cases_of(options):
        try:
            rows += measure(case)
        except RuntimeError as error:
            stopped.append(f"{case.name} stopped: {type(error).__name__}: {str(error).splitlines()[0]}")
    return rows, stopped


class MeasuredRank(RehearsedActor):
    """The only rank of a run, on the device of this process, with random samples.

    Attributes:
        lengths: tokens of every sample of a step.
    """

    def __init__(self, args: argparse.Namespace, batches: list[list[tuple[int, int]]]) -> None:
        super().__init__(Task(args, 0, None, batches, Path()), None)
        self.lengths = [total for batch in batches for total, _ in batch]
        self.weight_source = None

    def phases(self) -> dict[str, Callable[[], None]]:
        """The phases of a rehearsal in its order, without the save, which no case asks for."""
        phases = {**super().phases(), "model": lambda: self._join(self.rendezvous_address())}
        del phases["save"]
        return phases

    def run_until(self, last: str) -> None:
        """Run all phases up to and including `last`, each once."""
        for name, phase in self.phases().items():
            phase()
            if name == last:
                return

    def _make_data(self) -> None:
        """Make random data: with zeros a GPU takes less power, and so less time, than in a run."""
        super()._make_data()
        data = self._data
        generator = torch.Generator(self.device).manual_seed(0)
        for tokens in data["tokens"]:
            tokens.random_(0, self.args.vocab_size, generator=generator)
        for log_probs in data["rollout_log_probs"]:
            log_probs.normal_(-2.0, 0.5, generator=generator)
        for mask in data["loss_masks"]:
            mask.fill_(1)
        data["rewards"] = [1.0 if number % 2 else -1.0 for number in range(len(data["tokens"]))]


@contextlib.contextmanager
def measured_rank(case: Case) -> Iterator[MeasuredRank]:
    """Frees the memory of the rank before it, then yields a rank that has done nothing yet. At the end it leaves its groups."""
    # Models and their hooks refer to each other, so only the collector frees them.
    gc.collect()
    with tempfile.TemporaryDirectory(prefix="slime-measured-") as directory:
        args = case.arguments(Path(directory))
        cpu_runtime.install()  # no effect where there is a GPU
        rank = MeasuredRank(args, case.batches(args))
        try:
            yield rank
        finally:
            rank.dispose()


def flops_of_step(args: Any, lengths: Sequence[int]) -> int:
    """Model FLOPs of forward and backward over sequences of these lengths, recomputation not counted."""
    model = model_flops(shape_of(args))
    return 3 * sum(model.forward_flops(length) for length in lengths)


@dataclasses.dataclass(frozen=True)
class RehearsedStep:
    """The result of the rehearsal of a case.

    Attributes:
        waits: number of waits by phase and place; `why_no_waits`: the reason if the rehearsal could not count them.
        peaks: bytes at the peak, by phase and kind; empty if the rehearsal did not reach its end.
    """

    case: Case
    waits: dict[str, dict[str, int]]
    why_no_waits: str | None
    peaks: dict[str, dict[str, int]]


def add_rehearsal_option(parser: argparse.ArgumentParser) -> None:
    """Add `--rehearsed`, the file for the function `rehearsed`."""
    parser.add_argument(
        "--rehearsed", type=Path, help="what waits.py --rehearse FILE wrote on a machine with a CPU build of torch"
    )


def rehearse(case: Case) -> RehearsedStep:
    """Rehearse the case in a process of its own. It can count waits if torch is a CPU build and there is a compiler.

    Raises:
        RunError: the rehearsal did not reach its end.
    """
    stand_in = find_or_build()
    with tempfile.TemporaryDirectory(prefix="slime-measured-") as directory:
        args = case.arguments(Path(directory))
        result = rehearse_rank(args, 0, case.batches(args), stand_in)
    if result.failure is not None:
        raise RunError(f"the rehearsal stopped in the phase {result.failure.phase}: {result.failure.error}")
    return RehearsedStep(case, result.waits, stand_in.why_none, result.peaks)


def write_rehearsed(cases: Sequence[Case], file: Path) -> None:
    """Rehearse all cases and write the results into `file`, for `rehearsed`."""
    file.write_text(json.dumps([dataclasses.asdict(rehearse(case)) for case in cases]))


def rehearsed(case: Case, file: Path | None) -> RehearsedStep:
    """The result of the rehearsal of a case. A failed rehearsal gives an empty result, so that measurements are not lost.

    Args:
        file: the file of `write_rehearsed`; None: the case is rehearsed here.

    Raises:
        UserError: the file has no such case.
    """
    if file is None:
        try:
            return rehearse(case)
        except RunError as error:
            return RehearsedStep(case, {}, str(error), {})
    for entry in json.loads(file.read_text()):
        if entry["case"] == dataclasses.asdict(case):
            return RehearsedStep(**{**entry, "case": case})
    raise UserError(
        f"--rehearsed {file} has nothing about {case.name} with {case.tokens} tokens a micro-batch. Write it again, with the "
        "same --shapes and --tokens: python tools/bench/gpu/waits.py --rehearse FILE"
    )
