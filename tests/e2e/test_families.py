"""Every family that SGLang serves on the CPU: five rollouts of GRPO, after each of which trainer and engine agree."""

import pytest

from tests.support.models.tiny_task import make_tiny_task
from tests.support.processes.train_process import TrainProcess

LOG_PROB_GATE = 1e-5
ROLLOUTS = range(5)
# Family -> its config, beside that of every tiny checkpoint.
SERVED = {
    "llama": {"model_type": "llama"},
    "llama3": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "glm4": {
        "model_type": "glm4", "attention_bias": True, "tie": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_trainer_and_engine_agree_on_log_probs_after_every_weight_update(name, tmp_path):
    task = make_tiny_task(tmp_path / "task", **SERVED[name])
    flags = [
        *task.rollout_flags, *task.train_flags, "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1",
        "--num-rollout", str(len(ROLLOUTS)), "--check-weight-update-equal",
    ]  # fmt: skip
    with TrainProcess(flags, tmp_path / "run") as process:
        process.wait_for_success(300)
        process.assert_no_process_left()
    differences = process.scalars("train/train_rollout_logprob_abs_diff")
    assert sorted(differences) == list(ROLLOUTS)
    assert all(0 < difference <= LOG_PROB_GATE for difference in differences.values()), differences
    # The weights have moved meanwhile, by far more than that.
    assert process.scalars("train/kl_loss")[ROLLOUTS[-1]] > 10 * LOG_PROB_GATE
