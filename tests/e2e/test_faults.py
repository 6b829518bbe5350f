"""What a user gets to see when something is wrong: one message that says what, and no process left behind."""

from __future__ import annotations

import http.server
import os
import re
import secrets
import signal
import subprocess
import sys
import threading

import pytest

from tests.support.models.tiny_task import PLUG_INS
from tests.support.processes.train_process import TrainProcess

# What trackers, ranks and Ray take to end, beside eight runs on two cores.
LEAVING_SECONDS = 30
# From the death of an engine's process to the message that says how it ended and what it had written.
TOLD_SECONDS = 10
CLOCK = r"\d\d:\d\d:\d\d "


@pytest.fixture
def flags(task) -> list[str]:
    one_of_each = ["--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"]
    return [*task.rollout_flags, *task.train_flags, *one_of_each, "--num-rollout", "2"]


def run_to_error(flags, directory, expected_status: int, timeout: float = 200, env=None) -> str:
    """The one error message of a run that ends with `expected_status`, whole."""
    with TrainProcess(flags, directory, env) as process:
        status = process.wait(timeout)
        output = process.output()
        assert status == expected_status, output
        process.assert_no_process_left()
    messages = re.split(f"^{CLOCK}ERROR: ", output, flags=re.MULTILINE)[1:]
    assert len(messages) == 1, output
    return messages[0]


def assert_ended_at_once(directory) -> None:
    """Neither Ray nor event files were started."""
    assert not (directory / "tensorboard").exists()


# -- bad input, found by the driver before anything starts ------------------------------------------------------------


@pytest.mark.parametrize(
    "words, message",
    [
        (["--hf-checkpoint", "/nowhere/model"], "--hf-checkpoint /nowhere/model: no such directory"),
        (["--ref-load", "/nowhere/model"], "--ref-load /nowhere/model: no such directory"),
        (["--load", "/nowhere/model"], "--load /nowhere/model is missing or empty"),
        (["--prompt-data", "/nowhere/p.jsonl"], "--prompt-data /nowhere/p.jsonl: there is no file"),
        (["--prompt-data", "{empty}"], "--prompt-data {empty}: holds no rows"),
        (["--prompt-data", "{no_prompt}"], "{no_prompt}:1: the row has neither `prompt` nor `input`, only question, label"),
        (["--custom-rm-path", "/nowhere/r.py:f"], "--custom-rm-path /nowhere/r.py:f: there is no file /nowhere/r.py"),
        (["--rolout-batch-size", "4"], "unknown flag --rolout-batch-size: did you mean --rollout-batch-size"),
        (
            ["--global-batch-size", "5"],
            "--rollout-batch-size 4 x --n-samples-per-prompt 4 = 16 rollouts per step is no multiple of "
            "--global-batch-size 5; 1, 2, 4, 8, 16 would do",
        ),
    ],
)  # fmt: skip
def test_bad_input_ends_before_anything_starts(flags, tmp_path, words, message):
    files = {"empty": tmp_path / "empty.jsonl", "no_prompt": tmp_path / "no_prompt.jsonl"}
    files["empty"].touch()
    files["no_prompt"].write_text('{"question": "1+1", "label": "2"}\n')
    words = [word.format(**files) for word in words]
    shown = run_to_error([*flags, *words], tmp_path / "run", 2, timeout=60)
    assert shown.startswith(message.format(**files))
    assert len(shown.splitlines()) == 1
    assert_ended_at_once(tmp_path / "run")


def test_more_engines_than_the_machine_has_memory_for_are_refused_before_ray_starts(flags, tmp_path):
    # What a killed run left goes with the next start, however that ends.
    left = tmp_path / "tmp/slime-engine-abcdefgh"
    left.mkdir(parents=True)
    (left / "owner").touch()
    env = {"SLIME_ACCELERATOR": "cpu", "TMPDIR": str(left.parent)}
    engines = ["--rollout-num-gpus", "4000"]
    shown = run_to_error([*flags, *engines], tmp_path / "run", 2, env=env, timeout=100)
    assert not left.exists()
    assert re.match(
        r"the run needs about \d+\.\d GiB of memory \(4000 engines of 0\.\d GiB, .* has \d+\.\d GiB; ", shown
    )
    assert re.search(r"--rollout-num-gpus \d+ would fit, or join a cluster by RAY_ADDRESS$", shown.strip())
    assert "starting Ray" not in (tmp_path / "run/output.txt").read_text()


