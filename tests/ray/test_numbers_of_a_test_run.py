"""What a test run asks of its metrics."""

import json
from types import SimpleNamespace

import pytest

from slime.ray.driver import check_numbers
from slime.utils.errors import RunError


def make(**values):
    defaults = {
        "has_engines": True, "loss_type": "policy_loss", "num_steps_per_rollout": 2, "use_rollout_logprobs": False,
        "keep_old_actor": False, "ci_test": False, "ci_disable_kl_checker": False, "ci_save_grad_norm": None,
        "ci_load_grad_norm": None, "ci_train_rollout_logprob_abs_diff_threshold": 0.1,
    }  # fmt: skip
    return SimpleNamespace(**{**defaults, **values})


HEALTHY = {
    "rollout/step": {"rollout/log_probs": -0.5, "rollout/ref_log_probs": -0.5, "rollout/entropy": 0.7},
    "train/step": {
        "train/ppo_kl": 0.0, "train/kl_loss": -1e-9, "train/train_rollout_logprob_abs_diff": 0.1, "train/mtp_loss": 0.9,
        "train/pg_loss": 0.2,
    },
}  # fmt: skip


def check_tested(metrics, step_key, step, **values):
    check_numbers(make(ci_test=True, **values), {**metrics, step_key: step}, step_key)


@pytest.mark.parametrize(
    "name, step, value",
    [
        ("rollout/log_probs", 3, 0.0),
        ("rollout/log_probs", 3, -1.0),
        ("rollout/log_probs", 3, float("nan")),
        ("rollout/entropy", 3, 0.0),
        ("rollout/entropy", 3, 1.0),
        ("rollout/ref_log_probs", 0, -0.5 - 2e-8),
        ("train/ppo_kl", 6, 2e-8),
        ("train/ppo_kl", 6, -2e-8),
        ("train/kl_loss", 0, 2e-8),
        ("train/train_rollout_logprob_abs_diff", 7, 0.11),
        ("train/train_rollout_logprob_abs_diff", 7, float("nan")),
        ("train/mtp_loss", 7, 1.0),
    ],
)
def test_a_number_that_no_healthy_test_run_has_ends_it(name, step, value):
    step_key = name.split("/")[0] + "/step"
    check_tested(HEALTHY[step_key], step_key, step)
    with pytest.raises(RunError, match=name):
        check_tested({**HEALTHY[step_key], name: value}, step_key, step)
    check_numbers(make(), {name: value, step_key: step}, step_key)


@pytest.mark.parametrize(
    "values, name, step",
    [
        ({}, "train/ppo_kl", 7),  # in the second step of a rollout weights have changed
        ({}, "train/kl_loss", 1),
        ({"use_rollout_logprobs": True}, "train/ppo_kl", 6),
        ({"keep_old_actor": True}, "train/ppo_kl", 6),
        ({"ci_disable_kl_checker": True}, "train/ppo_kl", 6),
        ({"ci_disable_kl_checker": True}, "train/kl_loss", 0),
        ({"ci_disable_kl_checker": True}, "rollout/ref_log_probs", 0),
        ({}, "rollout/ref_log_probs", 1),
        ({"ci_train_rollout_logprob_abs_diff_threshold": 0.6}, "train/train_rollout_logprob_abs_diff", 6),
    ],
)
def test_what_a_healthy_test_run_may_have(values, name, step):
    step_key = name.split("/")[0] + "/step"
    check_tested({**HEALTHY[step_key], name: 0.5}, step_key, step, **values)


@pytest.mark.parametrize("step_key", HEALTHY)
@pytest.mark.parametrize("values", [{}, {"loss_type": "sft_loss"}, {"has_engines": False}])
def test_a_policy_that_trains_on_engines_has_their_log_probs(step_key, values):
    name = "train/train_rollout_logprob_abs_diff"
    numbers = {key: value for key, value in HEALTHY[step_key].items() if key != name}
    if values or step_key == "rollout/step":
        check_tested(numbers, step_key, 7, **values)
    else:
        with pytest.raises(RunError, match=f"rollout 3, step 1: {name} is missing"):
            check_tested(numbers, step_key, 7)
    # Whitening tells of itself beside the steps, and a critic may train alone.
    for other in ("train/whiten_empty", "train/critic-value_loss"):
        check_tested({other: 0.0}, "train/step", 7, **values)


@pytest.mark.parametrize("name, role", [("train/grad_norm", "actor"), ("train/critic-grad_norm", "critic")])
def test_gradient_norms_are_those_of_an_earlier_run(tmp_path, name, role):
    template = f"{tmp_path}/{{role}}-{{rollout_id}}-{{step_id}}.json"
    check_numbers(make(ci_save_grad_norm=template), {name: 2.0, "train/step": 7}, "train/step")
    assert [path.name for path in tmp_path.iterdir()] == [f"{role}-3-1.json"]
    for norm in (1.981, 2.019):
        check_numbers(make(ci_load_grad_norm=template), {name: norm, "train/step": 7}, "train/step")
    for norm in (1.979, 2.021, float("nan")):
        with pytest.raises(RunError, match=f"{name} is .* was 2 in {tmp_path}"):
            check_numbers(make(ci_load_grad_norm=template), {name: norm, "train/step": 7}, "train/step")
    with pytest.raises(RunError, match=f"--ci-load-grad-norm {tmp_path}/{role}-3-0.json"):
        check_numbers(make(ci_load_grad_norm=template), {name: 2.0, "train/step": 6}, "train/step")
    check_numbers(make(ci_save_grad_norm=template), {name: 0.001, "train/step": 7}, "train/step")
    check_numbers(make(ci_load_grad_norm=template), {name: 0.0109, "train/step": 7}, "train/step")


def test_a_norm_that_was_not_finite_is_that_of_no_other(tmp_path):
    """Of a step that float16 overflowed in, which trains nothing."""
    template, infinite = f"{tmp_path}/{{rollout_id}}-{{step_id}}.json", float("inf")
    check_numbers(make(ci_save_grad_norm=template), {"train/grad_norm": infinite, "train/step": 0}, "train/step")
    check_numbers(make(ci_load_grad_norm=template), {"train/grad_norm": infinite, "train/step": 0}, "train/step")
    for norm in (5.0, -infinite, float("nan")):
        with pytest.raises(RunError, match="train/grad_norm is .* was inf in"):
            check_numbers(make(ci_load_grad_norm=template), {"train/grad_norm": norm, "train/step": 0}, "train/step")


def test_a_norm_is_not_compared_with_itself(tmp_path):
    """Where a run saves into the files that it compares with, and where it fails, these stay."""
    path = tmp_path / "0-0.json"
    path.write_text("2.0")
    template = f"{tmp_path}/{{rollout_id}}-{{step_id}}.json"
    args = make(ci_save_grad_norm=template, ci_load_grad_norm=template)
    with pytest.raises(RunError, match="train/grad_norm is 3, and was 2 in"):
        check_numbers(args, {"train/grad_norm": 3.0, "train/step": 0}, "train/step")
    assert json.loads(path.read_text()) == 2.0
    check_numbers(args, {"train/grad_norm": 2.01, "train/step": 0}, "train/step")
    assert json.loads(path.read_text()) == 2.01
