"""A launch script as a new user tries it on a small machine: real Ray, real engines, the toy model."""

import re
from pathlib import Path

import pytest

from tests.support.tables.shell_arrays import ROOT, bash


def run_toy(directory: Path, *words: str, timeout: float = 600):
    """The script with `MODEL=toy` on two devices, everything of it below `directory`."""
    script = ROOT / "scripts" / "run-qwen3-4B.sh"
    return bash(
        " ".join(["bash", str(script), *words]), cwd=directory, timeout=timeout,
        MODEL="toy", NUM_GPUS="2", BASE_DIR=str(directory), RAY_AUTH_MODE="disabled",
    )  # fmt: skip


@pytest.mark.slow
def test_a_launch_script_trains_the_toy_model_and_knows_when_it_is_done(tmp_path):
    run = run_toy(tmp_path, "--num-rollout", "2")
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    norms = [float(norm) for norm in re.findall(r"rollout \d \(\d/2\) \|.* grad_norm ([\d.]+)", run.stdout)]
    assert len(norms) == 2 and all(norm > 0 for norm in norms)
    assert (tmp_path / "checkpoints/qwen3-4B-toy/latest_checkpointed_iteration.txt").read_text().strip() == "1"
    assert "ended the head" in run.stdout

    again = run_toy(tmp_path, "--num-rollout", "2")
    assert again.returncode == 0 and "nothing left to do: 2 rollouts are done" in again.stdout
    # As if the run had been killed within its last evaluation.
    evaluated = tmp_path / "checkpoints/qwen3-4B-toy/latest_evaluation.txt"
    assert evaluated.read_text() == "2"
    evaluated.write_text("0")
    made = run_toy(tmp_path, "--num-rollout", "2")
    assert made.returncode == 0 and "the evaluation after rollout 1 was not finished, and is made now" in made.stdout
    assert re.search(r"evaluation before rollout 2: \w+", made.stdout) and evaluated.read_text() == "2"
    refused = run_toy(tmp_path, "--num-rollout", "3", "--prompt-data", "/nowhere.jsonl")
    assert refused.returncode == 2
    assert (refused.stdout + refused.stderr).count("there is no file /nowhere.jsonl") == 1
    assert all("started Ray" not in result.stdout for result in (again, refused))