# -- bad input that only the processes of the run can find ------------------------------------------------------------


def test_a_broken_row_is_named_by_file_and_line(flags, task, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text("".join(task.prompts.read_text().splitlines(keepends=True)[:3]) + '{"prompt": \n')
    with_broken = [str(broken) if word == str(task.prompts) else word for word in flags]
    message = run_to_error(with_broken, tmp_path / "run", 2)
    assert message.startswith(f"{broken}:4: no valid JSON")
    assert "Traceback" not in message


@pytest.mark.slow
def test_a_plug_in_that_does_not_import_ends_the_run_before_it_generates(flags, tmp_path):
    plug_in = tmp_path / "reward.py"
    # What may be left out is no statement that certainly fails: only the import tells.
    plug_in.write_text("if True:\n    import no_such_package\n\n\ndef reward(args, sample):\n    return 1.0\n")
    message = run_to_error([*flags, "--custom-rm-path", plug_in], tmp_path / "run", 2)
    assert message.startswith(f"--custom-rm-path {plug_in}: the import failed")
    assert "No module named 'no_such_package'" in message and f'File "{plug_in}", line 2' in message


@pytest.mark.slow
def test_a_failing_rank_ends_the_run_while_engines_start(flags, tmp_path):
    plug_in = tmp_path / "advantages.py"
    plug_in.write_text("if True:\n    import no_such_package\n\n\ndef advantages(args, data):\n    pass\n")
    message = run_to_error([*flags, "--custom-advantage-function-path", plug_in], tmp_path / "run", 2)
    assert message.startswith(f"--custom-advantage-function-path {plug_in}: the import failed")
    assert "engines are ready" not in (tmp_path / "run/output.txt").read_text()


@pytest.mark.slow
def test_a_raising_reward_is_named_with_its_sample(flags, tmp_path):
    path = f"{PLUG_INS}:failing_reward"
    message = run_to_error([*flags, "--debug-rollout-only", "--custom-rm-path", path], tmp_path / "run", 2)
    first, *rest = message.splitlines()
    label = "'no entry for "
    assert first.startswith(f"--custom-rm-path {path} raised KeyError for sample 5: ") and label in first
    # The user's own traceback and nothing of ours.
    assert re.findall(r'File "(.*?)"', message) == [str(PLUG_INS)] and message.count("Traceback") == 1
    assert any("raise KeyError" in line for line in rest)


@pytest.mark.slow
def test_a_given_router_address_that_is_none(flags, tmp_path):
    class WebPage(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>a web page</html>")

    with http.server.HTTPServer(("127.0.0.1", 0), WebPage) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = ["--sglang-router-ip", "127.0.0.1", "--sglang-router-port", server.server_port]
        message = run_to_error([*flags, *address], tmp_path / "run", 2)
        server.shutdown()
    assert message.startswith(f"{' '.join(map(str, address))}: no SGLang router there")
    assert len(message.splitlines()) == 1


SMALL_CLUSTER = """
import ray, sys
ray.init(
    address="local", num_gpus=1, num_cpus=4, include_dashboard=False, log_to_driver=False,
    # Nobody gets as far as to use a process that was started in advance.
    _system_config={"prestart_worker_first_driver": False},
)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def small_cluster(tmp_path):
    """The environment by which a run joins a Ray cluster with one GPU and four CPUs."""
    access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with subprocess.Popen(
        [sys.executable, "-c", SMALL_CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **access},
        cwd=tmp_path,
        text=True,
    ) as cluster:
        yield {**access, "RAY_ADDRESS": cluster.stdout.readline().strip()}


@pytest.mark.slow
def test_a_cluster_that_is_too_small_is_refused_with_both_numbers(flags, tmp_path, small_cluster):
    message = run_to_error(flags, tmp_path / "run", 2, env=small_cluster)
    assert message.startswith("the run needs 2 GPUs (1 for training, 1 for engines) and 3 CPUs, but the cluster at")
    assert "has 1 GPUs and 4 CPUs" in message and len(message.splitlines()) == 1


def test_an_address_where_no_cluster_answers(flags, tmp_path):
    message = run_to_error(flags, tmp_path, 1, env={"RAY_ADDRESS": "127.0.0.1:9"})
    assert message.startswith("RAY_ADDRESS=127.0.0.1:9: no Ray cluster answers there")


# -- parts that fail ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_engine_that_does_not_start_shows_the_end_of_its_log(flags, tmp_path):
    message = run_to_error([*flags, "--sglang-model-config-parser", "no_such_parser"], tmp_path / "run", 1)
    first, *log = message.splitlines()
    assert re.match(r"engine 0 failed to start: exit code \d+; log \S+/engine_0.log ends with:", first)
    assert any("ValueError" in line and "no_such_parser" in line for line in log)


@pytest.mark.parametrize(
    "asked",
    [pytest.param(True, id="requests in flight"), pytest.param(False, id="nothing asked", marks=pytest.mark.slow)],
)
def test_a_killed_scheduler_ends_the_run_by_its_name(flags, tmp_path, asked):
    words = ["--custom-generate-function-path", f"{PLUG_INS}:marked_generate"]
    with TrainProcess([*flags, *words], tmp_path, {"E2E_HOLD_ROLLOUT": "0"}) as process:
        process.wait_for_line("holding rollout 0", 400)
        (scheduler,) = process.schedulers()
        if asked:
            # Requests that nobody answers, and then nobody can.
            os.kill(scheduler, signal.SIGSTOP)
            (tmp_path / "go").touch()
            process.wait_for_line("going on with rollout 0", 120)
        os.kill(scheduler, signal.SIGKILL)
        # Of all that is told this is the end: the last line that the engine wrote.
        process.wait_for_line(
            rf"^the server ends: its scheduler_0 \(process {scheduler}\): ended by SIGKILL", TOLD_SECONDS
        )
        assert process.wait(LEAVING_SECONDS) == 1, process.output()
        process.assert_no_process_left()
    output = process.output()
    (message,) = re.split(f"^{CLOCK}ERROR: ", output, flags=re.MULTILINE)[1:]
    first, *log = message.splitlines()
    assert re.match(rf"engine 0 died: its scheduler_0 \(process {scheduler}\): ended by SIGKILL .*ends with:$", first)
    # What was kept is told behind it.
    assert 0 < len([line for line in log if not re.match(CLOCK, line)]) <= 12
    # All samples' requests failed at once, in one of a few ways each. (The engine's last lines may hold warnings of its own.)
    assert len(re.findall(f"^{CLOCK}WARNING", output, flags=re.MULTILINE)) <= 3 and "Traceback" not in output


# -- the end by signal -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number, status, word",
    [
        pytest.param(signal.SIGINT, 130, "Ctrl-C", id="ctrl-c"),
        pytest.param(signal.SIGTERM, 143, "SIGTERM", id="sigterm", marks=pytest.mark.slow),
    ],
)
def test_a_signal_while_samples_are_generated_ends_everything(flags, tmp_path, number, status, word):
    save = tmp_path / "checkpoints"
    words = ["--custom-generate-function-path", f"{PLUG_INS}:marked_generate", "--save", save, "--save-interval", "1"]
    with TrainProcess([*flags, *words], tmp_path, {"E2E_HOLD_ROLLOUT": "1"}) as process:
        process.wait_for_line("holding rollout 1", 200)
        running = " ".join(process.processes().values())
        assert all(part in running for part in ("RankProcess", "EngineActor", "router_process", "server_process"))
        # Ctrl-C reaches all processes of the terminal's foreground group, a plain SIGTERM only the driver.
        send = process.send_signal_to_group if number == signal.SIGINT else process.send_signal_to_driver
        send(number)
        assert process.wait(60) == status, process.output()
        process.assert_no_process_left()
    output = process.output()
    assert "Traceback" not in output and "WARNING" not in output and "\x1b" not in output
    # The way out is quiet, and the last lines say where it leads on.
    stopped, kept, go_on = re.split(f"^{CLOCK}", output.rstrip(), flags=re.MULTILINE)[-3:]
    assert stopped.strip() == f"ERROR: stopped by {word}"
    assert kept.strip() == f"kept: the checkpoint of rollout 0 in {save}/iter_0000000"
    assert go_on.startswith("go on: ") and go_on.endswith(f"--save {save} --save-interval 1 --load {save}")
