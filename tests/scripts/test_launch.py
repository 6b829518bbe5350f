"""What a launch script does with Ray: joins or starts, submits, and ends what it started and nothing else."""

import json
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.shell_arrays import ROOT, bash, script_environment
from tests.support.stub_ray import calls, make_stub_ray

ONE_NODE = ROOT / "scripts" / "run-qwen3-4B.sh"
MANY_NODES = ROOT / "scripts" / "run-deepseek-r1.sh"


@pytest.fixture
def stub(tmp_path: Path) -> dict[str, str]:
    return make_stub_ray(tmp_path)


def submission(stub: dict[str, str]) -> list[str]:
    return shlex.split(next(line for line in calls(stub) if line.startswith("job submit")), posix=True)


def runtime_env(stub: dict[str, str]) -> dict[str, str]:
    line = next(line for line in calls(stub) if line.startswith("job submit"))
    return json.loads(re.search(r"--runtime-env-json (\{.*?\}\}) --", line)[1])["env_vars"]


def test_joins_the_cluster_of_ray_address(stub, tmp_path: Path) -> None:
    result = bash(f"bash {ONE_NODE} --seed 7", cwd=tmp_path, RAY_ADDRESS="http://10.0.0.1:8265", **stub)
    assert result.returncode == 0, result.stderr
    words = submission(stub)
    assert words[words.index("--address") + 1] == "http://10.0.0.1:8265"
    assert f"-- env -C {tmp_path} " in " ".join(words)
    assert words[-2:] == ["--seed", "7"]
    assert [line.split()[0] for line in calls(stub)] == ["job"]  # nothing started, nothing stopped


