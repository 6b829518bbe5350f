"""Engines and routers that die or hang in the middle of a run with `--use-fault-tolerance`: the same run goes on, with right
log-probs."""

from __future__ import annotations

import os
import re
import signal

import psutil
import pytest
import torch

from tests.support.models.tiny_task import PLUG_INS, ROLLOUT_BATCH_SIZE, SAMPLES_PER_PROMPT
from tests.support.processes.train_process import TrainProcess
from tests.support.processes.waiting import runs, wait_until

pytestmark = pytest.mark.slow
ROLLOUTS = range(3)
LOG_PROB_GATE = 1e-5
# From the death of an engine to the first answer of its successor: it starts, and gets its weights.
REPLACED_SECONDS = 900
# Of one that is killed while it is stopped, its death is to be the news, and not its silence before that.
PATIENT_CHECKS = ["--rollout-health-check-interval", "1", "--rollout-health-check-timeout", "900"]
HURRIED_CHECKS = ["--rollout-health-check-interval", "1", "--rollout-health-check-timeout", "30"]


def kill_with_requests_in_flight(process: TrainProcess, go) -> None:
    """Requests that nobody answers, and then nobody can."""
    scheduler = min(process.schedulers())
    os.kill(scheduler, signal.SIGSTOP)
    go.touch()
    process.wait_for_line("going on with rollout 1", 300)
    os.kill(scheduler, signal.SIGKILL)


def kill_before_any_request(process: TrainProcess, go) -> None:
    os.kill(min(process.schedulers()), signal.SIGKILL)
    process.wait_for_line("a new server starts in its place", 300)
    go.touch()


def hang(process: TrainProcess, go) -> None:
    os.kill(min(process.schedulers()), signal.SIGSTOP)
    go.touch()


def hang_up_front(process: TrainProcess, go) -> None:
    """The process that takes the requests stops, and the scheduler goes on."""
    server = psutil.Process(min(process.schedulers()))
    while "server_process" not in " ".join(server.cmdline()):
        server = server.parent()
    server.suspend()
    go.touch()


ONE_RANK = ["--actor-num-gpus-per-node", "1"]
# Each has a part of every weight that a new server gets.
TWO_OF_FSDP = ["--train-backend", "fsdp", "--actor-num-gpus-per-node", "2"]


@pytest.mark.parametrize(
    ("trainer", "engines", "fault", "cause"),
    [
        pytest.param(ONE_RANK, 1, kill_with_requests_in_flight, r"engine 0 died: its scheduler_0 .* SIGKILL",
                     id="the only engine"),
        pytest.param(ONE_RANK, 2, kill_with_requests_in_flight, r"engine \d died: its scheduler_0 .* SIGKILL", id="one of two"),
        pytest.param(ONE_RANK, 1, kill_before_any_request, r"engine 0 died: its scheduler_0 .* SIGKILL",
                     id="before any request"),
        pytest.param(ONE_RANK, 2, hang, r"engine \d hangs: it gave no token within 30 s", id="one hangs"),
        pytest.param(ONE_RANK, 1, hang, r"engine 0 hangs: it gave no token within 30 s", id="the only one hangs"),
        pytest.param(ONE_RANK, 1, hang_up_front, r"engine 0 hangs: it gave no token", id="its front end hangs"),
        pytest.param(TWO_OF_FSDP, 1, kill_with_requests_in_flight, r"engine 0 died: its scheduler_0 .* SIGKILL",
                     id="the only engine, FSDP"),
    ],
)  # fmt: skip
def test_the_run_goes_on_with_a_new_server_that_has_the_weights(task, tmp_path, trainer, engines, fault, cause):
    flags = [
        *task.rollout_flags, *task.train_flags, *trainer, "--rollout-num-gpus", engines,
        "--num-rollout", len(ROLLOUTS), "--use-fault-tolerance",
        *(HURRIED_CHECKS if fault in (hang, hang_up_front) else PATIENT_CHECKS),
        "--custom-generate-function-path", f"{PLUG_INS}:marked_generate",
        "--save-debug-rollout-data", tmp_path / "dumps/{rollout_id}.pt",
    ]  # fmt: skip
    with TrainProcess(flags, tmp_path, {"E2E_HOLD_ROLLOUT": "1"}) as process:
        process.wait_for_line("holding rollout 1", 900)
        before = list(process.schedulers())
        assert len(before) == engines
        fault(process, tmp_path / "go")
        process.wait_for_line(r"engine \d has a new server", REPLACED_SECONDS)
        if engines == 1:
            # Nobody else could answer: it gets the weights in the middle of the rollout. Beside another one it may as well be
            # the next push that brings them.
            process.wait_for_line("engine 0: weights of version 2", REPLACED_SECONDS)
        now = wait_until(lambda: found if len(found := list(process.schedulers())) == engines else None)
        assert len(set(now) - set(before)) == 1, "one server is new, and the old one is gone"
        process.wait_for_success(900)
        process.assert_no_process_left()
    output = process.output()
    assert re.search(cause, output) and "ERROR" not in output and "Traceback" not in output
    # The new server got the weights of the last push under its name, and the run compared its log-probs.
    assert_all_is_there_and_right(process, tmp_path)


