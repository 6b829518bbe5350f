"""What the bench of operators compares computes the same, or it fails."""

import subprocess
import sys

import pytest
import torch

from tests.support.tables.shell_arrays import ROOT
from tools.bench.bench_operators import NORMS, ROTATIONS, best_milliseconds

WEIGHT = torch.full((3,), 2.0, requires_grad=True)


def plain(inputs):
    return inputs * WEIGHT


def best_beside_plain(contender, repeats=2):
    return best_milliseconds(torch.ones(2, 3), (WEIGHT,), {"plain": plain, "ours": contender}, repeats)


def test_contenders_take_turns_and_the_best_counts():
    seen = []

    def ours(inputs):
        seen.append(inputs.grad)
        return inputs * WEIGHT

    plains, best = best_beside_plain(ours, repeats=3)
    # Once to be compared; gradients are not added up.
    assert seen == [None] * 4 and WEIGHT.grad is None
    assert 0 < plains < float("inf") and 0 < best < float("inf")


@pytest.mark.parametrize(
    "contender",
    [
        lambda inputs: inputs * WEIGHT * 1.0001,
        # The same result, and another gradient of the input, of the weight, and none that is a number.
        lambda inputs: inputs * WEIGHT + (inputs - inputs.detach()),
        lambda inputs: inputs * WEIGHT + (WEIGHT - WEIGHT.detach()),
        lambda inputs: inputs * WEIGHT + 0 * (inputs - inputs.detach()).sqrt(),
    ],
    ids=["result", "of the input", "of the weight", "not a number"],
)
def test_contenders_that_differ_are_not_measured(contender):
    with pytest.raises(SystemExit, match="ours differs from plain by"):
        best_beside_plain(contender)


@pytest.mark.slow
def test_norm_and_rotation_are_the_plain_ones():
    # It ends with an error where they are not.
    command = [sys.executable, "tools/bench/bench_operators.py", "--repeats", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    for first, second in (*ROTATIONS, *NORMS):
        assert f"| {first:,} × {second:,} | " in result.stdout
