"""Helpers for tests of data sources: the arguments that they read, a minimal source, and a reader of what a source returned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def make_args(**changes: Any) -> SimpleNamespace:
    values = {
        "data_source_path": "my.Source",
        "n_samples_per_prompt": 2,
        "save": None,
        "num_rollout": 2,
        "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
        "rollout_batch_size": 2,
        "over_sampling_batch_size": 2,
        "dynamic_sampling_filter_path": None,
        "http_request_timeout": 600.0,
    }
    return SimpleNamespace(**{**values, **changes})


class Flat:
    """A source that returns the groups that it was made with."""

    def __init__(self, entries: list[Any]) -> None:
        self.entries = entries

    def get_samples(self, num_samples: int) -> list[Any]:
        return self.entries[:num_samples]


def prompts(groups: list[list[Any]]) -> list[str]:
    """The prompt of the first sample of each group."""
    return [group[0].prompt for group in groups]
