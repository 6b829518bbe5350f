"""scripts/cluster.sh: what it refuses and says, against a stand-in for `ray`; and once with real Ray nodes."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.utils.ports import reserve_port
from tests.support.processes.stub_ray import calls, make_stub_ray
from tests.support.tables.shell_arrays import ROOT, bash

CLUSTER = "bash scripts/cluster.sh"


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[dict[str, str]]:
    # Nobody listens at ports that are held.
    with reserve_port("127.0.0.1", 26000) as of_ray, reserve_port("127.0.0.1", 26000) as of_dashboard:
        ports = {"RAY_PORT": str(of_ray.port), "DASHBOARD_PORT": str(of_dashboard.port)}
        yield {**make_stub_ray(tmp_path), **ports, "NUM_GPUS": "4", "CONNECT_SECONDS": "2", "START_SECONDS": "3",
               "STATUS_SECONDS": "0"}  # fmt: skip


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def nodes_of(stub: dict[str, str]) -> list[str]:
    """Process numbers of stand-ins that still run."""
    found = subprocess.run(["ps", "-e", "-o", "pid=,args="], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in found.stdout.splitlines() if stub["RAY"] + " start" in line]


def test_help_explains_all_commands() -> None:
    result = bash(f"{CLUSTER} --help")
    assert result.returncode == 0
    assert all(f"cluster.sh {command}" in result.stdout for command in ("head", "worker", "status", "stop"))


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        ("", {}, ["head, worker HEAD_ADDRESS, status or stop"]),
        ("haed", {}, ["'haed'"]),
        ("worker", {}, ["head's address", "worker 10.0.0.1:"]),
        ("worker :x", {}, ["':x'", "10.0.0.1:6379"]),
        ("head", {"RAY": "/nowhere/ray"}, ["/nowhere/ray", "requirements/gpu.txt"]),
        ("head", {"NUM_GPUS": "many"}, ["NUM_GPUS='many'", "NUM_GPUS=8"]),
        ("head", {"NUM_GPUS": ""}, ["no GPU was found", "NUM_GPUS=0"]),
        ("head", {"RAY_PORT": "99999"}, ["RAY_PORT='99999'"]),
        ("head", {"RAY_AUTH_TOKEN_PATH": "/nowhere/token"}, ["/nowhere/token"]),
        ("status x", {}, ["'x'"]),
    ],
)
def test_refuses_and_says_what_would_work(stub, arguments: str, variables: dict[str, str], said: list[str]) -> None:
    result = bash(f"{CLUSTER} {arguments}", **{**stub, **variables})
    assert result.returncode == 2
    assert all(words in result.stderr for words in said), result.stderr
    assert not any(line.startswith("start") for line in calls(stub))


@pytest.mark.parametrize("variable", ["RAY_PORT", "DASHBOARD_PORT"])
def test_a_taken_port_is_named_with_a_free_one(stub, variable: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = bash(f"{CLUSTER} head", **{**stub, variable: str(port)})
    assert result.returncode == 2
    assert f"port {port} is taken" in result.stderr
    assert int(re.search(rf"{variable}=(\d+) bash", result.stderr)[1]) > port


def test_fewer_gpus_than_wanted(stub, tmp_path: Path) -> None:
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\nprintf 'GPU 0: A\\nGPU 1: A\\n'\n")
    smi.chmod(0o755)
    result = bash(f"{CLUSTER} head", **{**stub, "PATH": f"{smi.parent}:{os.environ['PATH']}"})
    assert result.returncode == 2
    assert "NUM_GPUS=4, but this machine shows 2 GPUs" in result.stderr


def test_an_unreachable_head_is_given_up_in_time(stub) -> None:
    port = free_port()
    result = bash(f"{CLUSTER} worker 127.0.0.1:{port}", **stub)
    assert result.returncode == 2
    assert f"nobody answers at 127.0.0.1:{port} within 2 seconds" in result.stderr
    assert "firewall" in result.stderr


def test_a_worker_needs_the_heads_token(stub) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        result = bash(f"{CLUSTER} worker 127.0.0.1:{head.getsockname()[1]}", **stub)
    assert result.returncode == 2
    assert "has no token" in result.stderr and "RAY_AUTH_TOKEN" in result.stderr


@pytest.mark.parametrize(
    ("start", "said"),
    [("mismatch", "another version of Ray or Python"), ("token", "does not accept this node's token"),
     ("deep", "set TMPDIR (or RAY_TEMP_DIR"), ("hang", "did not start within 3 seconds")],
)  # fmt: skip
def test_a_failed_start_is_explained_and_leaves_nothing(stub, start: str, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        result = bash(f"{CLUSTER} worker {address}", STUB_START=start, RAY_AUTH_TOKEN="t", **stub)
    assert result.returncode == 1
    assert said in result.stderr and "ray.log" in result.stderr
    assert nodes_of(stub) == []
    assert "no Ray node was started" in bash(f"{CLUSTER} status", **stub).stdout


def test_head_makes_a_token_and_says_what_the_others_call(stub) -> None:
    result = bash(f"{CLUSTER} head; {CLUSTER} head; {CLUSTER} status 4; {CLUSTER} status 12; {CLUSTER} stop", **stub)
    assert f"bash scripts/cluster.sh worker 127.0.0.1:{stub['RAY_PORT']}" in result.stdout
    assert "copy ~/.ray/auth_token" in result.stdout
    assert Path(stub["STUB_LOG"] + ".auth").read_text() == "token\n"
    assert "runs here already" in result.stderr  # the second head
    assert "4 GPUs, 4 wanted: complete" in result.stdout
    assert "4 of 12 GPUs: 8 are missing" in result.stdout
    assert nodes_of(stub) == []


def test_a_dry_run_says_what_would_run_and_leaves_nothing(stub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    # How many threads a process takes is none of the cluster's business.
    result = bash(f"{CLUSTER} head --dry-run", **{**stub, "HOME": str(home), "OMP_NUM_THREADS": "640"})
    assert result.returncode == 0, result.stderr
    token, start = result.stdout.splitlines()[-2:]
    assert token.endswith("get-auth-token --generate")
    ports = f"--port {stub['RAY_PORT']} --dashboard-host 127.0.0.1 --dashboard-port {stub['DASHBOARD_PORT']}"
    assert start == (
        f"RAY_AUTH_MODE=token {stub['RAY']} start --head {ports} --dashboard-agent-listen-port 0 "
        f"--num-gpus 4 --num-cpus {max(len(os.sched_getaffinity(0)), 5)} --disable-usage-stats --block"
    )
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        joining = bash(f"{CLUSTER} worker {address} --dry-run", RAY_AUTH_TOKEN="t", **stub).stdout
    assert f" start --address {address} --dashboard-agent-listen-port 0 --num-gpus 4 " in joining
    assert calls(stub) == [] and list(home.iterdir()) == [] and not Path(stub["CLUSTER_DIR"]).exists()
    assert bash(f"{CLUSTER} head --dry-run", **{**stub, "NUM_GPUS": "many"}).returncode == 2


def test_a_head_of_this_machine_alone(stub) -> None:
    result = bash(f"{CLUSTER} head; {CLUSTER} status; {CLUSTER} stop", SLIME_HOST_IP="127.0.0.1", **stub)
    assert result.returncode == 0, result.stderr
    started = next(line for line in calls(stub) if line.startswith("start"))
    assert "--node-ip-address 127.0.0.1" in started
    # Without the variable Ray listens on all interfaces, and looks for the head at the machine's other address.
    assert Path(stub["STUB_LOG"] + ".alone").read_text().split() == ["start", "status"]
    assert "serves this machine alone" in result.stdout and "cluster.sh worker" not in result.stdout


def test_a_worker_of_another_machines_head_does_not_announce_itself_on_loopback(stub) -> None:
    for address in ("127.0.0.1", "127.0.0.2", "localhost"):
        result = bash(f"{CLUSTER} worker 192.0.2.1:6379", SLIME_HOST_IP=address, **stub)
        assert result.returncode == 2
        assert f"SLIME_HOST_IP={address}" in result.stderr and "192.0.2.1" in result.stderr
    # Head and worker on one machine.
    with socket.create_server(("127.0.0.1", 0)) as head:
        port = head.getsockname()[1]
        joining = bash(
            f"{CLUSTER} worker 127.0.0.1:{port} --dry-run", SLIME_HOST_IP="127.0.0.1", RAY_AUTH_TOKEN="t", **stub
        )
    assert joining.returncode == 0 and "--node-ip-address 127.0.0.1" in joining.stdout


def test_a_head_for_other_nodes_is_not_kept_to_itself(stub) -> None:
    bash(f"{CLUSTER} head; {CLUSTER} stop", SLIME_HOST_IP="127.0.0.2", **stub)
    assert any(line.startswith("start") for line in calls(stub))
    assert not Path(stub["STUB_LOG"] + ".alone").exists()


def test_a_token_of_the_user_is_closed_to_others(stub) -> None:
    token = Path(stub["HOME"]) / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("t")
    token.chmod(0o644)
    assert bash(f"{CLUSTER} head && {CLUSTER} stop", **stub).returncode == 0
    assert token.stat().st_mode & 0o777 == 0o600


def test_a_planned_stop_ends_nothing(stub) -> None:
    result = bash(f"{CLUSTER} head; {CLUSTER} stop --dry-run; {CLUSTER} status; {CLUSTER} stop", **stub)
    said = result.stdout.splitlines()
    planned = next(line for line in said if "would end the head" in line)
    pid = re.search(r"process (\d+)", planned)[1]
    assert f"cluster: ended the head (process {pid})" in said
    assert any(line.startswith(f"cluster: head, process {pid}") for line in said)


def test_without_tokens_when_asked(stub) -> None:
    result = bash(f"{CLUSTER} head && {CLUSTER} stop", RAY_AUTH_MODE="disabled", **stub)
    assert result.returncode == 0, result.stderr
    assert not any(line.startswith("get-auth-token") for line in calls(stub))
    assert "auth_token" not in result.stdout


def test_stop_ends_nothing_that_it_did_not_start(stub) -> None:
    """A file that names somebody else's process: the number was given away after our node ended."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
        directory = Path(stub["CLUSTER_DIR"])
        directory.mkdir()
        (directory / "node").write_text(f"role=head\npid={other.pid}\nstarted=1\naddress=127.0.0.1:1\nauth=token\n")
        result = bash(f"{CLUSTER} stop", **stub)
        survived = other.poll() is None
        other.kill()
    assert result.returncode == 0
    assert "nothing to stop" in result.stdout
    assert survived


