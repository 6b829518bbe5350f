"""The public context-parallel helpers: they find the rank's place by themselves, and need no Megatron to be imported."""

from types import SimpleNamespace

import pytest
import torch

from slime.backends.megatron_utils import cp_utils
from tests.support.models.args import default_args
from tests.support.processes.distributed import run_distributed

TOTALS, RESPONSES = [10, 16, 8, 2], [4, 10, 6, 1]


@pytest.fixture
def second_of_two(monkeypatch):
    """As plug-ins' own tests do it: `mpu` is replaced."""
    stub = SimpleNamespace(get_context_parallel_world_size=lambda: 2, get_context_parallel_rank=lambda: 1)
    # Past `setattr`, which would first look at the old value and so import Megatron into the test's process.
    monkeypatch.setitem(vars(cp_utils), "mpu", stub)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        cp_utils.nothing  # noqa: B018


def test_without_megatron_the_rank_owns_everything():
    tokens, log_prob = torch.arange(10), torch.arange(4.0)
    assert cp_utils.get_logits_and_tokens_offset_with_cp(10, 4) == (
        5, ((0, 5), (5, 10)), ((0, 0), (5, 9)), ((0, 0), (6, 10)),
    )  # fmt: skip
    assert cp_utils.slice_with_cp(tokens, 0) is tokens
    assert cp_utils.slice_log_prob_with_cp(log_prob, 10, 4) is log_prob
    assert cp_utils.all_gather_with_cp(log_prob, 10, 4) is log_prob


def test_a_replaced_mpu_is_asked(second_of_two):
    assert cp_utils.get_logits_and_tokens_offset_with_cp(8, 6) == (
        2, ((2, 4), (4, 6)), ((2, 4), (4, 6)), ((3, 5), (5, 7)),
    )  # fmt: skip
    assert cp_utils.slice_with_cp(torch.arange(1, 8), 0).tolist() == [3, 4, 5, 6]
    assert cp_utils.slice_log_prob_with_cp([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 8, 6) == [2.0, 3.0, 4.0, 5.0]


def plain_mean(values, masks, denominators):
    """Loops: the sum over samples of the masked sum over the denominator."""
    return sum(
        sum(value * weight for value, weight in zip(sample, mask, strict=True)) / max(denominator, 1)
        for sample, mask, denominator in zip(values, masks, denominators, strict=True)
    )


def test_reducer_of_one_rank():
    values, masks = [[1.0, 2.0, 3.0], [4.0, 5.0], [6.0]], [[1, 0, 1], [1, 1], [1]]
    tensors = [torch.tensor(mask) for mask in masks]
    flat = torch.tensor([value for sample in values for value in sample])
    totals, responses = [5, 4, 3], [3, 2, 1]
    assert float(cp_utils.get_sum_of_sample_mean(totals, responses, tensors)(flat)) == 12.5
    siblings = cp_utils.get_sum_of_sample_mean(totals, responses, tensors, sample_denoms=[4, 4, 1])
    assert float(siblings(flat)) == pytest.approx(plain_mean(values, masks, [4, 4, 1])) == 9.25
    per_token = cp_utils.get_sum_of_sample_mean(totals, responses, tensors, calculate_per_token_loss=True)
    assert float(per_token(flat)) == 19.0


@pytest.mark.parametrize("per_token", [False, True])
def test_masks_that_were_edited_before_the_reduction_count(second_of_two, per_token):
    """The second of two ranks owns the middle of a response, tokens 1 to 4; the denominators are those from before the edit."""
    mask = torch.ones(6, dtype=torch.int32)
    reduce = cp_utils.get_sum_of_sample_mean([8], [6], [mask], calculate_per_token_loss=per_token)
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert float(reduce(values)) == pytest.approx(10.0 if per_token else 10.0 / 6)
    mask[2:] = 0
    assert float(reduce(values)) == pytest.approx(1.0 if per_token else 1.0 / 6)


def megatron_worker():
    from tests.support.processes.megatron_worker import start

    # In a process group that Megatron has not laid out yet
    torch.distributed.init_process_group("gloo")
    from slime.backends.megatron_utils import cpu_runtime

    cpu_runtime.install()
    import megatron.core.parallel_state  # noqa: F401

    before = cp_utils.slice_log_prob_with_cp([1.0, 2.0, 3.0, 4.0], 10, 4)
    start(default_args(context_parallel_size=2, seed=1, distributed_timeout_minutes=1))
    full = [torch.arange(float(response)) for response in RESPONSES]
    masks = [(values % 3 != 1).int() for values in full]
    parts = [cp_utils.slice_log_prob_with_cp(*each) for each in zip(full, TOTALS, RESPONSES, strict=True)]
    gathered = [cp_utils.all_gather_with_cp(*each).tolist() for each in zip(parts, TOTALS, RESPONSES, strict=True)]
    share = float(cp_utils.get_sum_of_sample_mean(TOTALS, RESPONSES, masks)(torch.cat(parts)))
    return before, cp_utils.mpu.get_context_parallel_rank(), [len(part) for part in parts], gathered, share


def test_two_ranks_of_megatron():
    results = run_distributed(megatron_worker, 2)
    full = [[float(t) for t in range(response)] for response in RESPONSES]
    masks = [[int(t % 3 != 1) for t in range(response)] for response in RESPONSES]
    for rank, (before, found_rank, _, gathered, _) in enumerate(results):
        assert before == [1.0, 2.0, 3.0, 4.0]
        assert found_rank == rank
        assert gathered == full
    assert [results[0][2], results[1][2]] == [[0, 3, 2, 1], [4, 7, 4, 0]]
    # Each rank has its share of every sample; the denominators are those of whole samples.
    assert results[0][4] + results[1][4] == pytest.approx(plain_mean(full, masks, [sum(mask) for mask in masks]))
