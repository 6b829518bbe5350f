"""Plug-ins of the end-to-end runs: they wrap the defaults, and some of them fail on purpose."""

from __future__ import annotations

import asyncio
from typing import Any

from slime.rollout.rm_hub import grade_answer_verl
from slime.rollout.sglang_rollout import generate
from slime.utils.types import Sample


async def marked_generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The default generation; leaves its mark in the metadata."""
    sample = await generate(args, sample, sampling_params)
    sample.metadata["generated_by"] = "marked_generate"
    return sample


def graded_reward(args: Any, sample: Sample) -> float:
    """The built-in grader's verdict, plus a part that a random model earns in differing amounts."""
    response = sample.tokens[-sample.response_length :]
    right = grade_answer_verl(sample.response, str(sample.label))
    return float(right) + sum(token % 2 for token in response) / max(1, len(response))


def failing_reward(args: Any, sample: Sample) -> float:
    """Raises for one sample of the first rollout."""
    if sample.index == 5:
        raise KeyError(f"no entry for {sample.label}")
    return 0.0


async def endless_generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generates, then never returns."""
    await generate(args, sample, sampling_params)
    await asyncio.Event().wait()
    return sample
