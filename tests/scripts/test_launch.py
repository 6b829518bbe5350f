"""What a launch script does with Ray: joins or starts, submits, and ends what it started and nothing else."""

import functools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.stub_ray import calls, make_stub_ray
from tests.support.processes.waiting import runs, wait_until
from tests.support.tables.shell_arrays import ROOT, bash, script_environment

ONE_NODE = ROOT / "scripts" / "run-qwen3-4B.sh"
MANY_NODES = ROOT / "scripts" / "run-deepseek-r1.sh"


@pytest.fixture
def stub(tmp_path: Path) -> dict[str, str]:
    return make_stub_ray(tmp_path)


def submission(stub: dict[str, str]) -> list[str]:
    return Path(stub["STUB_LOG"] + ".submission").read_text().split("\0")[:-1]


def runtime_env(stub: dict[str, str]) -> dict[str, str]:
    words = submission(stub)
    return json.loads(words[words.index("--runtime-env-json") + 1])["env_vars"]


def job(stub: dict[str, str]) -> list[str]:
    """The words of the job, of the command line or out of the file that is submitted in their place."""
    words = submission(stub)
    words = words[words.index("--") + 1 :]
    if words[0] == "bash":
        text = Path(stub["STUB_LOG"] + ".job").read_text()
        words = shlex.split(text.partition("exec ")[2])
    return words


def start_command(stub: dict[str, str]) -> list[str]:
    (value,) = [word.partition("=")[2] for word in job(stub) if word.startswith("SLIME_START_COMMAND=")]
    return shlex.split(value)


def test_joins_the_cluster_of_ray_address(stub, tmp_path: Path) -> None:
    result = bash(f"bash {ONE_NODE} --seed 7", cwd=tmp_path, RAY_ADDRESS="http://198.51.100.1:8265", **stub)
    assert result.returncode == 0, result.stderr
    words = submission(stub)
    assert words[words.index("--address") + 1] == "http://198.51.100.1:8265"
    assert words[words.index("--") + 1 :][:3] == ["env", "-C", str(tmp_path)]
    assert words[-2:] == ["--seed", "7"]
    assert [line.split()[0] for line in calls(stub)] == ["job"]  # nothing started, nothing stopped


