import pytest

from tests.support.distributed import run_distributed
from tests.support.grpo_batch import objective_args


def new_kl(args, data):
    import torch

    data["kl"] = [torch.tensor([0.75, 9.0])]
    data["advantages"] = data["returns"] = [torch.zeros(2)]


def changed_kl(args, data):
    data["kl"][0][0] += 0.5
    data["advantages"] = data["returns"] = [0 * data["kl"][0]]


def no_kl(args, data):
    data["advantages"] = data["returns"] = [0 * data["kl"][0]]


def worker(reference=None, function=None, mask=(1, 0), **flags):
    import torch
    import torch.distributed as dist

    from slime.training.advantages import compute_advantages_and_returns
    from slime.training.data_metrics import rollout_data_metrics

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    student, teacher = [torch.tensor([-1.0, -3.0])], [torch.tensor([-0.5, 0.0])]
    data = {
        "tokens": [torch.arange(3)], "total_lengths": [3], "response_lengths": [2], "rewards": [0.5], "truncated": [0],
        "loss_masks": [torch.tensor(mask)], "log_probs": student, "teacher_log_probs": teacher, "raw_reward": [0.5],
        "values": [torch.tensor([0.25, 9.0])], "rollout_mask_sums": [1.0], "global_batch_sizes": [1], "partition": [0],
        "micro_batch_indices": [[0]], "num_microbatches": [1], "rollout_ids": [7], "sample_indices": [3],
    }  # fmt: skip
    if reference is not None:
        data["ref_log_probs"] = [torch.tensor(reference)]
    path = None if function is None else f"{__name__}.{function}"
    args = objective_args(use_opd=True, kl_loss_type="k1", custom_advantage_function_path=path, **flags)
    compute_advantages_and_returns(args, data)
    return rollout_data_metrics(args, data, dist.group.WORLD)


def waits(samples):
    """How often the device is waited for in the metrics of a rank that has so many samples and no reference."""
    import torch
    import torch.distributed as dist

    from slime.training.advantages import compute_advantages_and_returns
    from slime.training.data_metrics import rollout_data_metrics
    from tests.support.device_waits import counted_waits

    each = dict.fromkeys(("rewards", "truncated", "raw_reward"), [0.5] * samples)
    data = each | {
        "tokens": [torch.arange(3)] * samples, "total_lengths": [3] * samples, "response_lengths": [2] * samples,
        "loss_masks": [torch.tensor([1, 0])] * samples, "log_probs": [torch.tensor([-1.0, -3.0])] * samples,
        "rollout_mask_sums": [1.0] * samples, "global_batch_sizes": [samples],
    }  # fmt: skip
    args = objective_args(kl_loss_type="k1")
    compute_advantages_and_returns(args, data)
    with counted_waits() as counted:
        metrics = rollout_data_metrics(args, data, dist.group.WORLD)
    assert "kl" not in metrics and metrics["log_probs"] == -1.0
    return dict(counted)


def both():
    by_function = {name: worker(function=name).get("kl") for name in ("new_kl", "changed_kl", "no_kl")}
    masked = worker(mask=(0, 0), calculate_per_token_loss=True)
    return worker(), worker([-1.5, 0.0]), by_function, (waits(2), waits(40)), masked


@pytest.fixture(scope="module")
def both_metrics():
    return run_distributed(both, 1)[0]


@pytest.fixture(scope="module")
def metrics(both_metrics):
    return both_metrics[0]


def test_the_kl_is_reported_where_there_is_a_reference(both_metrics):
    """Whatever its weight in the reward, here 0; without a reference there is none, not one of 0."""
    without, with_reference, *_ = both_metrics
    assert with_reference["kl"] == 0.5 and "kl" not in without


def test_the_kl_of_a_function_of_the_users_is_reported(both_metrics):
    assert both_metrics[2] == {"new_kl": 0.75, "changed_kl": 0.5, "no_kl": None}


def test_without_a_trained_token_the_means_over_tokens_are_0(both_metrics):
    masked = both_metrics[4]
    assert {masked[name] for name in ("log_probs", "teacher_log_probs", "values", "advantages", "returns")} == {0.0}
    assert masked["rewards"] == 0.5


def test_the_device_is_waited_for_once_however_many_samples_there_are(both_metrics):
    of_two, of_forty = both_metrics[3]
    assert of_two == of_forty and sum(of_forty.values()) <= 4


def test_l24_columns_of_teacher_and_critic_are_reported(metrics):
    found = {name: metrics[name] for name in ("opd_reverse_kl", "teacher_log_probs", "values", "advantages", "returns")}
    assert found == {
        "opd_reverse_kl": -0.5,
        "teacher_log_probs": -0.5,
        "values": 0.25,
        "advantages": 1.0,
        "returns": 0.5,
    }


def test_m4_the_schedule_is_no_metric(metrics):
    """Nor is anything else that is not about tokens, rewards or lengths."""
    assert metrics.keys() == {
        "log_probs", "teacher_log_probs", "values", "advantages", "returns", "opd_reverse_kl", "rewards",
        "truncated", "response_lengths", "total_lengths", "raw_reward",
    }  # fmt: skip
