"""Users' plug-ins import these names and pass arguments by these names."""

import inspect

import pytest

from slime.utils import ppo_utils

PARAMETERS = {
    "compute_approx_kl": "log_probs log_probs_base kl_loss_type importance_ratio",
    "compute_policy_loss": "ppo_kl advantages eps_clip eps_clip_high eps_clip_c",
    "compute_cispo_loss": "ppo_kl log_probs advantages eps_clip eps_clip_high",
    "compute_gspo_kl": "full_log_probs full_old_log_probs local_log_probs loss_masks",
    "compute_opsm_mask": "args full_log_probs full_old_log_probs advantages loss_masks",
    "get_grpo_returns": "rewards kl",
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_public_names_and_arguments(name):
    assert " ".join(inspect.signature(getattr(ppo_utils, name)).parameters) == PARAMETERS[name]
    assert name in ppo_utils.__all__
