"""The public module of losses: documented names, argument lists, and the numbers of a process without Megatron's groups."""

import pytest
import torch

from slime.backends.megatron_utils import loss
from slime.training.packed_stream import pack_stream
from tests.support.models.grpo_batch import objective_args
from tests.support.models.tiny_model import write_tiny_model
from tests.support.processes.distributed import run_distributed
from tests.support.processes.layout_steps import layout_args

VOCABULARY = 7
TOKENS = [torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6, 0])]


def micro_batch():
    return {
        "tokens": TOKENS, "total_lengths": [4, 3], "response_lengths": [2, 1], "rollout_mask_sums": [2.0, 1.0],
        "loss_masks": [torch.tensor([1, 1]), torch.tensor([1])], "advantages": [torch.ones(2), -torch.ones(1)],
        "values": [torch.zeros(2), torch.zeros(1)], "returns": [torch.ones(2), torch.ones(1)],
        "ref_log_probs": [torch.zeros(2), torch.zeros(1)], "stream": pack_stream(TOKENS, [2, 1], 4),
    }  # fmt: skip


def logits(columns=VOCABULARY):
    return torch.randn(8, columns, generator=torch.Generator().manual_seed(0))


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'mpo'"):
        loss.mpo  # noqa: B018


def test_log_probs_and_values_per_sample():
    """Also from logits with a leading dimension, and whatever the padding at the end of the stream."""
    lengths = {"unconcat_tokens": TOKENS, "total_lengths": [4, 3], "response_lengths": [2, 1]}
    args = objective_args(rollout_temperature=0.5)
    expected = torch.log_softmax(logits() / 0.5, -1)
    for given in (logits(), logits()[None], logits()[:7]):
        found = loss.get_log_probs_and_entropy(given, args=args, **lengths, with_entropy=True)
        assert found["log_probs"][0].tolist() == pytest.approx([float(expected[1, 3]), float(expected[2, 4])])
        assert found["log_probs"][1].tolist() == pytest.approx([float(expected[5, 0])])
        assert found["entropy"][1].tolist() == pytest.approx([float(-(expected[5].exp() * expected[5]).sum())])
    assert set(loss.get_log_probs_and_entropy(logits(), args=args, **lengths)) == {"log_probs"}
    with pytest.raises(ValueError, match="5 rows of logits for samples that take 7"):
        loss.get_log_probs_and_entropy(logits()[:5], args=args, **lengths)


def test_l17_values_are_not_divided_by_the_temperature():
    outputs = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]])
    found = loss.get_values(
        outputs, args=objective_args(rollout_temperature=0.5), unconcat_tokens=[torch.arange(4)], total_lengths=[4],
        response_lengths=[2],
    )  # fmt: skip
    assert found["values"][0].tolist() == [2, 3]


def test_l18_one_entropy_per_response_token():
    """Also for chunks that end inside a response, and for a sample without any response token."""
    tokens, responses = [torch.arange(5) % VOCABULARY, torch.arange(2), torch.arange(3)], [4, 0, 1]
    found = loss.get_log_probs_and_entropy(
        torch.randn(12, VOCABULARY), args=objective_args(log_probs_chunk_size=3), unconcat_tokens=tokens,
        total_lengths=[5, 2, 3], response_lengths=responses, with_entropy=True,
    )  # fmt: skip
    assert [len(entropy) for entropy in found["entropy"]] == responses
    assert all(torch.is_tensor(entropy) and entropy.isfinite().all() for entropy in found["entropy"])


def custom(args, batch, logits, sum_of_sample_mean):
    value, metrics = loss.policy_loss_function(args, batch, logits, sum_of_sample_mean)
    tuning, _ = loss.sft_loss_function(args, batch, logits, sum_of_sample_mean)
    return value + 2 * tuning, {**metrics, "tuning": tuning}


def test_a_custom_loss_is_built_from_the_shipped_ones():
    args = objective_args(loss_type="custom_loss", custom_loss_function_path=f"{__file__}:custom")
    value, metrics = loss.loss_function(args, micro_batch(), logits())
    plain, _ = loss.loss_function(objective_args(), micro_batch(), logits()[None])
    tuning, _ = loss.loss_function(objective_args(loss_type="sft_loss"), micro_batch(), logits())
    assert float(value) == pytest.approx(float(plain + 2 * tuning)) and float(metrics["tuning"]) == float(tuning)


