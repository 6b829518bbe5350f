"""The hand-written steps that ours is measured beside do what they say, and all take the same step."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.support.tables.shell_arrays import ROOT
from tools.bench.bench_train_step import HandWritten, median_ratio

HEADS, GROUPS, DIM = 4, 2, 8


def test_attention_by_class_is_attention_by_sequence():
    lengths = [5, 33, 16, 1, 18]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, sum(lengths), DIM, generator=generator) for heads in (HEADS, GROUPS, GROUPS)
    )
    by_sequence, by_class = (
        HandWritten.attend(
            None, query, key, value, None, 0.3, HandWritten.plan(SimpleNamespace(by_class=choice), lengths)
        )[0]
        for choice in (False, True)
    )
    assert by_sequence.shape == (1, sum(lengths), HEADS, DIM)
    torch.testing.assert_close(by_class, by_sequence, rtol=0, atol=1e-6)
    # The first token of a sequence sees itself alone, in every head of the group.
    starts = [0, 5, 38, 54, 55]
    torch.testing.assert_close(by_class[0, starts, 1], value[0, 0, starts], rtol=0, atol=1e-6)


def test_ratios_are_of_the_rounds():
    # Ratios 3, 1 and 1/4; that of the medians is 3/4.
    assert median_ratio([3.0, 4.0, 1.0], [1.0, 4.0, 4.0]) == 1.0
    assert median_ratio([6.0, 2.0, 1.0], [1.0, 1.0, 1.0]) == 2.0


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--recompute",)], ids=["transformers", "recomputed"])
def test_all_contenders_take_the_same_step(words):
    command = [sys.executable, "tools/bench/bench_train_step.py", "--model", "0.8M", "--threads", "1", "--rounds", "1"]
    # It ends with an error where the gradient norms of the first step differ.
    result = subprocess.run([*command, *words], capture_output=True, text=True, timeout=400, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    names = ("full", "selective", "forward pass") if words else ("packed, by sequence", "packed, by class", "padded")
    assert all(f"\n{name} " in result.stdout for name in ("ours", *names, "limit"))
