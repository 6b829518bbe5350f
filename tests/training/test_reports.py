"""What is told of a rollout's data: means, the mismatch of engine and trainer, and the dump of what it is trained on."""

import json
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

from slime.training.advantages import compute_advantages_and_returns
from slime.training.context_parallel import NO_CONTEXT_PARALLEL, ContextParallel
from slime.training.reports import (
    mismatch_of_step,
    phase_speeds,
    rollout_data_metrics,
    save_train_data,
    worst_token_lines,
)
from slime.training.rollout_data import RolloutData
from slime.utils.errors import UserError
from slime.utils.plain_files import read_dump
from tests.support.models.grpo_batch import objective_args
from tests.support.processes.distributed import run_distributed


def new_kl(args, data):
    data["kl"] = [torch.tensor([0.75, 9.0])]
    data["advantages"] = data["returns"] = [torch.zeros(2)]


def changed_kl(args, data):
    data["kl"][0][0] += 0.5
    data["advantages"] = data["returns"] = [0 * data["kl"][0]]


def no_kl(args, data):
    data["advantages"] = data["returns"] = [0 * data["kl"][0]]


def worker(reference=None, function=None, mask=(1, 0), failed=None, **flags):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    student, teacher = [torch.tensor([-1.0, -3.0])], [torch.tensor([-0.5, 0.0])]
    data = RolloutData({
        "tokens": [torch.arange(3)], "total_lengths": [3], "response_lengths": [2], "rewards": [0.5], "truncated": [0],
        "loss_masks": [torch.tensor(mask)], "log_probs": student, "teacher_log_probs": teacher, "raw_reward": [0.5],
        "values": [torch.tensor([0.25, 9.0])], "rollout_mask_sums": [1.0], "global_batch_sizes": [1], "partition": [0],
        "micro_batch_indices": [[0]], "num_microbatches": [1], "rollout_ids": [7], "sample_indices": [3],
    })  # fmt: skip
    if reference is not None:
        data["ref_log_probs"] = [torch.tensor(reference)]
    if failed is not None:
        data["raw_reward"], data["failed"] = [0.5, 0.0, 1.0], failed
    path = None if function is None else f"{__name__}.{function}"
    args = objective_args(use_opd=True, kl_loss_type="k1", custom_advantage_function_path=path, **flags)
    compute_advantages_and_returns(args, data)
    return rollout_data_metrics(args, data, dist.group.WORLD)


def waits(samples):
    """How often the device is waited for in the metrics of a rank that has so many samples and no reference."""
    from tests.support.oracles.device_waits import counted_waits

    each = dict.fromkeys(("rewards", "truncated", "raw_reward"), [0.5] * samples)
    data = RolloutData(each | {
        "tokens": [torch.arange(3)] * samples, "total_lengths": [3] * samples, "response_lengths": [2] * samples,
        "loss_masks": [torch.tensor([1, 0])] * samples, "log_probs": [torch.tensor([-1.0, -3.0])] * samples,
        "rollout_mask_sums": [1.0] * samples, "global_batch_sizes": [samples],
    })  # fmt: skip
    args = objective_args(kl_loss_type="k1")
    compute_advantages_and_returns(args, data)
    with counted_waits() as counted:
        metrics = rollout_data_metrics(args, data, dist.group.WORLD)
    assert "kl" not in metrics and metrics["log_probs"] == -1.0
    return dict(counted)


def both():
    by_function = {name: worker(function=name).get("kl") for name in ("new_kl", "changed_kl", "no_kl")}
    masked = worker(mask=(0, 0), calculate_per_token_loss=True)
    failed = [worker(failed=each).get("raw_reward") for each in ([False, True, False], [True] * 3)]
    return worker(), worker([-1.5, 0.0]), by_function, (waits(2), waits(40)), masked, failed


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


def test_the_reward_of_a_sample_that_failed_is_not_reported(both_metrics):
    assert both_metrics[5] == [0.75, None]


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


@pytest.mark.parametrize(("per_token", "of_tokens"), [(False, -3.0), (True, -2.5)])
def test_tokens_are_averaged_like_the_loss_over_all_steps_and_the_rest_over_samples(alone, per_token, of_tokens):
    """Two steps of one rollout each. The first has fanned out into two samples with 3 trained tokens together, so
    (−1 − 2 − 3)/3 and −4 are averaged, or all four tokens."""
    data = RolloutData({
        "total_lengths": [4, 2, 3], "response_lengths": [3, 1, 2], "rollout_mask_sums": [3.0, 3.0, 1.0],
        "loss_masks": [torch.tensor(mask) for mask in ([1, 0, 1], [1], [0, 1])],
        "log_probs": [torch.tensor(row) for row in ([-1.0, 9.0, -2.0], [-3.0], [math.nan, -4.0])],
        "rewards": [1.0, 2.0, 6.0], "truncated": [1, 0, 0], "raw_reward": [1.0, 2.0, 6.0], "global_batch_sizes": [1, 1],
    })  # fmt: skip
    found = rollout_data_metrics(objective_args(calculate_per_token_loss=per_token), data, None)
    assert found == pytest.approx({
        "log_probs": of_tokens, "rewards": 3.0, "truncated": 1 / 3, "response_lengths": 2.0, "total_lengths": 3.0,
        "raw_reward": 3.0,
    })  # fmt: skip


