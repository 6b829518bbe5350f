"""A run in which one engine reads the prompts and another writes the answers: caches move between two processes.

What moves them on a CPU is no part of what this project installs. Where it is missing, the run says so before anything starts.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.support.models.tiny_task import ROLLOUT_BATCH_SIZE, SAMPLES_PER_PROMPT
from tests.support.oracles.log_probs import ReferenceModel
from tests.support.processes.train_process import TrainProcess

pytestmark = pytest.mark.slow

ROLLOUTS = 3


def test_engines_that_prefill_and_decode_learn_together(task, tmp_path):
    flags = [
        *task.loop_flags, "--prefill-num-servers", "1", "--num-rollout", ROLLOUTS, "--check-weight-update-equal",
        "--save-debug-rollout-data", tmp_path / "dumps/{rollout_id}.pt",
    ]  # fmt: skip
    with TrainProcess(flags, tmp_path) as process:
        if importlib.util.find_spec("mooncake") is None:
            assert process.wait(100) == 2 and "mooncake-transfer-engine-non-cuda" in process.output()
            return
        process.wait_for_success(400)
        process.assert_no_process_left()
    assert "tensors equal on 2 engines" in process.output()
    for rollout_id in range(ROLLOUTS):
        samples = torch.load(tmp_path / f"dumps/{rollout_id}.pt", weights_only=True)["samples"]
        assert len(samples) == ROLLOUT_BATCH_SIZE * SAMPLES_PER_PROMPT
        assert {version for sample in samples for version in sample["weight_versions"]} == {str(rollout_id + 1)}
        for sample in samples[:4] if rollout_id == 0 else ():
            tokens, length = list(sample["tokens"]), sample["response_length"]
            # Of noise in place of the prompt's caches the first token alone would be right.
            expected = ReferenceModel(task.model).log_probs(tokens[:-length], tokens[-length:])
            assert length > 1 and list(sample["rollout_log_probs"]) == pytest.approx(expected, abs=1e-4)
    differences = process.scalars("train/train_rollout_logprob_abs_diff")
    assert len(differences) == ROLLOUTS and max(differences.values()) < 1e-5, differences
