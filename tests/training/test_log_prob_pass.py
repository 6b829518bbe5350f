import pytest

from slime.training.log_prob_pass import needs_log_prob_pass
from tests.support.grpo_batch import objective_args


def skipping(**changes):
    """Arguments under which all conditions for skipping hold."""
    values = {
        "loss_type": "policy_loss", "kl_coef": 0.0, "use_rollout_logprobs": False,
        "get_mismatch_metrics": False, "use_critic": False, "keep_old_actor": False, "use_opd": False,
        "advantage_estimator": "grpo", "use_routing_replay": False, "use_rollout_routing_replay": False, "use_tis": False,
        "custom_tis_function_path": None, "custom_advantage_function_path": None, "rollout_data_postprocess_path": None,
        "use_rollout_entropy": False,
    }  # fmt: skip
    return objective_args(**{**values, **changes})


def plain_weighting(**kwargs):
    raise AssertionError("whether a pass is needed is told by what the function says of itself")


def normalised_weighting(**kwargs):
    plain_weighting()


normalised_weighting.step_statistics = lambda **kwargs: {}
normalised_weighting.needs_step_statistics = lambda args: args.normalise


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"advantage_estimator": "cispo"},
        {"use_kl_loss": True},
        {"use_opsm": True},
        {"use_tis": True},
        {"use_tis": True, "custom_tis_function_path": f"{__file__}:plain_weighting"},
        {"use_tis": True, "custom_tis_function_path": f"{__file__}:normalised_weighting", "normalise": False},
        # Without --use-tis the function is not called.
        {"custom_tis_function_path": f"{__file__}:normalised_weighting", "normalise": True},
        {"use_routing_replay": True, "use_rollout_routing_replay": True},
    ],
)
def test_the_pass_is_skipped(changes):
    assert not needs_log_prob_pass(skipping(**changes), steps=1)


def test_several_steps_force_the_pass_whatever_the_flags_announced():
    assert needs_log_prob_pass(skipping(num_steps_per_rollout=1), steps=2)
    assert not needs_log_prob_pass(skipping(num_steps_per_rollout=2), steps=1)
    assert not needs_log_prob_pass(skipping(loss_type="sft_loss"), steps=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "custom_loss"},
        {"kl_coef": 0.01},
        {"use_rollout_logprobs": True},
        {"get_mismatch_metrics": True},
        {"use_critic": True},
        {"keep_old_actor": True},
        {"use_opd": True},
        {"advantage_estimator": "gspo"},
        {"use_routing_replay": True},
        {"use_tis": True, "custom_tis_function_path": f"{__file__}:normalised_weighting", "normalise": True},
        {"custom_advantage_function_path": "mine.py:advantages"},
        {"rollout_data_postprocess_path": "mine.py:masks"},
    ],
)
def test_each_condition_forces_the_pass(changes):
    assert needs_log_prob_pass(skipping(**changes), steps=1)


@pytest.mark.parametrize("loss_type", ["policy_loss", "sft_loss"])
def test_l26_entropies_force_the_pass(loss_type):
    assert needs_log_prob_pass(skipping(use_rollout_entropy=True, loss_type=loss_type), steps=1)
