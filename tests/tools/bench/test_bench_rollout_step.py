"""A small step of generation against the null engine, beside bare requests."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "tools/bench/bench_rollout_step.py"


@pytest.mark.slow
def test_a_step_goes_up_to_its_train_batch():
    words = ["--in-flight", "8", "--samples", "64", "--repeats", "1"]
    result = subprocess.run([sys.executable, BENCH, *words], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr[-3000:]
    in_flight, samples, ours, bare, *_ = result.stdout.splitlines()[-1].split()
    assert (in_flight, samples) == ("8", "64") and 0 < float(ours) < float(bare) * 2