def test_a_batch_of_ones_own_making_needs_no_stream():
    """Its columns say which rows of the logits are whose, also where these have padding at their end."""
    own = {name: column for name, column in micro_batch().items() if name != "stream"}
    for args in (objective_args(), objective_args(loss_type="sft_loss")):
        expected, _ = loss.loss_function(args, micro_batch(), logits())
        for given in (logits(), logits()[None, :7]):
            assert float(loss.loss_function(args, own, given)[0]) == float(expected)
    value, _ = loss.value_loss_function(objective_args(), own, torch.zeros(1, 7, 1), sum_of_everything)
    assert float(value) == 3 and "stream" not in own


def test_the_critics_loss():
    reduce = sum_of_everything
    value, metrics = loss.value_loss_function(objective_args(), micro_batch(), torch.zeros(1, 8, 1), reduce)
    assert float(value) == 3 and set(metrics) == {"value_loss", "value_clipfrac"}


def sum_of_everything(values):
    return values.sum()


def test_advantages_of_a_rank_alone():
    data = {
        "total_lengths": [4, 3], "response_lengths": [2, 1], "rewards": [1.0, -1.0],
        "loss_masks": [torch.ones(2), torch.ones(1)], "log_probs": [-torch.ones(2), -torch.ones(1)],
        "teacher_log_probs": [torch.tensor([-0.5, -1.0]), -torch.ones(1)],
    }  # fmt: skip
    loss.compute_advantages_and_returns(objective_args(use_opd=True), data)
    assert [a.tolist() for a in data["advantages"]] == [[1.5, 1.0], [-1.0]]
    assert data["opd_reverse_kl"][0].tolist() == [-0.5, 0.0]


def without_log_probs(args, rollout_data):
    rollout_data["advantages"] = rollout_data["returns"] = [
        torch.zeros_like(mask) for mask in rollout_data["loss_masks"]
    ]
    rollout_data["mine"] = rollout_data.pop("log_probs")


def test_what_a_function_of_the_users_takes_out_of_the_data_is_gone():
    data = {
        "tokens": TOKENS, "total_lengths": [4, 3], "response_lengths": [2, 1], "rewards": [1.0, -1.0],
        "loss_masks": [torch.ones(2), torch.ones(1)], "log_probs": [-torch.ones(2), -torch.ones(1)],
    }  # fmt: skip
    log_probs = data["log_probs"]
    args = objective_args(custom_advantage_function_path=f"{__file__}:without_log_probs")
    loss.compute_advantages_and_returns(args, data)
    assert data["mine"] is log_probs and "log_probs" not in data
    assert {"tokens", "kl", "advantages", "returns"} <= data.keys()


def whitening_worker(args):
    """Whitened advantages of two responses, whose tokens two context-parallel ranks share."""
    from tests.support.processes import megatron_worker

    megatron_worker.start(args)
    data = {
        "tokens": [torch.arange(8), torch.arange(4)], "total_lengths": [8, 4], "response_lengths": [4, 2],
        "rewards": [1.0, 3.0], "loss_masks": [torch.ones(4), torch.ones(2)],
    }  # fmt: skip
    loss.compute_advantages_and_returns(args, data)
    return [tokens.tolist() for tokens in data["advantages"]]


def test_whitening_is_over_all_data_and_context_parallel_ranks(tmp_path):
    """Four tokens with 1 and two with 3: mean 5/3, variance 16/15. The first rank alone has one of those with 1."""
    write_tiny_model(tmp_path)
    args = layout_args(tmp_path, context_parallel_size=2, normalize_advantages=True, use_kl_loss=False)
    low, high = -2 / 3 / (16 / 15) ** 0.5, 4 / 3 / (16 / 15) ** 0.5
    zero, one = run_distributed(whitening_worker, 2, (args,))
    assert [pytest.approx(row) for row in ([low], [])] == zero
    assert [pytest.approx(row) for row in ([low] * 3, [high] * 2)] == one


def test_distillation_alone():
    """Two tokens: −1 against −.5 of the teacher, −.2 against −.9."""
    data = {"teacher_log_probs": [torch.tensor([-0.5]), torch.tensor([-0.9])]}
    advantages = [torch.ones(1), torch.ones(1)]
    student = [torch.tensor([-1.0]), torch.tensor([-0.2])]
    loss.apply_opd_kl_to_advantages(objective_args(), data, advantages, student)
    assert [float(a) for a in advantages] == pytest.approx([1.5, 0.3])
    # With masks beside them, and without lengths of sequences.
    data["loss_masks"] = [torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)]
    advantages = [torch.ones(1), torch.ones(1)]
    loss.apply_opd_kl_to_advantages(objective_args(), data, advantages, student)
    assert [float(a) for a in advantages] == pytest.approx([1.5, 1.0])
    with pytest.raises(ValueError, match="teacher_log_probs"):
        loss.apply_opd_kl_to_advantages(objective_args(), {}, advantages, student)
