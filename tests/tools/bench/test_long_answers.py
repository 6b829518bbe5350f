"""Answers of drawn lengths: the same for the same sample, most short and a few long."""

import statistics

from tools.bench.long_answers import answer_tokens


def test_lengths_have_a_long_tail_that_ends():
    lengths = [answer_tokens(index, 256) for index in range(4000)]
    assert lengths == [answer_tokens(index, 256) for index in range(4000)]
    assert abs(statistics.median(lengths) - 32) <= 2
    # Log-normal: the mean is exp(σ²/2) = 1.38 medians, less what the end cuts off.
    assert 1.25 * 32 < statistics.fmean(lengths) < 1.4 * 32
    assert max(lengths) == 256 and min(lengths) >= 1
