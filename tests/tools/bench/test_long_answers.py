"""Answers of drawn lengths: the same for the same sample, most short and a few long."""

import asyncio
import statistics
from argparse import Namespace

from slime.utils.types import Sample
from tools.bench import long_answers
from tools.bench.long_answers import answer_tokens


def test_lengths_have_a_long_tail_that_ends():
    lengths = [answer_tokens(index, 256) for index in range(4000)]
    assert lengths == [answer_tokens(index, 256) for index in range(4000)]
    assert abs(statistics.median(lengths) - 32) <= 2
    # Log-normal: the mean is exp(σ²/2) = 1.38 medians, less what the end cuts off.
    assert 1.25 * 32 < statistics.fmean(lengths) < 1.4 * 32
    assert max(lengths) == 256 and min(lengths) >= 1


async def _continued(args, sample, sampling_params):
    """As if an engine had written three tokens more, of as many as it was asked for."""
    sample.response_length = min(sample.response_length + 3, sampling_params["max_new_tokens"])
    return sample


def test_of_an_answer_that_goes_on_only_what_is_new_is_noted(monkeypatch):
    monkeypatch.setattr(long_answers, "generate", _continued)
    monkeypatch.setattr(long_answers, "WRITTEN", [])
    args, sample = Namespace(rollout_max_response_len=64), Sample(index=0)
    length = answer_tokens(0, 64)
    assert 3 < length < 9
    for _ in range(3):
        asyncio.run(long_answers.noted_generate(args, sample, {"temperature": 1.0}))
    assert [one.tokens for one in long_answers.WRITTEN] == [3, min(3, length - 3), max(0, length - 6)]
    assert all(one.began <= one.ended for one in long_answers.WRITTEN)