THROUGH_DISK = ["--update-weight-transport", "disk", "--update-weight-disk-dir", "pushes"]
# How weights travel -> the number of engines, flags, the order that opens a push, and that of each of its parts.
PUSHES = {
    "a process group, the only engine": (1, [], "begin_weight_update", "update_weights_from_distributed"),
    "a process group, one of two": (2, [], "begin_weight_update", "update_weights_from_distributed"),
    "shared handles": (1, ["--colocate"], "begin_weight_update", "update_weights_from_tensor"),
    "files": (2, THROUGH_DISK, "pause_generation", None),
    "deltas": (
        2, [*THROUGH_DISK, "--update-weight-mode", "delta", "--update-weight-local-checkpoint-dir", "local"],
        "pause_generation", None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", PUSHES)
def test_an_engine_that_is_killed_within_a_push_is_replaced_and_nobody_serves_half_of_the_weights(task, tmp_path, way):
    """Between two buckets, or while it loads files."""
    engines, further, opening, part = PUSHES[way]
    flags = [
        *task.rollout_flags, *task.train_flags, *ONE_RANK, "--rollout-num-gpus", engines, *further,
        # A bucket for each tensor, so that there is a moment between two.
        "--update-weight-buffer-size", "1024", "--sglang-log-level", "info",
        "--num-rollout", len(ROLLOUTS), "--use-fault-tolerance", *PATIENT_CHECKS,
        "--custom-generate-function-path", f"{PLUG_INS}:marked_generate",
        "--save-debug-rollout-data", tmp_path / "dumps/{rollout_id}.pt",
    ]  # fmt: skip
    with TrainProcess(flags, tmp_path, {"E2E_HOLD_ROLLOUT": "1"}) as process:
        process.wait_for_line("holding rollout 1", 900)
        log = process.event_directory / "logs/engine_0.log"
        (scheduler,) = [pid for pid in process.schedulers() if os.readlink(f"/proc/{pid}/fd/1") == str(log)]

        def pushes() -> list[list[str]]:
            """What engine 0 did, by push: from the opening of one to that of the next."""
            _, *told = re.split(rf"POST /{opening} ", log.read_text(errors="replace"))
            return [re.findall(r"POST /(\w+) ", of_one) for of_one in told]

        assert len(pushes()) == 2
        (tmp_path / "go").touch()
        wait_until(lambda: len(found := pushes()) == 3 and (part is None or part in found[-1]), 300)
        os.kill(scheduler, signal.SIGKILL)
        wait_until(lambda: not runs(scheduler), 60)
        first, _, last = pushes()
        assert "continue_generation" not in last and (part is None or 0 < last.count(part) < first.count(part))
        process.wait_for_line("engine 0 has a new server", REPLACED_SECONDS)
        process.wait_for_success(900)
        process.assert_no_process_left()
    output = process.output()
    assert re.search(r"engine 0 died( \(/\w+\))?: its scheduler_0 .* SIGKILL", output) and "Traceback" not in output
    assert_all_is_there_and_right(process, tmp_path)


def router_of(process: TrainProcess) -> int:
    (router,) = [pid for pid, command in process.processes().items() if "router_process" in command]
    return router


def num_connections(router: int) -> int:
    """How many connections clients have to the ports on which this process listens."""
    found = psutil.Process(router).net_connections("tcp")
    ports = {connection.laddr.port for connection in found if connection.status == psutil.CONN_LISTEN}
    return sum(each.status == psutil.CONN_ESTABLISHED and each.laddr.port in ports for each in found)


def test_the_run_goes_on_when_its_router_is_killed_with_requests_in_flight(task, tmp_path):
    flags = [
        *task.rollout_flags, *task.train_flags, *ONE_RANK, "--rollout-num-gpus", "2",
        "--num-rollout", len(ROLLOUTS), "--use-fault-tolerance", *PATIENT_CHECKS,
        # An attempt that a router takes with it does not count.
        "--http-max-retries", "1",
        "--custom-generate-function-path", f"{PLUG_INS}:marked_generate",
        "--save-debug-rollout-data", tmp_path / "dumps/{rollout_id}.pt",
    ]  # fmt: skip
    with TrainProcess(flags, tmp_path, {"E2E_HOLD_ROLLOUT": "1"}) as process:
        process.wait_for_line("holding rollout 1", 900)
        engines, router = sorted(process.schedulers()), router_of(process)
        # Requests that nobody answers while their router dies.
        for engine in engines:
            os.kill(engine, signal.SIGSTOP)
        (tmp_path / "go").touch()
        process.wait_for_line("going on with rollout 1", 300)
        wait_until(lambda: num_connections(router) >= ROLLOUT_BATCH_SIZE * SAMPLES_PER_PROMPT)
        os.kill(router, signal.SIGKILL)
        process.wait_for_line("another router starts in its place", 300)
        for engine in engines:
            os.kill(engine, signal.SIGCONT)
        process.wait_for_line(r"there is a router at \S+ again, with 2 engines", 300)
        assert sorted(process.schedulers()) == engines and router_of(process) != router
        process.wait_for_success(900)
        process.assert_no_process_left()
    output = process.output()
    assert "the router died: ended by SIGKILL" in output and "ERROR" not in output and "Traceback" not in output
    assert re.search("/generate failed: (ServerDisconnected|ClientOS)Error", output), "requests were lost with it"
    assert "has a new server" not in output, "no engine was taken for dead"
    assert_all_is_there_and_right(process, tmp_path)


def assert_all_is_there_and_right(process: TrainProcess, directory) -> None:
    """Every rollout has all of its samples, by the weights of its push, and the trainer has the log-probs of the engines."""
    # The push of the first weights is version 1, that after rollout 0 is 2.
    for rollout_id in ROLLOUTS:
        samples = torch.load(directory / f"dumps/{rollout_id}.pt", weights_only=True)["samples"]
        assert len(samples) == ROLLOUT_BATCH_SIZE * SAMPLES_PER_PROMPT
        assert {version for sample in samples for version in sample["weight_versions"]} == {str(rollout_id + 1)}
    differences = process.scalars("train/train_rollout_logprob_abs_diff")
    assert sorted(differences) == list(ROLLOUTS)
    assert all(0 < difference <= LOG_PROB_GATE for difference in differences.values()), differences
