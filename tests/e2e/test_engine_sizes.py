"""Engines of two sizes from a `--sglang-config`: both hold the trainer's weights, from every push and after a replacement."""

from __future__ import annotations

import os
import re
import signal

import pytest
import torch

from tests.support.models.tiny_task import PLUG_INS, ROLLOUT_BATCH_SIZE, SAMPLES_PER_PROMPT
from tests.support.processes.train_process import TrainProcess
from tests.support.processes.waiting import wait_until

pytestmark = pytest.mark.slow

ROLLOUTS = range(3)
LOG_PROB_GATE = 1e-5
# Two tensor-parallel ranks, a GPU that stays free, one rank.
SERVING = """
sglang:
  - name: actor
    server_groups:
      - {num_gpus: 2, num_gpus_per_engine: 2, overrides: {max_running_requests: 8}}
      - {worker_type: placeholder, num_gpus: 1}
      - {num_gpus: 1, num_gpus_per_engine: 1, overrides: {disable_radix_cache: true}}
"""


PLACEMENTS = {"apart": (1, []), "mixed": (2, ["--colocate", "--no-offload-train"]), "half": (1, ["--colocate"])}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_engines_of_two_sizes_are_trained_with_and_the_large_one_is_replaced(task, tmp_path, placement):
    """Mixed: the large engine has the devices of both ranks, and gets its weights by handles; the small one by a group. Half:
    the large one has the device of the only rank, with which it takes turns, and one beside; both get theirs by the group."""
    (tmp_path / "serving.yaml").write_text(SERVING)
    ranks, sharing = PLACEMENTS[placement]
    flags = [
        *task.rollout_flags, *task.train_flags, "--actor-num-gpus-per-node", ranks, "--num-gpus-per-node", 8, *sharing,
        "--rollout-num-gpus", 4, "--sglang-config", tmp_path / "serving.yaml", "--num-rollout", len(ROLLOUTS),
        "--check-weight-update-equal", "--use-fault-tolerance", "--rollout-health-check-timeout", "900",
        "--rollout-health-check-interval", "1", "--custom-generate-function-path", f"{PLUG_INS}:marked_generate",
        "--save-debug-rollout-data", tmp_path / "dumps/{rollout_id}.pt",
    ]  # fmt: skip
    with TrainProcess(flags, tmp_path, {"E2E_HOLD_ROLLOUT": "1"}) as process:
        process.wait_for_line("holding rollout 1", 400)
        before = process.schedulers()
        assert len(before) == len(set(before.values())) == 3, before
        (killed,) = [pid for pid, name in before.items() if name.endswith("TP1")]
        os.kill(killed, signal.SIGKILL)
        process.wait_for_line("engine 0 has a new server", 400)
        process.wait_for_line("engine 0: weights of version 2", 400)
        names = sorted(before.values())
        now = wait_until(lambda: found if sorted((found := process.schedulers()).values()) == names else None)
        gone = before.keys() - now.keys()
        assert len(gone) == 2 and killed in gone
        (tmp_path / "go").touch()
        process.wait_for_success(400)
        process.assert_no_process_left()
    output = process.output()
    devices = {"apart": 5, "mixed": 4, "half": 4}[placement]
    assert f"starting Ray on this machine: {devices} logical GPUs" in output
    assert re.search(r"2 engines are ready behind the router", output)
    assert re.search(r"weight check: \d+ tensors equal on 2 engines", output)
    for rollout_id in ROLLOUTS:
        samples = torch.load(tmp_path / f"dumps/{rollout_id}.pt", weights_only=True)["samples"]
        assert len(samples) == ROLLOUT_BATCH_SIZE * SAMPLES_PER_PROMPT
        assert {version for sample in samples for version in sample["weight_versions"]} == {str(rollout_id + 1)}
    differences = process.scalars("train/train_rollout_logprob_abs_diff")
    assert sorted(differences) == list(ROLLOUTS)
    assert all(0 < difference <= LOG_PROB_GATE for difference in differences.values()), differences
