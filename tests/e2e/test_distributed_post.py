"""Whole runs whose requests go through client processes give what a run gives that sends them itself, whatever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.tiny_task import PLUG_INS, TinyTask
from tests.support.processes.train_process import TrainProcess, checkpoint_tensors

ROLLOUTS = 2
CLIENTS = 2
FIELDS = (
    "index", "group_index", "prompt", "label", "response", "response_length", "tokens", "reward", "metadata",
    "weight_versions", "weight_version_spans",
)  # fmt: skip
# Engines round otherwise with other requests beside one, and which these are is a matter of microseconds.
ROUNDING = 1e-5


def run(flags: Sequence[object], directory: Path, *more: object) -> TrainProcess:
    """A run of two rollouts; it waits in the second one for a file."""
    flags = [
        *flags,
        "--num-rollout", ROLLOUTS, "--num-gpus-per-node", CLIENTS,
        "--custom-generate-function-path", f"{PLUG_INS}:marked_generate",
        "--save-debug-rollout-data", directory / "{rollout_id}.pt",
        *more,
    ]  # fmt: skip
    return TrainProcess(flags, directory, {"E2E_HOLD_ROLLOUT": "1"})


def loop(task: TinyTask, directory: Path, *more: object) -> TrainProcess:
    """The whole loop on two engines, with an evaluation."""
    flags = [
        *task.loop_flags,
        "--save", directory / "checkpoints", "--load", directory / "checkpoints", "--save-interval", "1",
        "--eval-interval", ROLLOUTS, "--eval-prompt-data", "held_out", task.evaluation,
    ]  # fmt: skip
    return run(flags, directory, *more)


def samples_of(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """By the name of the dump."""
    return {
        path.name: torch.load(path, weights_only=True)["samples"] for path in sorted(directory.glob("*.pt"))
    }  # fmt: skip


def values(sample: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    found = {field: sample[field] for field in fields}
    return {field: value.tolist() if isinstance(value, torch.Tensor) else value for field, value in found.items()}


@pytest.fixture(scope="module")
def plain(task, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("plain")
    (directory / "go").touch()
    loop(task, directory).finish(400)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("death", ["a client", "a training rank"])
def test_samples_and_weights_are_those_of_a_run_that_sends_itself(task, plain, tmp_path, death):
    with loop(task, tmp_path, "--use-distributed-post", "--max-restarts", "1") as process:
        process.wait_for_line("holding rollout 1", 400)
        commands = process.processes()
        clients = [pid for pid, command in commands.items() if "RequestActor" in command]
        assert len(clients) == CLIENTS
        if death == "a client":
            os.kill(clients[0], signal.SIGKILL)
        else:
            os.kill(next(pid for pid, command in commands.items() if "RankProcess" in command), signal.SIGKILL)
            process.wait_for_line("restart 1 of 1", 100)
        (tmp_path / "go").touch()
        process.wait_for_success(400)
        process.assert_no_process_left()
    output = process.output()
    lost = [line for line in output.splitlines() if "of --use-distributed-post on node" in line]
    if death == "a client":
        assert len(lost) == 1 and "is lost" in lost[0] and f"{CLIENTS - 1} of {CLIENTS} are left" in lost[0]
    else:
        assert not lost and output.count(f"{CLIENTS} client processes send requests") == 2
    own, others = samples_of(tmp_path), samples_of(plain)
    assert len(own) > ROLLOUTS and [(name, len(own[name])) for name in own] == [
        (name, len(others[name])) for name in others
    ]
    for name in own:
        for sample, expected in zip(own[name], others[name], strict=True):
            assert values(sample, FIELDS) == values(expected, FIELDS)
            log_probs, expected_ones = (one["rollout_log_probs"].tolist() for one in (sample, expected))
            assert log_probs == pytest.approx(expected_ones, abs=ROUNDING) and log_probs
    weights = [checkpoint_tensors(directory / f"checkpoints/iter_{ROLLOUTS - 1:07}") for directory in (tmp_path, plain)]
    assert weights[0] and weights[0] == weights[1]


@pytest.mark.slow
def test_log_probs_are_bitwise_the_same_where_an_engine_has_one_request_at_a_time(task, tmp_path):
    found = []
    for name, more in {"plain": [], "clients": ["--use-distributed-post"]}.items():
        directory = tmp_path / name
        directory.mkdir()
        (directory / "go").touch()
        one = ["--debug-rollout-only", "--rollout-num-gpus", "1", "--sglang-server-concurrency", "1"]
        run([*task.rollout_flags, *one], directory, *more).finish(400)
        found.append(samples_of(directory))
    plain, clients = (
        {name: [values(sample, (*FIELDS, "rollout_log_probs")) for sample in samples] for name, samples in one.items()}
        for one in found
    )
    assert len(plain) == ROLLOUTS and plain == clients