@pytest.mark.parametrize("given", ["", "3"])
def test_a_job_has_the_threads_that_the_user_gave_and_not_those_that_ray_gives_it(stub, tmp_path, given: str) -> None:
    python = tmp_path / "python-of-the-run"
    python.write_text('#!/usr/bin/env bash\nprintf %s "${OMP_NUM_THREADS-unset}" >"$STUB_LOG.threads"\n')
    python.chmod(0o755)
    variables = {**stub, "OMP_NUM_THREADS": given, "PYTHON": str(python)}
    result = bash(f"bash {ONE_NODE}", RAY_ADDRESS="http://127.0.0.1:8265", **variables)
    assert result.returncode == 0, result.stderr
    assert runtime_env(stub).get("OMP_NUM_THREADS", "") == given
    ran = bash(f"bash {stub['STUB_LOG']}.job", **{**stub, "OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stderr
    assert Path(stub["STUB_LOG"] + ".threads").read_text() == (given or "unset")


def test_joins_the_head_of_cluster_sh_and_leaves_it_running(stub) -> None:
    head = "bash scripts/cluster.sh head"
    result = bash(
        f"{head} && bash {ONE_NODE} && bash scripts/cluster.sh status && bash scripts/cluster.sh stop",
        NUM_GPUS="4", RAY_PORT="21379", DASHBOARD_PORT="21265", **stub,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert [line.split()[0] for line in calls(stub)] == ["get-auth-token", "start", "job", "status"]
    assert "--address http://127.0.0.1:21265" in next(line for line in calls(stub) if line.startswith("job"))


@pytest.mark.parametrize("named", ["RAY_TMPDIR", "TMPDIR"])
def test_joins_a_head_that_was_started_by_hand(stub, tmp_path: Path, named: str) -> None:
    """Ray takes the directory for temporary files where it has none of its own."""
    with socket.create_server(("127.0.0.1", 0)) as gcs:
        address = f"127.0.0.1:{gcs.getsockname()[1]}"
        (tmp_path / "ray").rename(tmp_path / "ray-program")
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        places = {"RAY_TMPDIR": "", "TMPDIR": str(tmp_path / "empty"), named: str(tmp_path)}
        (tmp_path / "empty").mkdir()
        result = bash(f"bash {ONE_NODE}", **{**stub, "RAY": str(tmp_path / "ray-program"), **places})
    assert result.returncode == 0, result.stderr
    assert [line.split()[:4] for line in calls(stub)] == [["job", "submit", "--address", address]]


def test_starts_a_head_of_its_own_and_ends_it(stub, bystander) -> None:
    result = bash(f"bash {ONE_NODE}", NUM_GPUS="8", RAY_AUTH_TOKEN="t", **stub)
    assert result.returncode == 0, result.stdout + result.stderr
    assert [line.split()[0] for line in calls(stub)] == ["start", "job"]
    assert "--num-gpus 8" in calls(stub)[0] and "--node-ip-address 127.0.0.1" in calls(stub)[0]
    ended = re.search(r"ended the head \(process (\d+)\)", result.stdout)
    assert not runs(int(ended[1]))
    assert bystander.poll() is None


def test_exit_status_is_the_jobs_and_the_head_ends_all_the_same(stub) -> None:
    result = bash(f"bash {ONE_NODE}", NUM_GPUS="8", STUB_JOB_STATUS="3", **stub)
    assert result.returncode == 3
    assert "ended the head" in result.stdout


@pytest.mark.parametrize(
    ("settings", "submissions", "status"),
    [
        ({"STUB_REFUSALS": "1"}, 2, 0),
        ({"STUB_REFUSALS": "9", "START_SECONDS": "0"}, 1, 1),
        ({"STUB_REFUSALS": "1", "STUB_REFUSAL": "token is invalid"}, 1, 1),
    ],
)
def test_a_head_whose_agent_is_not_up_is_asked_again(stub, settings, submissions: int, status: int) -> None:
    """Within the patience with a start, under the same name, and for no other refusal."""
    result = bash(f"bash {ONE_NODE}", RAY_ADDRESS="http://198.51.100.1:8265", **settings, **stub)
    assert result.returncode == status, result.stderr
    assert len(calls(stub)) == submissions and len(set(calls(stub))) == 1
    assert settings.get("STUB_REFUSAL", "No available agent") in result.stderr
    assert not list(Path(stub["TMPDIR"]).glob("slime-submit-*"))


def test_interrupt_stops_the_job_and_the_own_head(stub) -> None:
    environment = script_environment(NUM_GPUS="8", STUB_JOB_SECONDS="600", **stub)
    with subprocess.Popen(["bash", str(ONE_NODE)], env=environment, stdout=subprocess.PIPE, text=True) as process:
        wait_until(lambda: any(line.startswith("job submit") for line in calls(stub)))
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 143
    assert [line.split()[:2] for line in calls(stub)][-1] == ["job", "stop"]
    assert calls(stub)[-1].split()[-1] in next(line for line in calls(stub) if line.startswith("job submit"))
    assert "ended the head" in output
    assert not list(Path(stub["TMPDIR"]).glob("slime-job-*"))


def test_a_script_that_is_a_job_itself_becomes_the_run(stub, tmp_path: Path) -> None:
    """Another job would go on when this one is stopped."""
    program = tmp_path / "run.py"
    program.write_text("import json, os, sys; print(json.dumps([os.getpid(), sys.argv[1:], dict(os.environ)]))")
    given = {"runtime_env": {"env_vars": {"MINE": 'a "b"'}}, "metadata": {"job_submission_id": "raysubmit_1"}}
    ray_says = {"RAY_ADDRESS": "198.51.100.1:6379", "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(given)}
    environment = script_environment(**{**stub, "PYTHON": sys.executable, "TRAIN_SCRIPT": str(program), **ray_says})
    with subprocess.Popen(
        ["bash", str(ONE_NODE), "--seed", "7"], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        output, _ = process.communicate(timeout=60)
    pid, words, variables = json.loads(output)
    assert (process.returncode, pid, words[-2:]) == (0, process.pid, ["--seed", "7"])
    assert not Path(stub["STUB_LOG"]).exists(), "Ray was asked for something"
    described = json.loads(variables["RAY_JOB_CONFIG_JSON_ENV_VAR"])
    assert described["metadata"] == given["metadata"]
    of_processes = described["runtime_env"]["env_vars"]
    assert of_processes.pop("MINE") == 'a "b"'
    assert of_processes["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert of_processes.items() <= variables.items()
    assert shlex.split(variables["SLIME_START_COMMAND"])[-3:] == [str(ONE_NODE), "--seed", "7"]
    assert variables["RAY_ADDRESS"] == ray_says["RAY_ADDRESS"]


def test_what_a_job_was_given_wins_over_what_its_script_sets(stub, tmp_path: Path) -> None:
    """As what the shell hands on does where a script submits. What else the machine has of that name does not."""
    program = tmp_path / "run.py"
    program.write_text("import json, os; print(json.dumps(dict(os.environ)))")
    of_job = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "PYTHONPATH": "/mine"}
    of_shell = {**of_job, "NCCL_ALGO": "Tree", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    config = json.dumps({"runtime_env": {"env_vars": of_job}})
    variables = {**stub, "PYTHON": sys.executable, "TRAIN_SCRIPT": str(program), "RAY_JOB_CONFIG_JSON_ENV_VAR": config}
    script = ROOT / "scripts" / "run-qwen2.5-0.5B-reproducibility.sh"
    result = bash(f"bash {script}", **variables, **of_shell)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    expected = {
        "CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "Tree", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": f"{ROOT}:/mine",
    }  # fmt: skip
    assert expected.items() <= found.items()
    of_processes = json.loads(found["RAY_JOB_CONFIG_JSON_ENV_VAR"])["runtime_env"]["env_vars"]
    assert expected.items() <= of_processes.items()


@pytest.mark.parametrize(("given", "size"), [({}, "128"), ({"OPEN_TRAINING_INT4_GROUP_SIZE": "32"}, "32")])
def test_a_check_sees_the_variables_of_the_script(stub, tmp_path: Path, given: dict[str, str], size: str) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "groups of $OPEN_TRAINING_INT4_GROUP_SIZE" >&2; exit 2\n')
    program.chmod(0o755)
    script = ROOT / "scripts" / "low_precision" / "run-qwen3-30B-A3B-int4.sh"
    for words in ("", "--check"):
        result = bash(f"bash {script} {words}", NUM_GPUS="8", **{**stub, "PYTHON": str(program)}, **given)
        assert result.returncode == 2 and result.stderr.startswith(f"groups of {size}\n"), result.stderr


@pytest.mark.parametrize("words", ["", "--check"])
def test_a_run_of_many_nodes_starts_no_head_of_its_own(stub, words: str) -> None:
    """Nor is this machine asked whether it could hold the run."""
    result = bash(f"bash {MANY_NODES} {words}", NUM_GPUS="8", **stub)
    assert result.returncode == 2
    assert "needs 16 nodes" in result.stderr and "cluster.sh head" in result.stderr
    assert calls(stub) == [] and checks(stub) == []


def test_a_missing_ray_is_said(stub) -> None:
    result = bash(f"bash {ONE_NODE}", **{**stub, "RAY": "/nowhere/ray"})
    assert result.returncode == 2
    assert "/nowhere/ray" in result.stderr and "install" in result.stderr


@pytest.mark.parametrize("links, expected", [("GPU0  X  NV18", "1"), ("GPU0  X  PHB", "0")])
def test_environment_of_the_run(stub, tmp_path: Path, links: str, expected: str) -> None:
    """NVLS follows the links that nvidia-smi shows; the key of a tracker stays out."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(f"#!/bin/sh\necho 'GPU 0: a\n{links}'\n")
    smi.chmod(0o755)
    path = bash('printf %s "$PATH"').stdout
    result = bash(
        f"bash {ONE_NODE}", RAY_ADDRESS="http://h:1", WANDB_API_KEY="s3cret", PATH=f"{smi.parent}:{path}", PYTHONPATH="",
        **stub,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert runtime_env(stub) == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_NVLS_ENABLE": expected, "PYTHONPATH": str(ROOT),
        "RAY_JOB_STOP_WAIT_TIME_S": "180",
    }  # fmt: skip
    assert "s3cret" not in "\n".join(calls(stub)) + result.stdout + result.stderr


def test_a_machine_without_gpus_says_nothing_about_those_of_the_nodes(stub) -> None:
    assert bash(f"bash {ONE_NODE}", RAY_ADDRESS="http://h:1", **stub).returncode == 0
    assert "NCCL_NVLS_ENABLE" not in runtime_env(stub)


def test_a_cluster_that_runs_gets_what_the_run_reads_of_this_shell(stub) -> None:
    """It has the environment in which it was started. What belongs to this machine alone, and secrets, it does not get."""
    handed_on = {
        "NCCL_DEBUG": "INFO", "OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1", "SLIME_RM_API_KEY_FILE": "/k", "SWE_BOOT_RETRIES": "2",
        "TENSORBOARD_DIR": "/events of mine", "WANDB_MODE": "offline", "PYTORCH_CUDA_ALLOC_CONF": "a:b",
    }  # fmt: skip
    secrets = {"SLIME_RM_API_KEY": "s3cret", "WANDB_API_KEY": "s3cret", "SWE_CC_EXTRA_ENVS": '{"KEY": "s3cret"}'}
    others = {
        "SLIME_HOST_IP": "10.0.0.1",
        "CUDA_VISIBLE_DEVICES": "0",
        "SLIME_SESSION": "x",
        "SWE_BOOT_CONCURRENCY": "",
        "WANDB_SERVICE": "socket of a process",
    }
    variables = {**stub, **handed_on, **secrets, **others, "RAY_ADDRESS": "http://198.51.100.1:8265"}
    result = bash(f"bash {ONE_NODE}", **variables)
    assert result.returncode == 0, result.stderr
    words = job(stub)
    words = words[: words.index(stub["PYTHON"])]
    assert {f"{name}={value}" for name, value in handed_on.items()} <= set(words)
    assert not {word.partition("=")[0] for word in words} & (secrets.keys() | others.keys())
    assert "may hold secrets: SLIME_RM_API_KEY SWE_CC_EXTRA_ENVS WANDB_API_KEY;" in result.stdout
    assert "s3cret" not in "\n".join(calls(stub)) + result.stdout + result.stderr
    # Without them the command would start another run.
    again = start_command(stub)
    assert {f"{name}={value}" for name, value in handed_on.items()} < set(again[: again.index("bash")])


@pytest.mark.parametrize(("given", "address"), [("", "127.0.0.1"), ("127.0.0.5", "127.0.0.5")])
def test_processes_of_an_own_head_announce_what_the_user_says(stub, given: str, address: str) -> None:
    """An engine elsewhere could not reach a rank that announces the loopback address."""
    result = bash(f"bash {ONE_NODE}", NUM_GPUS="8", RAY_AUTH_TOKEN="t", SLIME_HOST_IP=given, **stub)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"--node-ip-address {address} " in calls(stub)[0]
    assert Path(stub["STUB_LOG"] + ".host").read_text() == f"{given}\n"


def test_a_killed_script_leaves_no_head(stub) -> None:
    environment = script_environment(NUM_GPUS="8", STUB_JOB_SECONDS="600", **stub)
    with subprocess.Popen(["bash", str(ONE_NODE)], env=environment, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: any(line.startswith("job submit") for line in calls(stub)))
        (node,) = Path(stub["TMPDIR"]).glob("slime-run-*/node")
        head = int(re.search(r"^pid=(\d+)$", node.read_text(), re.MULTILINE)[1])
        assert runs(head)
        process.kill()
    wait_until(lambda: not runs(head))
    # The program that submits ends with the real head.
    os.kill(int(Path(stub["STUB_LOG"] + ".running").read_text()), signal.SIGTERM)


def test_the_last_lines_of_a_stopped_run_are_printed(stub) -> None:
    """A run that is stopped says what is kept, and how it goes on."""
    environment = script_environment(NUM_GPUS="8", STUB_JOB_SECONDS="600", STUB_LAST_LINE="go on: x", **stub)
    with subprocess.Popen(["bash", str(ONE_NODE)], env=environment, stdout=subprocess.PIPE, text=True) as process:
        wait_until(lambda: any(line.startswith("job submit") for line in calls(stub)))
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert "go on: x" in output


def test_the_command_that_starts_again_has_the_server_of_an_example(stub, tmp_path: Path) -> None:
    script = ROOT / "examples" / "search-r1" / "run-qwen3-4B.sh"
    python = tmp_path / "python-with-server"
    python.write_text(f"""#!/usr/bin/env bash
if [[ "$1" == *with_server.py ]]; then while [[ "$1" != -- ]]; do shift; done; shift; PYTHON={stub["PYTHON"]} exec "$@"; fi
""")
    python.chmod(0o755)
    variables = {**stub, "PYTHON": str(python), "CORPUS": "/my corpus.jsonl", "RAY_ADDRESS": "http://198.51.100.1:8265"}
    result = bash(f"bash {script} --seed 7", **variables)
    assert result.returncode == 0, result.stderr
    again = start_command(stub)
    assert again[0] == "env" and "RAY_ADDRESS=http://198.51.100.1:8265" in again
    assert again[-6:] == ["env", "CORPUS=/my corpus.jsonl", "bash", str(script), "--seed", "7"]


SECRET_WORDS = (
    "--lr", "5e-7", "--custom-config-path", "a 'b\t\n é.yaml", "--wandb-key", "s3cret", "--wandb-key=s3cret",
    "--train-env-vars", '{"A": "s3cret"}', "--rm-url", "http://me:s3cret@judge:1/?X-API-KEY=s3cret",
)  # fmt: skip


def test_on_this_machine_words_of_the_run_reach_its_driver_alone(stub, tmp_path: Path) -> None:
    """Ray writes down what it is given; a file that only its owner reads is there until the job has it."""
    python = tmp_path / "python-of-the-run"
    python.write_text(
        """#!/usr/bin/env bash\nprintf '%s\\0' "$PWD" "$SLIME_START_COMMAND" "${@:2}" >"$STUB_LOG.words"\n"""
    )
    words = shlex.join(SECRET_WORDS)
    result = bash(f"bash {ONE_NODE} {words}", cwd=tmp_path, RAY_ADDRESS="http://127.0.0.1:8265", LC_ALL="C", **stub)
    assert result.returncode == 0, result.stderr
    assert "s3cret" not in "\n".join(calls(stub)) + result.stdout + result.stderr
    assert not list(tmp_path.glob("slime-job-*"))

    file = Path(stub["STUB_LOG"] + ".job")
    assert file.stat().st_mode & 0o777 == 0o600
    assert bash(f"bash {file}", **stub).returncode == 0 and not file.exists()
    directory, command, *run, _ = Path(stub["STUB_LOG"] + ".words").read_text().split("\0")
    assert directory == str(tmp_path) and tuple(run[-len(SECRET_WORDS) :]) == SECRET_WORDS
    assert shlex.split(command) == ["env", "RAY_ADDRESS=http://127.0.0.1:8265", "bash", str(ONE_NODE), *SECRET_WORDS]


def test_what_is_this_machine(stub) -> None:
    """The address of a head; `auto` is the one that was started here by hand, and nobody has."""
    own, *_ = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout.split()
    here = ["http://localhost:8265", "https://127.0.1.1", "ray://[::1]:10001", "http://0.0.0.0:8265/", f"{own}:6379"]
    elsewhere = ["auto", "http://198.51.100.1:8265", "http://head:8265", "head"]
    program = f"source {ROOT}/scripts/lib/launch.sh; for CLUSTER_ADDRESS in {' '.join([*here, *elsewhere])}; do "
    result = bash(program + 'if cluster_is_here; then echo "$CLUSTER_ADDRESS"; fi; done', **stub)
    assert (result.stdout.split(), result.stderr) == (here, "")


def test_the_run_knows_the_command_that_starts_it_again(stub, tmp_path: Path) -> None:
    """Settings and flags of the user as he gave them, without those of the script; elsewhere than here too."""
    environment = {**stub, "SAVE": str(tmp_path / "my run"), "RAY_ADDRESS": "http://198.51.100.1:8265"}
    assert bash(f"bash {ONE_NODE} {shlex.join(SECRET_WORDS)}", **environment).returncode == 0
    assert start_command(stub) == [
        "env", f"SAVE={tmp_path}/my run", "RAY_ADDRESS=http://198.51.100.1:8265", "bash", str(ONE_NODE), *SECRET_WORDS
    ]  # fmt: skip


@pytest.mark.parametrize("words", ["--check", "--seed 7 --check", "--help-grep lr", "--help-grep=lr"])
def test_questions_are_answered_without_ray(stub, words: str) -> None:
    result = bash(f"bash {ONE_NODE} {words}", **stub)
    assert (result.returncode, result.stdout) == (0, "ready; the run needs 4 GPUs\n")
    assert calls(stub) == []
    (asked,) = checks(stub)
    assert asked.endswith(f" {words}")


def test_a_check_goes_by_the_cluster_that_is_there(stub, tmp_path: Path) -> None:
    """This machine's GPUs do not matter then."""
    python = tmp_path / "python-of-the-run"
    python.write_text(
        '#!/bin/sh\n[ "$1" = -c ] || echo "the run needs 4 GPUs" "${RAY_ADDRESS:-none}" | tee -a "$STUB_LOG.addresses"\n'
    )
    head = "bash scripts/cluster.sh"
    program = f"{head} head && bash {ONE_NODE} --check && bash {ONE_NODE}; {head} stop; bash {ONE_NODE} --check"
    result = bash(program, NUM_GPUS="4", RAY_PORT="21381", DASHBOARD_PORT="21267", **stub)
    assert result.returncode == 0, result.stderr
    addresses = [line.split()[-1] for line in Path(stub["STUB_LOG"] + ".addresses").read_text().splitlines()]
    assert addresses == ["http://127.0.0.1:21267"] * 2 + ["none"]


def test_an_interrupted_check_leaves_nothing(stub, tmp_path: Path) -> None:
    python = tmp_path / "python-of-the-run"
    python.write_text('#!/bin/sh\n: >"$STUB_LOG.checking"\nexec sleep 600\n')
    environment = script_environment(NUM_GPUS="8", **stub)
    # What runs in the background ignores Ctrl-C, and so would what the tests start there.
    listens = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    script = ["bash", str(ONE_NODE)]
    with subprocess.Popen(script, env=environment, start_new_session=True, preexec_fn=listens) as process:
        wait_until(Path(stub["STUB_LOG"] + ".checking").exists)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=120)
    assert process.returncode == 130
    assert not list(tmp_path.glob("slime-check-*")) and calls(stub) == []


def test_the_toy_task_appears_whole(stub, tmp_path: Path) -> None:
    """Two scripts that start at once: neither sees what the other has not finished."""
    python = tmp_path / "python-of-the-run"
    python.write_text(
        '#!/bin/bash\nif [[ "$1" != *make_toy_task.py ]]; then cat "$TOY_DIR/task.json" && exit; fi\n'
        'touch "$2/part" "$STUB_LOG.$$.making"\n'
        'until (($(ls "$STUB_LOG".*.making | wc -l) == 2)); do sleep 0.05; done\n'
        'echo whole >"$2/task.json"\n'
    )
    toy = tmp_path / "tasks" / "toy"
    start = f"timeout 60 bash {ONE_NODE} --check &"
    program = f"{start} first=$!; {start} second=$!; wait $first && wait $second"
    result = bash(program, MODEL="toy", NUM_GPUS="2", TOY_DIR=str(toy), **stub)
    assert (result.returncode, result.stdout) == (0, "whole\nwhole\n"), result.stderr
    assert [path.name for path in toy.parent.iterdir()] == ["toy"] and not list(toy.glob("toy.draft*"))


def test_what_stands_in_the_place_of_the_toy_task_is_refused_and_drafts_of_killed_starts_go(
    stub, tmp_path: Path
) -> None:
    for name in ("toy", "toy.draft-old", "toy.draft-new"):
        (tmp_path / "tasks" / name / "model").mkdir(parents=True)
    killed = time.time() - 7200
    os.utime(tmp_path / "tasks" / "toy.draft-old", (killed, killed))
    toy = str(tmp_path / "tasks" / "toy")
    result = bash(f"bash {ONE_NODE} --check", MODEL="toy", NUM_GPUS="2", TOY_DIR=toy, **stub)
    assert result.returncode == 2
    assert f"{toy} holds no whole toy task: remove it, or set TOY_DIR to another directory" in result.stderr
    assert sorted(path.name for path in (tmp_path / "tasks").iterdir()) == ["toy", "toy.draft-new"]


# Of one start: questions to it, programs, ports and cores of this machine, what scripts set themselves, and a key.
NOT_SAID_AGAIN = {
    "DRY_RUN", "PRINT_COMMAND", "START_SECONDS", "PYTHON", "RAY", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH",
    "RAY_PORT", "RAY_TMPDIR", "DASHBOARD_PORT", "CLUSTER_DIR", "TMPDIR", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "WANDB_API_KEY",
    "CHECK_MESSAGES", "SUBMIT_MESSAGES", "JOB_FILE", "OWN_DIR", "SUBMISSION_ID", "CLUSTER_ADDRESS", "SAY_AS",
    "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_JOB_STOP_WAIT_TIME_S", "OMP_NUM_THREADS", "STOP_SECONDS", "LEFT_SECONDS",
    "HEAD_WATCH", "SLIME_START_COMMAND",
}  # fmt: skip


def test_every_setting_of_the_scripts_is_part_of_the_command_or_left_out_on_purpose() -> None:
    patterns = ("run-*.sh", "low_precision/*.sh", "lib/*.sh", "models/**/*.sh")
    texts = [path.read_text() for pattern in patterns for path in (ROOT / "scripts").glob(pattern)]
    read = {name for text in texts for name in re.findall(r"\$\{([A-Z][A-Z_]+)(?::?[-+])", text)}
    everything = " ".join(f"{name}=x" for name in read - {"MODEL", "TMPDIR"})
    program = (
        f"{everything} MODEL=toy; source {ROOT}/scripts/lib/launch.sh; printf '%s\\n' \"${{GIVEN_SETTINGS[@]%%=*}}\""
    )
    given = set(bash(program).stdout.split())
    assert read - given == NOT_SAID_AGAIN and {"MODEL_ARGS_NUM_LAYERS", "SAVE", "TRAIN_SCRIPT"} <= given


def test_scripts_add_to_the_environment(stub) -> None:
    script = ROOT / "scripts" / "low_precision" / "run-kimi-k2-Thinking-int4.sh"
    assert bash(f"bash {script}", RAY_ADDRESS="http://h:1", **stub).returncode == 0
    added = {name: value for name, value in runtime_env(stub).items() if name.startswith("OPEN_")}
    assert added == {"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1", "OPEN_TRAINING_INT4_GROUP_SIZE": "32"}


def test_the_toy_model_is_not_trained_for_engines_in_int4(stub, tmp_path: Path) -> None:
    """It is no INT4 checkpoint, which would be refused."""
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "task.json").touch()
    script = ROOT / "scripts" / "low_precision" / "run-qwen3-30B-A3B-int4.sh"
    toy = {"MODEL": "toy", "NUM_GPUS": "2", "TOY_DIR": str(tmp_path / "toy")}
    assert bash(f"bash {script}", RAY_ADDRESS="http://h:1", **toy, **stub).returncode == 0
    assert not [name for name in runtime_env(stub) if name.startswith("OPEN_")]


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


def test_ray_that_gives_up_on_a_busy_machine_is_started_again(stub) -> None:
    result = bash(f"bash {ONE_NODE}", NUM_GPUS="8", RAY_AUTH_TOKEN="t", STUB_START="slow", **stub)
    assert result.returncode == 0, result.stdout + result.stderr
    assert [line.split()[0] for line in calls(stub)] == ["start", "start", "job"]


def test_logs_stay_only_where_something_failed(stub, tmp_path: Path) -> None:
    for status, kept in (("0", 0), ("3", 1)):
        result = bash(f"bash {ONE_NODE}", NUM_GPUS="8", RAY_AUTH_TOKEN="t", STUB_JOB_STATUS=status, **stub)
        assert len(list(tmp_path.glob("slime-run-*"))) == kept
        assert ("Ray's logs of this run" in result.stdout) is bool(kept)
    assert not list(tmp_path.glob("slime-check-*"))


def test_what_lies_on_another_machine_is_not_checked_here(stub) -> None:
    for address, count in (("http://198.51.100.1:8265", 0), ("http://127.0.0.1:8265", 1)):
        assert bash(f"bash {ONE_NODE}", RAY_ADDRESS=address, **stub).returncode == 0
        assert len(checks(stub)) == count


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen]:
    """A process that looks like a part of Ray and must survive."""
    process = subprocess.Popen(["bash", "-c", "exec -a raylet sleep 600"])
    yield process
    process.kill()
    process.wait()
