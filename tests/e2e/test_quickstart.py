"""The command of the README, as a new user types it. Slow: it trains for some minutes."""

import re

import pytest

from tests.support.processes.quickstart import quickstart


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
