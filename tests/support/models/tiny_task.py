"""The files and the command line of a run that takes seconds: a random model, a dozen prompts, short answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.models.tiny_checkpoint import make_tiny_checkpoint

PLUG_INS = Path(__file__).resolve().parents[1] / "processes" / "plug_ins.py"
ROLLOUT_BATCH_SIZE = 4
SAMPLES_PER_PROMPT = 4


@dataclass(frozen=True)
class TinyTask:
    """Paths of a task."""

    model: Path
    prompts: Path
    evaluation: Path

    @property
    def rollout_flags(self) -> list[str]:
        """Flags of generation: the model, prompts, sizes and rewards."""
        return [
            "--hf-checkpoint", str(self.model),
            "--prompt-data", str(self.prompts),
            "--apply-chat-template",
            "--rollout-shuffle",
            "--rollout-batch-size", str(ROLLOUT_BATCH_SIZE),
            "--n-samples-per-prompt", str(SAMPLES_PER_PROMPT),
            "--rollout-max-response-len", "12",
            "--custom-rm-path", "tests.support.processes.plug_ins.graded_reward",
            "--sglang-enable-deterministic-inference",
        ]  # fmt: skip

    @property
    def train_flags(self) -> list[str]:
        """Flags of GRPO training with a reference model."""
        return [
            "--model-args-from-hf",
            "--use-dynamic-batch-size",
            "--max-tokens-per-gpu", "256",
            "--data-pad-size-multiplier", "8",
            "--ref-load", str(self.model),
            "--use-kl-loss",
            "--kl-loss-coef", "0.01",
            "--kl-loss-type", "low_var_kl",
            "--entropy-coef", "0.001",
            "--lr", "1e-3",
            "--lr-decay-style", "constant",
        ]  # fmt: skip

    @property
    def loop_flags(self) -> list[str]:
        """Flags of the whole loop on one training rank and two engines."""
        return [
            *self.rollout_flags,
            *self.train_flags,
            "--actor-num-gpus-per-node", "1",
            "--rollout-num-gpus", "2",
        ]  # fmt: skip


def without(flags: list[str], name: str) -> list[str]:
    """`flags` without the flag `name` and its value."""
    place = flags.index(name)
    return [*flags[:place], *flags[place + 2 :]]


def make_tiny_task(directory: Path, prompts: int = 14, **model: Any) -> TinyTask:
    """Write a model (`make_tiny_checkpoint`), prompts and held-out prompts below `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    task = TinyTask(
        make_tiny_checkpoint(directory / "model", **model), directory / "prompts.jsonl", directory / "held_out.jsonl"
    )
    _write_rows(task.prompts, range(prompts))
    _write_rows(task.evaluation, range(100, 103))
    return task


def _write_rows(path: Path, numbers: range) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {number}+{number**3}?"}],
            "label": str(number + number**3),
            "metadata": {"number": number},
        }
        for number in numbers
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
