"""Finds every group of prompts that a run has drawn: among the trained groups, or in the data state saved after them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime.rollout.data_source_files import read_drawn_ahead, read_state, state_directory
from tests.support.models.tiny_task import ROLLOUT_BATCH_SIZE, SAMPLES_PER_PROMPT

Samples = Sequence[dict[str, Any]]


def group_numbers(rollouts: Sequence[Samples]) -> list[int]:
    """The numbers of the groups in rollouts of the tiny task, in order."""
    numbers = []
    for samples in rollouts:
        assert len(samples) == ROLLOUT_BATCH_SIZE * SAMPLES_PER_PROMPT
        for first in range(0, len(samples), SAMPLES_PER_PROMPT):
            (number,) = {sample["group_index"] for sample in samples[first : first + SAMPLES_PER_PROMPT]}
            numbers.append(number)
    return numbers


def assert_in_turn(rollouts: Sequence[Samples]) -> None:
    """The rollouts have the first groups of the data, each once."""
    numbers = group_numbers(rollouts)
    assert sorted(numbers) == list(range(len(numbers)))


def assert_none_is_lost(rollouts: Sequence[Samples], save: Path) -> None:
    """Each group that had been drawn when the last rollout was saved was trained once, or waits in the saved data state."""
    directory = state_directory(save, len(rollouts) - 1)
    state = read_state(directory)
    waiting = [
        *state["buffer"],
        *(entry["samples"] for entry in read_drawn_ahead(SimpleNamespace(fresh_data_state=False), directory).entries),
    ]
    numbers = group_numbers(rollouts) + [group[0]["group_index"] for group in waiting]
    assert sorted(numbers) == list(range(state["sample_group_index"]))
