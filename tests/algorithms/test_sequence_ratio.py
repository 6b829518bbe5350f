import math
from types import SimpleNamespace

import pytest
import torch

from slime.algorithms.policy_loss import compute_policy_loss
from slime.algorithms.reduction import masked_sum, rollout_mask_sums, sum_of_sample_mean
from slime.algorithms.sequence_ratio import compute_gspo_kl, off_policy_sequence_mask, sequence_kl
from slime.utils.ppo_utils import compute_opsm_mask
from tests.support.plain_math import numeric_gradient

OLD = [[-1.0, -2.0, -3.0], [-0.5, -0.5], [-0.7], [-1.0, -1.0]]
NEW = [[-1.1, -1.8, -3.3], [-0.4, -0.7], [-0.2], [-3.0, -0.5]]
MASKS = [[1, 1, 0], [1, 1], [1], [0, 0]]


def rows(values):
    return [torch.tensor(row) for row in values]


def plain_sequence_kl(new, old, mask):
    total = sum(m * (o - n) for n, o, m in zip(new, old, mask, strict=True))
    return total / max(sum(mask), 1)


def test_gspo():
    kl = compute_gspo_kl(rows(NEW[:2]), rows(OLD[:2]), rows(NEW[:2]), rows(MASKS[:2]))
    assert kl.tolist() == pytest.approx([-0.05] * 3 + [0.05] * 2, rel=1e-5)
    assert torch.exp(-kl)[[0, 3]].tolist() == pytest.approx([1.051271096, 0.951229425], rel=1e-6)


def test_every_token_of_the_local_part_has_its_sequences_ratio():
    # The parts that one of two context-parallel ranks may have: nothing of the second response.
    local = [torch.zeros(1), torch.zeros(0), torch.zeros(1), torch.zeros(2)]
    kl = compute_gspo_kl(rows(NEW), rows(OLD), local, rows(MASKS))
    assert kl.tolist() == pytest.approx([-0.05, -0.5, 0.0, 0.0], rel=1e-5)
    assert compute_gspo_kl([], [], [], []).tolist() == []


def test_gspo_gradient_equals_the_plain_form():
    """Σ over tokens of clip loss · mask / trained tokens, by loops over one flat list of log-probs."""
    advantages, low, high = [1.0, -0.5, 2.0, 1.0], 0.2, 0.2

    def plain(flat):
        total, start = 0.0, 0
        for old, mask, advantage in zip(OLD, MASKS, advantages, strict=True):
            new = flat[start : start + len(old)]
            start += len(old)
            ratio = math.exp(-plain_sequence_kl(new, old, mask))
            bounded = min(max(ratio, 1 - low), 1 + high)
            token = max(-ratio * advantage, -bounded * advantage)
            total += sum(m * token for m in mask) / max(sum(mask), 1)
        return total

    new = [row.requires_grad_() for row in rows(NEW)]
    kl = compute_gspo_kl(new, rows(OLD), new, rows(MASKS))
    per_token = torch.cat([torch.full((len(row),), a) for row, a in zip(OLD, advantages, strict=True)])
    loss, _ = compute_policy_loss(kl, per_token, low, high)
    total = sum_of_sample_mean(loss, rows(MASKS), [sum(mask) for mask in MASKS])
    total.backward()
    flat = [value for row in NEW for value in row]
    assert total.item() == pytest.approx(plain(flat), rel=1e-6)
    gradient = torch.cat([row.grad for row in new]).tolist()
    assert gradient == pytest.approx(numeric_gradient(plain, flat), rel=1e-4, abs=1e-6)
    assert gradient[2] == 0.0 and gradient[-2:] == [0.0, 0.0], "masked tokens learn nothing"


def test_masked_tokens_may_hold_anything():
    new = torch.tensor([-1.0, math.nan, -math.inf], requires_grad=True)
    kl = sequence_kl([new], [torch.tensor([-0.5, 0.0, 0.0])], [torch.tensor([1, 0, 0])])
    kl.sum().backward()
    assert kl.tolist() == [0.5] and new.grad.tolist() == [-1.0, 0.0, 0.0]


def test_log_probs_and_masks_of_one_response_have_one_length():
    with pytest.raises(ValueError, match=r"\(3,\) log-probs for \(2,\) mask entries"):
        sequence_kl([torch.zeros(3)], [torch.zeros(3)], [torch.ones(2)])


def test_opsm():
    new, old, mask = [torch.tensor([-1.2, -1.3])], [torch.tensor([-1.0, -1.0])], [torch.ones(2)]
    keep, rejected = compute_opsm_mask(SimpleNamespace(opsm_delta=1e-4), new, old, [torch.tensor([-1.0, 1.0])], mask)
    assert keep.tolist() == [0, 1] and rejected.tolist() == [1, 0]
    keep, _ = compute_opsm_mask(SimpleNamespace(opsm_delta=0.26), new, old, [torch.tensor([-1.0, -1.0])], mask)
    assert keep.tolist() == [1, 1], "the mean log-ratio is .25"


def test_opsm_rejects_neither_without_advantage_nor_at_the_threshold():
    old, new, mask = rows([[0.0, 0.0]]), rows([[-0.5, -0.5]]), rows([[1, 1]])
    for advantages, delta, rejected in (([0.0, -1.0], 0.25, [0, 1]), ([-1.0, -1.0], 0.5, [0, 0])):
        assert off_policy_sequence_mask(new, old, rows([advantages]), mask, delta)[1].tolist() == rejected


def test_opsm_of_no_samples():
    keep, rejected = off_policy_sequence_mask([], [], [], [], 0.1)
    assert keep.shape == rejected.shape == (0,) and keep.dtype == rejected.dtype == torch.float32


def test_opsm_carries_no_gradient():
    new = torch.tensor([-1.2], requires_grad=True)
    keep, rejected = off_policy_sequence_mask([new], [torch.zeros(1)], [-torch.ones(1)], [torch.ones(1)], 0.1)
    assert not keep.requires_grad and not rejected.requires_grad


def test_l16_the_rejected_fraction_is_reduced_like_every_other_metric():
    advantages = [[-1.0, -1.0, -1.0], [-1.0, 1.0], [-1.0], [-1.0, -1.0]]
    _, rejected = off_policy_sequence_mask(rows(NEW), rows(OLD), rows(advantages), rows(MASKS), 0.01)
    # Sequence means −.05, .05, −.5, 0: only the second is beyond, with one of its two tokens.
    assert rejected.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    assert masked_sum(rejected, rows(MASKS)).item() / 5 == pytest.approx(1 / 5)
    denominators = rollout_mask_sums([sum(mask) for mask in MASKS], [0, 0, 1, 2])
    # The first two samples are one execution with 4 trained tokens, one of them rejected; three executions.
    assert sum_of_sample_mean(rejected, rows(MASKS), denominators).item() / 3 == pytest.approx(1 / 4 / 3)


def test_l16_masked_tokens_of_a_rejected_sequence_do_not_count():
    new, old = [torch.tensor([-2.0, -2.0])], [torch.tensor([-1.0, -1.0])]
    mask = [torch.tensor([1, 0])]
    _, rejected = off_policy_sequence_mask(new, old, [-torch.ones(2)], mask, 0.5)
    assert masked_sum(rejected, mask).item() == 1
