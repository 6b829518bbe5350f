"""A frozen model behind a router of its own beside the policy: a teacher that scores what the policy generates."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from tests.support.models.tiny_checkpoint import make_tiny_checkpoint
from tests.support.models.tiny_task import PLUG_INS, ROLLOUT_BATCH_SIZE, SAMPLES_PER_PROMPT
from tests.support.oracles.log_probs import ReferenceModel
from tests.support.processes.train_process import TrainProcess
from tests.support.processes.waiting import wait_until

pytestmark = pytest.mark.slow

ROLLOUTS = range(3)
SERVING = """
sglang:
  - name: actor
    server_groups: [{{num_gpus: 1}}]
  - name: teacher
    model_path: {teacher}
    update_weights: false
    server_groups: [{{num_gpus: {teachers}, num_gpus_per_engine: {teachers}, overrides: {{context_length: 256}}}}]
"""
# Asks both models for the log-probs of fixed tokens when nobody else asks them for anything, after every rollout.
NOTE = """
import json, pathlib
import requests
from slime.rollout.on_policy_distillation import post_process_rewards
from slime.rollout.sglang_rollout import get_model_url

def note(args, samples):
    answers = {}
    for name in args.sglang_model_routers:
        payload = {"input_ids": list(range(5, 45)), "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                   "return_logprob": True, "logprob_start_len": 0}
        headers = {"Authorization": f"Bearer {args.router_api_key}"}
        answer = requests.post(get_model_url(args, name), json=payload, headers=headers, timeout=120).json()
        answers[name] = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]
    with open(pathlib.Path(__file__).with_name("answers.jsonl"), "a") as file:
        file.write(json.dumps(answers) + "\\n")
    return post_process_rewards(args, samples)
"""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("teacher"), seed=7, hidden_size=96, num_hidden_layers=3)


@pytest.mark.parametrize("placement", ["apart", "shared"])
def test_a_policy_learns_from_a_frozen_teacher_that_the_run_serves(task, teacher, tmp_path, placement):
    """Apart: two tensor-parallel ranks serve the teacher, one of which is killed. Shared: it sleeps while the trainer works."""
    apart = placement == "apart"
    (tmp_path / "serving.yaml").write_text(SERVING.format(teacher=teacher, teachers=2 if apart else 1))
    (tmp_path / "note.py").write_text(NOTE)
    flags = [
        *task.rollout_flags, *task.train_flags, "--sglang-config", tmp_path / "serving.yaml", "--num-rollout", len(ROLLOUTS),
        "--actor-num-gpus-per-node", 1 if apart else 2, *([] if apart else ["--colocate"]),
        "--rollout-num-gpus", 3 if apart else 2, "--num-gpus-per-node", 8, "--use-opd", "--opd-type", "sglang",
        "--custom-rm-path", "slime.rollout.on_policy_distillation.reward_func",
        "--custom-reward-post-process-path", f"{tmp_path / 'note.py'}:note", "--check-weight-update-equal",
        "--use-fault-tolerance", "--rollout-health-check-timeout", "900", "--rollout-health-check-interval", "1",
        "--custom-generate-function-path", f"{PLUG_INS}:marked_generate",
        "--save-debug-rollout-data", tmp_path / "dumps/{rollout_id}.pt",
    ]  # fmt: skip
    with TrainProcess(flags, tmp_path, {"E2E_HOLD_ROLLOUT": "1"} if apart else {}) as process:
        if apart:
            process.wait_for_line("holding rollout 1", 400)
            before = process.schedulers()
            (killed,) = [pid for pid, name in before.items() if name.endswith("TP1")]
            os.kill(killed, signal.SIGKILL)
            process.wait_for_line("engine 1 has a new server", 400)
            names = sorted(before.values())
            wait_until(lambda: sorted(process.schedulers().values()) == names)
            (tmp_path / "go").touch()
        process.wait_for_success(400)
        process.assert_no_process_left()
    output = process.output()
    assert "engines of model teacher are ready behind the router" in output
    assert ("engine 1: weights of version" in output) is False, "nobody pushes to the teacher"
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == len(ROLLOUTS)
    assert len({tuple(of_rollout["teacher"]) for of_rollout in answers}) == 1, "bit for bit, also of the new server"
    assert len({tuple(of_rollout["actor"]) for of_rollout in answers}) == len(ROLLOUTS), "the policy moves"
    reference = ReferenceModel(teacher)
    for rollout_id in ROLLOUTS:
        samples = torch.load(tmp_path / f"dumps/{rollout_id}.pt", weights_only=True)["samples"]
        assert len(samples) == ROLLOUT_BATCH_SIZE * SAMPLES_PER_PROMPT
        assert {version for sample in samples for version in sample["weight_versions"]} == {str(rollout_id + 1)}
        for sample in samples[:4]:
            tokens, length = list(sample["tokens"]), sample["response_length"]
            expected = reference.log_probs(tokens[:-length], tokens[-length:])
            assert list(sample["teacher_log_probs"]) == pytest.approx(expected, abs=1e-4)
    differences = process.scalars("train/train_rollout_logprob_abs_diff")
    assert all(0 < difference <= 1e-5 for difference in differences.values()), differences