def test_m4_the_schedule_is_no_metric(metrics):
    """Nor is anything else that is not about tokens, rewards or lengths."""
    assert metrics.keys() == {
        "log_probs", "teacher_log_probs", "values", "advantages", "returns", "opd_reverse_kl", "rewards",
        "truncated", "response_lengths", "total_lengths", "raw_reward",
    }  # fmt: skip


# (tokens, prompt length, trainer, engine, mask, sample index)
SAMPLES = (
    ([5, 6, 7, 8, 9], 2, [-1.0, -1.2, -0.3], [-2.0, -1.0, -0.3], [1, 1, 1], 40),
    ([1, 2, 3, 4], 1, [-1.0, -9.0, -0.5], [-1.5, -0.1, -0.5], [1, 0, 1], 41),
    ([3, 3, 3], 1, [-2.0, -2.0], [-2.25, -2.125], [1, 1], 42),
)


def data_of(positions, cp):
    rows = [SAMPLES[i] for i in positions]
    totals, responses = [len(row[0]) for row in rows], [len(row[2]) for row in rows]
    columns = {
        "tokens": [torch.tensor(row[0]) for row in rows], "total_lengths": totals, "response_lengths": responses,
        "loss_masks": [torch.tensor(row[4]) for row in rows], "sample_indices": [row[5] for row in rows],
        "log_probs": [torch.tensor(row[2]) for row in rows], "rollout_log_probs": [torch.tensor(row[3]) for row in rows],
    }  # fmt: skip
    return RolloutData.of_rank(columns, cp)


