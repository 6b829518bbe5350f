"""What a run can make its samples with, against real engines: functions of single samples, a reward service, dumps, nothing."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from math import comb

import pytest
import requests

from slime.rollout.rollout_dump import load_rollout
from tests.support.models.tiny_task import PLUG_INS, ROLLOUT_BATCH_SIZE, without
from tests.support.processes.plug_ins import graded_reward, parities
from tests.support.processes.train_process import REPOSITORY, TrainProcess

ROLLOUTS = range(2)
TRIES = 4
KEY = {"SLIME_RM_API_KEY": "the key of the judge"}


@pytest.fixture(scope="module")
def reward_service():
    """`examples/reward_server`, with a key; its address."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    words = [REPOSITORY / "examples/reward_server/server.py", "--port", str(port), "--grader", f"{PLUG_INS}:parities"]
    process = subprocess.Popen([sys.executable, *words], cwd=REPOSITORY, env={**os.environ, **KEY})
    deadline = time.monotonic() + 60
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/grade"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def rollouts(task, reward_service, tmp_path_factory):
    """Two rollouts and their evaluations, graded by the service unless a sample says otherwise."""
    directory = tmp_path_factory.mktemp("rollouts")
    flags = without(task.rollout_flags, "--custom-rm-path")
    flags += [
        "--rm-type", "remote_rm", "--rm-url", reward_service, "--data-source-path", f"{PLUG_INS}:OwnFunctions",
        "--eval-prompt-data", "held_out", task.evaluation, "--eval-interval", "1", "--log-passrate",
        "--n-samples-per-eval-prompt", TRIES, "--debug-rollout-only", "--rollout-num-gpus", "1",
        "--num-rollout", len(ROLLOUTS), "--save-debug-rollout-data", directory / "{rollout_id}.pt",
    ]  # fmt: skip
    return TrainProcess(flags, directory / "run", env=KEY).finish(400), str(directory / "{rollout_id}.pt")


@pytest.mark.slow
def test_functions_of_a_sample_make_and_grade_it_beside_others_of_the_service(rollouts):
    own, others = 0, 0
    for rollout_id in ROLLOUTS:
        for sample in load_rollout(rollouts[1], rollout_id):
            is_own = sample.group_index % 2 == 1
            assert (sample.metadata.get("generated_by") == "marked_generate") == is_own
            asked = {"response": sample.response}
            assert sample.reward == (graded_reward(None, sample) if is_own else parities([asked])[0])
            own, others = own + is_own, others + (not is_own)
    assert own == others


@pytest.mark.slow
def test_pass_at_k_is_that_of_the_answers_of_an_evaluation(rollouts):
    process, dumps = rollouts
    for rollout_id in ROLLOUTS:
        right = defaultdict(int)
        for sample in load_rollout(dumps, f"eval_{rollout_id}"):
            right[sample.prompt] += parities([{"response": sample.response}])[0] == 1.0
        assert len(right) == 3
        for k in (1, 2, 4):
            expected = sum(1 - comb(TRIES - count, k) / comb(TRIES, k) for count in right.values()) / len(right)
            assert process.scalars(f"eval/held_out-pass@{k}")[rollout_id + 1] == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_what_an_engine_refuses_ends_the_run_with_its_words(task, tmp_path):
    flags = [
        *task.rollout_flags, "--custom-generate-function-path", f"{PLUG_INS}:generate_too_hot", "--debug-rollout-only",
        "--rollout-num-gpus", "1", "--num-rollout", "1",
    ]  # fmt: skip
    with TrainProcess(flags, tmp_path) as process:
        assert process.wait(400) != 0
        process.assert_no_process_left()
    said = process.output()
    assert "answered 400" in said and "temperature" in said


@pytest.mark.slow
def test_samples_of_a_dump_are_trained_beside_engines_that_get_the_weights(task, rollouts, tmp_path):
    dumps, again = rollouts[1], str(tmp_path / "{rollout_id}.pt")
    flags = [
        *task.loop_flags, "--rollout-function-path", "slime.rollout.forge_load.generate_rollout",
        "--load-forge-rollout-data", dumps, "--num-rollout", len(ROLLOUTS), "--check-weight-update-equal",
        "--save-debug-rollout-data", again,
    ]  # fmt: skip
    process = TrainProcess(flags, tmp_path / "run").finish(400)
    for rollout_id in ROLLOUTS:
        replayed, stored = load_rollout(again, rollout_id), load_rollout(dumps, rollout_id)
        assert [list(sample.tokens) for sample in replayed] == [list(sample.tokens) for sample in stored]
    assert all(norm > 0 for norm in process.scalars("train/grad_norm").values())
    # Once before training, and after each rollout but the last.
    assert len(process.scalars("perf/update_weights_time")) >= len(ROLLOUTS)


@pytest.mark.slow
def test_engines_of_a_run_without_rollouts_answer_by_hand_until_it_is_interrupted(task, tmp_path):
    flags = [
        *task.rollout_flags, "--rollout-function-path", "slime.rollout.sleep_rollout.sleep", "--debug-rollout-only",
        "--rollout-num-gpus", "1", "--num-rollout", "1", "--router-api-key", "a key of mine",
    ]  # fmt: skip
    with TrainProcess(flags, tmp_path) as process:
        line = process.wait_for_line(r"sleeps; model \S+ is served at", 300)
        url = re.search(r"http://[^\s,]+", line)[0]
        asked = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
        headers = {"Authorization": "Bearer a key of mine"}
        assert requests.post(f"{url}/generate", json=asked, timeout=60).status_code == 401
        answer = requests.post(f"{url}/generate", json=asked, headers=headers, timeout=60)
        assert answer.status_code == 200 and len(answer.json()["output_ids"]) == 4
        process.send_signal_to_group(signal.SIGINT)
        assert process.wait(60) != 0
        process.assert_no_process_left()


assert ROLLOUT_BATCH_SIZE % 2 == 0, "as many groups with functions of their own as without"