@pytest.fixture
def another_ray() -> Iterator[None]:
    """The port that every Ray's agent takes unless another is asked for is taken, by a Ray that runs here or by the test."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(socket.create_server(("", 52365)))
        yield


@pytest.mark.slow
def test_real_nodes_form_a_cluster_and_run_a_job(tmp_path: Path, another_ray) -> None:
    """Head and worker of real Ray on free ports, a launch script's job on them, and the end of both."""
    directories = {"HOME": str(tmp_path / "home"), "RAY_TEMP_DIR": f"/tmp/slime-test-{os.getpid()}"}
    head = {**directories, "CLUSTER_DIR": str(tmp_path / "head"), "NUM_GPUS": "1"}
    worker = {**directories, "CLUSTER_DIR": str(tmp_path / "worker"), "NUM_GPUS": "2"}
    ports = {"RAY_PORT": str(free_port()), "DASHBOARD_PORT": str(free_port())}
    (tmp_path / "home").mkdir()
    program = tmp_path / "job.py"
    program.write_text(
        "import os, ray, sys\n"
        "if '--check' in sys.argv: sys.exit(print('ready; the run needs 3 GPUs'))\n"
        "ray.init(logging_level='ERROR')\n"
        "gpus = int(ray.cluster_resources()['GPU'])\n"
        "print('seen', gpus, os.getcwd(), os.environ['CUDA_DEVICE_MAX_CONNECTIONS'], sys.argv[-1])\n"
    )
    try:
        started = bash(f"{CLUSTER} head", **head, **ports)
        assert started.returncode == 0, started.stderr
        address = re.search(r"worker (\S+:\d+)", started.stdout)[1]
        joined = bash(f"{CLUSTER} worker {address}", **worker)
        assert joined.returncode == 0, joined.stderr
        complete = bash(f"{CLUSTER} status 3", **head)
        assert complete.returncode == 0, complete.stdout + complete.stderr
        run = bash(
            f"bash {ROOT}/scripts/run-qwen3-4B.sh 'a $HOME \"word\"'", cwd=tmp_path, TRAIN_SCRIPT=str(program), **head
        )  # fmt: skip
        assert run.returncode == 0, run.stdout + run.stderr
        assert f'seen 3 {tmp_path} 1 a $HOME "word"' in run.stdout
    finally:
        ended = [bash(f"{CLUSTER} stop", **node) for node in (worker, head)]
    assert [result.returncode for result in ended] == [0, 0]
    left = subprocess.run(["ps", "-e", "-o", "args="], capture_output=True, text=True, check=True).stdout
    assert directories["RAY_TEMP_DIR"] not in left
    shutil.rmtree(directories["RAY_TEMP_DIR"])
