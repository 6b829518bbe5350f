"""Functions for experiments: answers of drawn lengths, most short and a few long, and phases that mostly wait.

    python train.py ... --custom-generate-function-path tools/bench/long_answers.py:custom_generate \\
      --rollout-max-response-len 256

The length of an answer depends on the sample's index alone, so runs of other arrangements have the same work. It is log-normal
around a median of an eighth of `--rollout-max-response-len` (σ = 0.8) and ends there. Engines decode, abort and resume as
always; what they write past the end of an answer means nothing.

`slow_generate` and `slow_advantages` wait besides, for every token and in every training step. Where engines and trainer share
a few cores they can not work at once; waiting they can, so runs that overlap gain here what they gain on their own devices.
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
    """The default function, with an answer that is as long as drawn."""
    tokens = answer_tokens(sample.index, args.rollout_max_response_len)
    return await generate(args, sample, {**sampling_params, "max_new_tokens": tokens, "ignore_eos": True})


@dataclass(frozen=True)
class Written:
    """An answer, or a part of one: when it was asked for and there (`time.time`), and its tokens."""

    began: float
    ended: float
    tokens: int


# What `noted_generate` was given in this process, thrown away or not. Whoever reads it clears it before.
WRITTEN: list[Written] = []


async def noted_generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """As `custom_generate`, and notes what came."""
    began, before = time.time(), sample.response_length
    sample = await custom_generate(args, sample, sampling_params)
    WRITTEN.append(Written(began, time.time(), sample.response_length - before))
    return sample


async def full_generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The default function, with answers that are all as long as they may be."""
    return await generate(args, sample, {**sampling_params, "ignore_eos": True})


async def slow_generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The same a few tokens at a time, with a wait before them; an abort ends it between two requests."""
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
    """The reward for every token, after a wait."""
    import torch

    time.sleep(_TRAINING_SECONDS)
    lengths = rollout_data["response_lengths"]
    rollout_data["advantages"] = [
        torch.full((n,), float(r)) for n, r in zip(lengths, rollout_data["rewards"], strict=True)
    ]
    rollout_data["returns"] = [advantages.clone() for advantages in rollout_data["advantages"]]
