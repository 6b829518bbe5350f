"""The command of the README, as a new user types it, and those of the page on it. Slow: it trains for some minutes."""

import contextlib
import re
import shlex

import pytest

from tests.support.processes.plain_engine import KEY, PlainEngine
from tests.support.processes.quickstart import COMMANDS, quickstart
from tests.support.tables.metrics_page import unnamed
from tools.report import read_event_directory


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


@pytest.mark.slow
@pytest.mark.parametrize("words", COMMANDS)
def test_every_arrangement_of_the_page_trains(first, tmp_path, words):
    """Two rollouts, from the taught model of the first run; directories that a command names lie elsewhere."""
    directory, _ = first
    of_script, _, flags = words.replace("outputs/", f"{tmp_path}/").partition(" -- ")
    with contextlib.ExitStack() as stack:
        if "--rollout-external-engine-addrs" in flags:
            engine = PlainEngine(directory / "seed-0/task/model", tmp_path / "engine.log")
            stack.callback(engine.end)
            flags = f"{flags.replace('127.0.0.1:30000', engine.address)} --router-api-key {KEY}"
        run = ["--num-rollout", "2", "--run", tmp_path.name, *shlex.split(of_script), "--", *shlex.split(flags)]
        output = quickstart(directory, *run)
    assert re.search(r"weight check: \d+ tensors equal on \d+ engines", output)
    differences = [float(value) for value in re.findall(r"logprob_diff ([\d.e+-]+)", output)]
    assert len(differences) == 2 and len(re.findall(r"evaluation (?:before|after) rollout \d+: held_out", output)) == 2
    # Whoever generates ahead has tokens of older weights.
    assert differences[0] <= 1e-5 and (differences[1] <= 1e-5) == ("--async" not in of_script)
    assert unnamed(read_event_directory(directory / "seed-0/runs" / tmp_path.name / "tensorboard")) == []
