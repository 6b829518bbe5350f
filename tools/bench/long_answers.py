"""Functions for experiments: answers of drawn lengths, most short and a few long, and phases that mostly wait.

    python train.py ... --custom-generate-function-path tools/bench/long_answers.py:custom_generate \\
      --rollout-max-response-len 256

The length of an answer depends on the sample's index alone, so runs of all arrangements have the same work. Lengths are
log-normal (σ = 0.8) with a median of an eighth of `--rollout-max-response-len` and are cut at that limit. Engines decode, abort
and resume as always; the text of an answer means nothing.

`slow_generate` and `slow_advantages` also wait, for every token and in every training step. Engines and a trainer that share a
few cores cannot compute at the same time, but they can wait at the same time. So runs that overlap gain as much here as on
devices of their own.
"""

import asyncio
import random
import time
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from slime.rollout.generation import generate
from slime.rollout.generation_call import current_call
from slime.utils.types import Sample

_SIGMA = 0.8
_SECONDS_PER_TOKEN, _TOKENS_AT_ONCE = 0.04, 8
_TRAINING_SECONDS = 2.5


def answer_tokens(index: int, longest: int) -> int:
    """The length of the answer of sample `index`."""
    return max(1, min(longest, round(longest / 8 * random.Random(index).lognormvariate(0.0, _SIGMA))))


async def custom_generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The default generate function, with answers of their drawn lengths."""
    tokens = answer_tokens(sample.index, args.rollout_max_response_len)
    return await generate(args, sample, {**sampling_params, "max_new_tokens": tokens, "ignore_eos": True})


@dataclass(frozen=True)
class Written:
    """An answer, or a part of one: the times of its request and of its arrival (`time.time`), and its number of tokens."""

    began: float
    ended: float
    tokens: int


# All answers that `noted_generate` got in this process, including those thrown away later. Readers clear it before they start.
WRITTEN: list[Written] = []


async def noted_generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """As `custom_generate`, and adds the answer to `WRITTEN`."""
    began, before = time.time(), sample.response_length
    sample = await custom_generate(args, sample, sampling_params)
    WRITTEN.append(Written(began, time.time(), sample.response_length - before))
    return sample


async def full_generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The default generate function, with all answers as long as `--rollout-max-response-len` allows."""
    return await generate(args, sample, {**sampling_params, "ignore_eos": True})


async def slow_generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """As `custom_generate`, a few tokens at a time with a wait before each request. An abort ends it between two requests."""
    return await _slowly(args, sample, sampling_params, answer_tokens(sample.index, args.rollout_max_response_len))


async def slow_even_generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """As `slow_generate`, with answers of one length: half of the longest."""
    return await _slowly(args, sample, sampling_params, args.rollout_max_response_len // 2)


async def _slowly(args: Namespace, sample: Sample, sampling_params: dict[str, Any], tokens: int) -> Sample:
    while (left := tokens - sample.response_length) > 0:
        piece = min(left, _TOKENS_AT_ONCE)
        await asyncio.sleep(piece * _SECONDS_PER_TOKEN)
        if current_call().aborted:
            sample.status = Sample.Status.ABORTED
            break
        written = sample.response_length + piece
        sample = await generate(args, sample, {**sampling_params, "max_new_tokens": written, "ignore_eos": True})
        if sample.status is Sample.Status.ABORTED:
            break
    return sample


def slow_advantages(args: Namespace, rollout_data: Any) -> None:
    """Waits, then gives every token the reward of its sample as advantage."""
    import torch

    time.sleep(_TRAINING_SECONDS)
    lengths = rollout_data["response_lengths"]
    rollout_data["advantages"] = [
        torch.full((n,), float(r)) for n, r in zip(lengths, rollout_data["rewards"], strict=True)
    ]
    rollout_data["returns"] = [advantages.clone() for advantages in rollout_data["advantages"]]