def test_joins_the_head_of_cluster_sh_and_leaves_it_running(stub) -> None:
    head = "bash scripts/cluster.sh head"
    result = bash(
        f"{head} && bash {ONE_NODE} && bash scripts/cluster.sh status && bash scripts/cluster.sh stop",
        NUM_GPUS="4", RAY_PORT="21379", DASHBOARD_PORT="21265", **stub,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert [line.split()[0] for line in calls(stub)] == ["get-auth-token", "start", "job", "status"]
    assert "--address http://127.0.0.1:21265" in next(line for line in calls(stub) if line.startswith("job"))


def test_joins_a_head_that_was_started_by_hand(stub, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gcs:
        address = f"127.0.0.1:{gcs.getsockname()[1]}"
        (tmp_path / "ray").rename(tmp_path / "ray-program")
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        result = bash(f"bash {ONE_NODE}", **{**stub, "RAY": str(tmp_path / "ray-program")})
    assert result.returncode == 0, result.stderr
    assert [line.split()[:4] for line in calls(stub)] == [["job", "submit", "--address", address]]


def test_starts_a_head_of_its_own_and_ends_it(stub, bystander) -> None:
    result = bash(f"bash {ONE_NODE}", NUM_GPUS="8", RAY_AUTH_TOKEN="t", **stub)
    assert result.returncode == 0, result.stdout + result.stderr
    assert [line.split()[0] for line in calls(stub)] == ["start", "job"]
    assert "--num-gpus 8" in calls(stub)[0] and "--node-ip-address 127.0.0.1" in calls(stub)[0]
    ended = re.search(r"ended the head \(process (\d+)\)", result.stdout)
    assert not Path(f"/proc/{ended[1]}").exists()
    assert bystander.poll() is None


def test_exit_status_is_the_jobs_and_the_head_ends_all_the_same(stub) -> None:
    result = bash(f"bash {ONE_NODE}", NUM_GPUS="8", STUB_JOB_STATUS="3", **stub)
    assert result.returncode == 3
    assert "ended the head" in result.stdout


def test_interrupt_stops_the_job_and_the_own_head(stub) -> None:
    environment = script_environment(NUM_GPUS="8", STUB_JOB_SECONDS="60", **stub)
    with subprocess.Popen(["bash", str(ONE_NODE)], env=environment, stdout=subprocess.PIPE, text=True) as process:
        wait_until(lambda: any(line.startswith("job submit") for line in calls(stub)))
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 143
    assert [line.split()[:2] for line in calls(stub)][-1] == ["job", "stop"]
    assert calls(stub)[-1].split()[-1] in next(line for line in calls(stub) if line.startswith("job submit"))
    assert "ended the head" in output


def test_a_run_of_many_nodes_starts_no_head_of_its_own(stub) -> None:
    result = bash(f"bash {MANY_NODES}", NUM_GPUS="8", **stub)
    assert result.returncode == 2
    assert "needs 16 nodes" in result.stderr and "cluster.sh head" in result.stderr
    assert calls(stub) == []


def test_a_missing_ray_is_said(stub) -> None:
    result = bash(f"bash {ONE_NODE}", **{**stub, "RAY": "/nowhere/ray"})
    assert result.returncode == 2
    assert "/nowhere/ray" in result.stderr and "install" in result.stderr


@pytest.mark.parametrize("links, expected", [("GPU0  X  NV18", "1"), ("GPU0  X  PHB", "0")])
def test_environment_of_the_run(stub, tmp_path: Path, links: str, expected: str) -> None:
    """NVLS follows the links that nvidia-smi shows; the key of a tracker stays out."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(f"#!/bin/sh\necho '{links}'\n")
    smi.chmod(0o755)
    path = bash('printf %s "$PATH"').stdout
    result = bash(
        f"bash {ONE_NODE}", RAY_ADDRESS="http://h:1", WANDB_API_KEY="s3cret", PATH=f"{smi.parent}:{path}", **stub
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert runtime_env(stub) == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_NVLS_ENABLE": expected, "PYTHONPATH": str(ROOT)
    }  # fmt: skip
    assert "s3cret" not in "\n".join(calls(stub)) + result.stdout + result.stderr


def test_scripts_add_to_the_environment(stub) -> None:
    script = ROOT / "scripts" / "low_precision" / "run-kimi-k2-Thinking-int4.sh"
    assert bash(f"bash {script}", RAY_ADDRESS="http://h:1", **stub).returncode == 0
    added = {name: value for name, value in runtime_env(stub).items() if name.startswith("OPEN_")}
    assert added == {"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1", "OPEN_TRAINING_INT4_GROUP_SIZE": "32"}


def test_json_of_the_environment_is_escaped() -> None:
    library = f"set -euo pipefail; source {ROOT}/scripts/lib/launch.sh"
    result = bash(f"{library}; RUNTIME_ENV=([A]=$'q\"b\\\\s\\nn' [B]=); runtime_env_json")
    assert json.loads(result.stdout) == {"env_vars": {"A": 'q"b\\s\nn', "B": ""}}


def checks(stub: dict[str, str]) -> list[str]:
    log = Path(stub["STUB_LOG"] + ".python")
    return log.read_text().splitlines() if log.exists() else []


def test_a_run_that_would_be_refused_is_refused_before_ray_starts_and_once(stub) -> None:
    result = bash(f"bash {ONE_NODE}", NUM_GPUS="8", STUB_CHECK_STATUS="2", **stub)
    assert result.returncode == 2
    assert (result.stdout + result.stderr).count("--lr 0: refused") == 1
    assert "MODEL=toy NUM_GPUS=2 bash scripts/run-qwen3-4B.sh" in result.stderr
    assert calls(stub) == []
    assert [line.split()[-1] for line in checks(stub)] == ["--check"]


def test_a_run_that_has_nothing_left_to_do_ends_before_ray_starts(stub) -> None:
    result = bash(f"bash {ONE_NODE}", NUM_GPUS="8", STUB_CHECK="nothing left to do: 9 rollouts are done", **stub)
    assert (result.returncode, result.stdout) == (0, "run-qwen3-4B: nothing left to do: 9 rollouts are done\n")
    assert calls(stub) == []


def test_too_few_gpus_are_told_before_ray_starts(stub) -> None:
    result = bash(f"bash {ONE_NODE}", NUM_GPUS="2", **stub)
    assert result.returncode == 2
    assert "the run needs 4 GPUs, and there are 2" in result.stderr and "MODEL=toy" in result.stderr
    assert calls(stub) == []


def test_without_gpus_the_own_head_has_what_the_run_needs(stub) -> None:
    result = bash(f"bash {ONE_NODE}", STUB_CHECK="ready; the run needs 5000 GPUs and 5001 CPUs", **stub)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "--num-gpus 5000 --num-cpus 5001 " in next(line for line in calls(stub) if line.startswith("start"))
    assert "said beside" not in result.stdout + result.stderr  # the job's log has it


def test_what_lies_on_another_machine_is_not_checked_here(stub) -> None:
    for address, count in (("http://10.0.0.1:8265", 0), ("http://127.0.0.1:8265", 1)):
        assert bash(f"bash {ONE_NODE}", RAY_ADDRESS=address, **stub).returncode == 0
        assert len(checks(stub)) == count


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen]:
    """A process that looks like a part of Ray and must survive."""
    process = subprocess.Popen(["bash", "-c", "exec -a raylet sleep 60"])
    yield process
    process.kill()
    process.wait()


def wait_until(condition, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)
