"""Engines that a test started with plain SGLang, and runs that use them: they learn, end in every way, and the engines live."""

from __future__ import annotations

import re
import signal

import pytest
import requests
import torch

from slime.utils.ports import random_port_start, reserve_port
from tests.support.models.tiny_task import PLUG_INS, ROLLOUT_BATCH_SIZE, SAMPLES_PER_PROMPT
from tests.support.processes.plain_engine import KEY, PlainEngine
from tests.support.processes.train_process import TrainProcess
from tests.support.processes.waiting import wait_until


@pytest.fixture(scope="module")
def engines(task, tmp_path_factory):
    logs = tmp_path_factory.mktemp("engines")
    started: list[PlainEngine] = []
    try:
        for index in range(2):
            started.append(PlainEngine(task.model, logs / f"{index}.log"))
        yield started
    finally:
        for engine in started:
            engine.end()


def flags_of_a_run(task, engines: list[PlainEngine]) -> list[str]:
    addresses = [engine.address for engine in engines]
    return [
        *task.rollout_flags, *task.train_flags, "--actor-num-gpus-per-node", "1", "--num-rollout", "2",
        "--rollout-external-engine-addrs", *addresses, "--router-api-key", KEY,
    ]  # fmt: skip


@pytest.mark.slow
def test_engines_of_others_learn_with_a_run_and_outlive_it_however_it_ends(task, engines, tmp_path):
    flags = flags_of_a_run(task, engines)
    pids = [engine.process.pid for engine in engines]
    process = TrainProcess([*flags, "--check-weight-update-equal"], tmp_path / "first").finish(300)
    assert "weight check: " in process.output() and "2 engines are ready behind the router" in process.output()
    differences = process.scalars("train/train_rollout_logprob_abs_diff")
    assert set(differences) == {0, 1} and max(differences.values()) <= 1e-5
    # A push before the first rollout and one after each of two.
    assert [engine.weight_version for engine in engines] == ["3", "3"]
    assert all(engine.generates() and engine.is_out_of_all_groups() for engine in engines)

    held = ["--custom-generate-function-path", f"{PLUG_INS}:marked_generate"]
    for number, status in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        directory = tmp_path / f"signal {number}"
        with TrainProcess([*flags, *held], directory, {"E2E_HOLD_ROLLOUT": "1"}) as process:
            process.wait_for_line("holding rollout 1", 300)
            assert [engine.weight_version for engine in engines] == ["2", "2"], "versions are those of the run"
            if number == signal.SIGINT:
                process.send_signal_to_group(number)
            else:
                process.send_signal_to_driver(number)
            assert process.wait(60) == status, process.output()
            process.assert_no_process_left()
        assert [engine.process.poll() for engine in engines] == [None, None]
        assert all(engine.generates() for engine in engines)
        # Nobody was there to leave the groups behind the back of a killed driver: the next run does.
        assert all(engine.is_out_of_all_groups() for engine in engines) or number == signal.SIGKILL
    assert [engine.process.pid for engine in engines] == pids


@pytest.mark.slow
def test_engines_that_register_at_the_router_of_a_run_generate_for_it_and_outlive_it(task, engines, tmp_path):
    flags = [
        *task.rollout_flags, "--debug-rollout-only", "--rollout-num-gpus", "0", "--router-api-key", KEY, "--num-rollout", "2",
        "--save-debug-rollout-data", tmp_path / "{rollout_id}.pt",
    ]  # fmt: skip
    versions = [engine.weight_version for engine in engines]
    with TrainProcess(flags, tmp_path / "run") as process:
        line = process.wait_for_line("waiting for engines that register at the router", 300)
        url = re.search(r"POST (\S+/workers)", line)[1]
        headers = {"Authorization": f"Bearer {KEY}"}
        for engine in engines:
            worker = {"url": f"http://{engine.address}", "api_key": KEY}
            assert requests.post(url, json=worker, headers=headers, timeout=60).ok
        process.wait_for_success(300)
        process.assert_no_process_left()
    for rollout_id in range(2):
        samples = torch.load(tmp_path / f"{rollout_id}.pt", weights_only=True)["samples"]
        assert len(samples) == ROLLOUT_BATCH_SIZE * SAMPLES_PER_PROMPT
        assert all(sample["status"] in ("completed", "truncated") and sample["response_length"] for sample in samples)
    assert [engine.process.poll() for engine in engines] == [None, None]
    assert [engine.weight_version for engine in engines] == versions
    assert all(engine.generates() for engine in engines)


@pytest.mark.slow
@pytest.mark.parametrize("tolerance", [[], ["--use-fault-tolerance"]], ids=["the run ends", "the run goes on"])
def test_an_engine_that_ends_is_named_and_the_others_live(task, engines, tmp_path, tolerance):
    """Also where the others are as a killed run has left them. Nobody starts another one in its place."""
    other, mortal = engines[0], PlainEngine(task.model, tmp_path / "mortal.log")
    held = ["--custom-generate-function-path", f"{PLUG_INS}:marked_generate"]
    flags = [*flags_of_a_run(task, [other, mortal]), *held, *tolerance]
    try:
        with TrainProcess(flags, tmp_path / "run", {"E2E_HOLD_ROLLOUT": "1"}) as process:
            process.wait_for_line("holding rollout 1", 300)
            mortal.end()
            if tolerance:
                process.wait_for_line("engine 1 is given up", 60)
                (process.directory / "go").touch()
            assert process.wait(120) == (0 if tolerance else 1), process.output()
            process.assert_no_process_left()
    finally:
        mortal.end()
    output = process.output()
    assert f"engine 1 died: nobody listens at http://{mortal.address}" in output
    assert ("the run goes on without it" in output.lower()) == bool(tolerance) and "a new server" not in output
    assert other.process.poll() is None
    wait_until(other.generates)
    assert other.is_out_of_all_groups()
    # The first push, and those after both rollouts where these are made.
    assert other.weight_version == ("3" if tolerance else "2")


def test_engines_that_are_not_there_end_a_run_before_anything_starts(task, tmp_path):
    with reserve_port("127.0.0.1", random_port_start(33000)) as nobody:
        address = f"127.0.0.1:{nobody.port}"
        words = ["--actor-num-gpus-per-node", "1", "--num-rollout", "2", "--rollout-external-engine-addrs", address]
        with TrainProcess([*task.rollout_flags, *task.train_flags, *words], tmp_path) as process:
            assert process.wait(100) == 2, process.output()
            process.assert_no_process_left()
    assert f"ERROR: --rollout-external-engine-addrs {address}: no answer (nobody listens there)" in process.output()
    assert "starting Ray" not in process.output() and not (tmp_path / "tensorboard").exists()
