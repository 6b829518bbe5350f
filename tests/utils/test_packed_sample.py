import numpy as np
import pytest

from slime.utils.errors import UserError
from slime.utils.packed_sample import pack_sample
from slime.utils.types import Sample


def response_sample(**fields) -> Sample:
    return Sample(tokens=[5, 6, 7, 2**40], response_length=2, **fields)


def test_arrays_and_their_types():
    packed = pack_sample(response_sample(loss_mask=[0, 1], rollout_log_probs=[-0.5, 0], teacher_log_probs=None))
    assert packed.tokens.dtype == np.int64 and packed.tokens.tolist() == [5, 6, 7, 2**40]
    assert packed.loss_mask.dtype == np.int32 and packed.loss_mask.tolist() == [0, 1]
    assert packed.rollout_log_probs.dtype == np.float32 and packed.rollout_log_probs.tolist() == [-0.5, 0]
    assert packed.teacher_log_probs is None
    assert (packed.total_length, packed.response_length) == (4, 2)


def test_no_mask_means_all_trained_and_remove_sample_is_not_baked_in():
    packed = pack_sample(response_sample(remove_sample=True))
    assert packed.loss_mask.tolist() == [1, 1]


def test_packed_once_until_a_list_is_replaced_or_grows():
    sample = response_sample(loss_mask=[1, 1], rollout_log_probs=[0.0, 0.0])
    packed = pack_sample(sample)
    assert pack_sample(sample) is packed is sample.packed
    sample.loss_mask = [0, 1]
    replaced = pack_sample(sample)
    assert replaced is not packed and replaced.loss_mask.tolist() == [0, 1]
    sample.append_response_tokens(tokens=[9], log_probs=[-1.0])
    assert pack_sample(sample).tokens.tolist() == [5, 6, 7, 2**40, 9]
    sample.teacher_log_probs = [0.0, 0.0, 0.0]
    assert pack_sample(sample).teacher_log_probs.tolist() == [0, 0, 0]


@pytest.mark.parametrize("mask", [[True, False], [1.0, 0.0], np.array([1, 0], np.int8), np.array([1.0, 0.0])])
def test_a_mask_of_any_type_tells_what_is_trained(mask):
    packed = pack_sample(response_sample(loss_mask=mask))
    assert packed.loss_mask.dtype == np.int32 and packed.loss_mask.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("mask", "shown"),
    [([1, 0.5], "0.5"), ([1, float("nan")], "nan"), ([1, 2], "2"), ([1.0, -1.0], "-1.0")],
)
def test_a_mask_that_weighs_tokens_is_refused(mask, shown):
    with pytest.raises(UserError, match=rf"sample 7: `loss_mask` is {shown} at response token 1; .* 1 or 0"):
        pack_sample(response_sample(index=7, loss_mask=mask))


def test_lengths_are_checked():
    with pytest.raises(ValueError, match="loss_mask has 1 entries, expected 2"):
        pack_sample(response_sample(loss_mask=[1]))