def place_of_rank():
    """Which of the three samples a rank has, and its part of them: of four ranks two share samples, one alone has all."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if dist.get_world_size() == 1:
        return [0, 1, 2], NO_CONTEXT_PARALLEL
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    return [[1], [2, 0]][rank // 2], ContextParallel(2, rank % 2, groups[rank // 2])


def report():
    """(metrics, lines) of this rank: two data-parallel ranks with two context-parallel ones each."""
    data = data_of(*place_of_rank())
    metrics = mismatch_of_step(data, dist.group.WORLD)
    nothing = mismatch_of_step(data.take([]), dist.group.WORLD)
    lines = worst_token_lines(data, lambda ids: "".join(f"<{i}>" for i in ids), dist.group.WORLD)
    return metrics, nothing, lines


def test_mismatch_of_all_layouts():
    alone = run_distributed(report, 1)[0]
    for metrics, nothing, lines in run_distributed(report, 4):
        assert metrics == pytest.approx(alone[0]) and nothing == alone[1] and lines == alone[2]
    metrics, nothing, lines = alone
    pairs = [(t, r) for _, _, train, roll, mask, _ in SAMPLES for t, r, m in zip(train, roll, mask, strict=True) if m]
    weights = [math.exp(t - r) for t, r in pairs]
    assert metrics == pytest.approx(
        {
            "mismatch_k1": sum(r - t for t, r in pairs) / len(pairs),
            "mismatch_k3": sum(w - 1 - math.log(w) for w in weights) / len(pairs),
            "mismatch_abs": sum(abs(t - r) for t, r in pairs) / len(pairs),
            "mismatch_ess": sum(weights) ** 2 / (len(pairs) * sum(w * w for w in weights)),
            "mismatch_max_abs": 1.0,
        }
    )
    assert nothing["mismatch_ess"] == 1
    assert lines[:4] == [
        "sample 40, response token 0, '<7>': trainer -1.0000, engine -2.0000, difference 1.0e+00",
        "sample 41, response token 0, '<2>': trainer -1.0000, engine -1.5000, difference 5.0e-01",
        "sample 42, response token 0, '<3>': trainer -2.0000, engine -2.2500, difference 2.5e-01",
        "sample 40, response token 1, '<8>': trainer -1.2000, engine -1.0000, difference 2.0e-01",
    ]
    assert len(lines) == 7, "masked tokens have no part in it"


ENTROPIES = ([0.5, 1.0, 1.5], [2.0, 9.0, 4.0], [0.25, 0.75])


def entropies():
    """By whether tokens are counted, the entropy of correct samples: where two of three are, and where none is."""
    positions, cp = place_of_rank()
    data = data_of(positions, cp)
    data["entropy"] = data.cut([torch.tensor(ENTROPIES[i]) for i in positions])
    data |= {"rollout_mask_sums": [[3.0, 2.0, 2.0][i] for i in positions], "global_batch_sizes": [3]}

    def told(rewards, **flags):
        columns = {"raw_reward": rewards, "local_raw_reward": [rewards[i] for i in positions]}
        of_rewards = RolloutData({**data, **columns}, cp)
        metrics = rollout_data_metrics(objective_args(**flags), of_rewards, dist.group.WORLD)
        return metrics.get("correct_entropy")

    asked = [
        (told([1.0, 0.0, 1.0], **flags), told([0.0, 0.5, 0.0], **flags))
        for flags in ({"log_correct_samples": True}, {"log_correct_samples": True, "calculate_per_token_loss": True})
    ]
    return [*asked, told([1.0, 0.0, 1.0])]


def test_m3_the_entropy_of_correct_samples_is_that_of_their_tokens_in_all_layouts():
    expected = [(pytest.approx((1.0 + 0.5) / 2), None), (pytest.approx((3.0 + 1.0) / 5), None), None]
    for found in (*run_distributed(entropies, 1), *run_distributed(entropies, 4)):
        assert found == expected


def test_speeds_of_a_rollouts_phases():
    seconds = {
        "perf/train_wait_time": 3.0,
        "perf/train_time": 5.0,
        "perf/log_probs_time": 0.5,
        "perf/ref_log_probs_time": 0.25,
        "perf/actor_train_time": 4.0,
    }
    assert phase_speeds(seconds, 800.0, 2.0) == {
        "perf/log_probs_tflops": 4.0, "perf/ref_log_probs_tflops": 8.0, "perf/actor_train_tflops": 1.5,
        "perf/actor_train_tok_per_s": 200.0,
        "perf/wait_time_ratio": 0.375,
    }  # fmt: skip
    # Nothing was trained, and the model is not known.
    waited = {"perf/train_wait_time": 1.0, "perf/train_time": 1.0, "perf/log_probs_time": 0.5}
    assert phase_speeds(waited, 800.0, None) == {"perf/wait_time_ratio": 0.5}


def test_the_engines_log_probs_must_be_there():
    data = data_of([0], NO_CONTEXT_PARALLEL)
    del data["rollout_log_probs"]
    with pytest.raises(UserError, match="--get-mismatch-metrics needs `rollout_log_probs`"):
        mismatch_of_step(data, None)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def shard(**changes):
    """Two samples of one data-parallel rank; their column is a view, as it is in training."""
    column = torch.arange(5, dtype=torch.float32)
    columns = {
        "tokens": [torch.tensor([1, 2, 3]), torch.tensor([4, 5])],
        "advantages": [column[:3], column[3:]],
        "sample_indices": [7, 2],
        "partition": [0, 1],
        "micro_batch_indices": [[0], [1]],
        "num_microbatches": [2],
        "global_batch_sizes": [2],
        "raw_reward": [0.5, 1.0],
        **changes,
    }
    return RolloutData(columns)


def test_directories_are_made_and_both_placeholders_filled_in(tmp_path, group):
    save_train_data(f"{tmp_path}/new/dir/{{rollout_id}}_{{rank}}.pt", 3, shard(), group, 0)
    (path,) = (tmp_path / "new/dir").iterdir()
    assert path.name == "3_0.pt"
    dump = torch.load(path, weights_only=True)
    assert (dump["format_version"], dump["rollout_id"], dump["rank"], dump["raw_reward"]) == (2, 3, 0, [0.5, 1.0])
    assert [sample["sample_indices"] for sample in dump["samples"]] == [2, 7]
    assert dump["samples"][0]["advantages"].tolist() == [3.0, 4.0]
    assert dump["samples"][0]["advantages"].untyped_storage().nbytes() == 8
    assert dump["dp_shards"][0]["sample_indices"] == [7, 2]


def test_under_another_name_a_train_dump_is_json_and_safetensors(tmp_path, group):
    save_train_data(f"{tmp_path}/{{rollout_id}}.json", 0, shard(), group, 0)
    assert json.loads((tmp_path / "0.json").read_text())["dp_shards"][0]["partition"] == [0, 1]
    dump = read_dump(tmp_path / "0.json")
    assert [sample["advantages"].tolist() for sample in dump["samples"]] == [[3.0, 4.0], [0.0, 1.0, 2.0]]


def test_samples_of_one_index_stand_in_the_order_of_the_rollout(tmp_path, group):
    """A schedule deals them out as their lengths ask for."""
    dealt = shard(sample_indices=[7, 7], partition=[5, 4])
    save_train_data(f"{tmp_path}/{{rollout_id}}.pt", 0, dealt, group, 0)
    samples = torch.load(tmp_path / "0.pt", weights_only=True)["samples"]
    assert [sample["tokens"].tolist() for sample in samples] == [[4, 5], [1, 2, 3]]


def test_pixels_are_not_dumped(tmp_path, group):
    images = [None, {"pixel_values": np.zeros((4, 12), np.float32)}]
    save_train_data(f"{tmp_path}/{{rollout_id}}.pt", 0, shard(multimodal_train_inputs=images), group, 0)
    samples = torch.load(tmp_path / "0.pt", weights_only=True)["samples"]
    assert [sorted(sample) for sample in samples] == [["advantages", "sample_indices", "tokens"]] * 2


def test_a_field_needs_one_entry_per_sample(tmp_path, group):
    data = shard(advantages=[torch.zeros(3)])
    with pytest.raises(ValueError, match="`advantages` has 1 entries for 2 samples; one tensor per sample"):
        save_train_data(f"{tmp_path}/{{rollout_id}}.pt", 0, data, group, 0)
