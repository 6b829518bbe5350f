"""The command of the README, as a new user types it. Slow: it trains for some minutes."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def quickstart(directory: Path, *words: str, timeout: float = 900) -> str:
    done = subprocess.run(
        ["bash", "scripts/quickstart.sh", "--dir", str(directory), *words],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "TENSORBOARD_DIR")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    directory = tmp_path_factory.mktemp("quickstart")
    return directory, quickstart(directory)


@pytest.mark.slow
def test_a_model_learns(first):
    _, output = first
    accuracies = [
        float(value) for value in re.findall(r"evaluation (?:before|after) rollout \d+: held_out ([\d.]+)", output)
    ]
    assert len(accuracies) == 2
    assert accuracies[0] < 0.6 and accuracies[1] > 0.85
    differences = [float(value) for value in re.findall(r"logprob_diff ([\d.e+-]+)", output)]
    assert len(differences) == 30 and max(differences) <= 1e-5


@pytest.mark.slow
def test_the_report_names_what_was_made(first):
    directory, output = first
    run = next((directory / "seed-0/runs").iterdir())
    assert (run / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "29"
    assert str(run) in output


@pytest.mark.slow
def test_a_second_run_reuses_task_and_teaching(first):
    directory, _ = first
    output = quickstart(directory, "--num-rollout", "2")
    assert output.count("reused") == 2
    assert len(list((directory / "seed-0/runs").iterdir())) == 2
