"""The command of the README, as a new user types it, and those of the page on it. Slow: it trains for some minutes."""

import contextlib
import re
import shlex
from pathlib import Path

import pytest

from tests.support.processes.plain_engine import KEY, PlainEngine
from tests.support.processes.quickstart import COMMANDS, WEIGHT_COMMANDS, quickstart
from tests.support.tables.metrics_page import unnamed
from tools.report import read_events


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


def assert_trained(output: str, run: Path, asynchronous: bool = False) -> None:
    """Two rollouts of `run` trained, by what it printed and wrote."""
    assert re.search(r"weight check: \d+ tensors equal on \d+ engines", output)
    differences = [float(value) for value in re.findall(r"logprob_diff ([\d.e+-]+)", output)]
    assert len(differences) == 2 and len(re.findall(r"evaluation (?:before|after) rollout \d+: held_out", output)) == 2
    # Whoever generates ahead has tokens of older weights.
    assert differences[0] <= 1e-5 and (differences[1] <= 1e-5) == (not asynchronous)
    assert unnamed(read_events(run / "tensorboard")) == []


@pytest.mark.slow
def test_a_second_run_reuses_task_and_teaching(first):
    """And trains: without a word more it is the first arrangement of the page."""
    assert COMMANDS[0] == ""
    directory, _ = first
    runs = directory / "seed-0/runs"
    before = set(runs.iterdir())
    output = quickstart(directory, "--num-rollout", "2")
    assert output.count("reused") == 2
    (run,) = set(runs.iterdir()) - before
    assert_trained(output, run)


@pytest.mark.slow
@pytest.mark.parametrize("words", [words for words in COMMANDS[1:] if words not in WEIGHT_COMMANDS.values()])
def test_every_other_arrangement_of_the_page_trains(first, tmp_path, words):
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
    assert_trained(output, directory / "seed-0/runs" / tmp_path.name, asynchronous="--async" in of_script)
