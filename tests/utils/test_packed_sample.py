"""Samples as flat arrays, and rows of different length."""

import numpy as np
import pytest

from slime.utils.data import get_source
from slime.utils.errors import UserError
from slime.utils.packed_sample import RaggedArray, as_loss_mask, pack_sample
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
    # Which float32 rounds.
    assert pack_sample(response_sample(teacher_log_probs=[-0.1, 0.0])).teacher_log_probs.dtype == np.float32


def test_no_mask_means_all_trained_and_remove_sample_is_not_baked_in():
    packed = pack_sample(response_sample(remove_sample=True))
    assert packed.loss_mask.tolist() == [1, 1]


def test_packed_once_and_again_where_a_field_was_read_or_replaced():
    sample = response_sample(loss_mask=[1, 1], rollout_log_probs=[0.0, 0.0])
    packed = pack_sample(sample)
    assert pack_sample(sample).tokens is packed.tokens and pack_sample(sample).loss_mask is packed.loss_mask
    sample.loss_mask = [0, 1]
    assert pack_sample(sample).loss_mask.tolist() == [0, 1]
    sample.append_response_tokens(tokens=[9], log_probs=[-1.0])
    assert pack_sample(sample).tokens.tolist() == [5, 6, 7, 2**40, 9]
    sample.teacher_log_probs = [0.0, 0.0, 0.0]
    assert pack_sample(sample).teacher_log_probs.tolist() == [0, 0, 0]


def test_an_entry_changed_in_place_after_packing_is_seen():
    sample = response_sample(loss_mask=[1, 1])
    pack_sample(sample)
    sample.loss_mask[0] = 0
    assert sample.loss_mask == [0, 1] and pack_sample(sample).loss_mask.tolist() == [0, 1]


@pytest.mark.parametrize("mask", [[True, False], [1.0, 0.0], np.array([1, 0], np.int8), np.array([1.0, 0.0])])
def test_a_mask_of_any_type_tells_what_is_trained(mask):
    packed = pack_sample(response_sample(loss_mask=mask))
    assert packed.loss_mask.dtype == np.int32 and packed.loss_mask.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("mask", "shown"),
    [
        ([1, 0.5], "0.5"), ([1, float("nan")], "nan"), ([1, 2], "2"), ([1, -1], "-1"), ([1.0, -1.0], "-1"),
        (np.array([0, 2**24], ">i4"), str(2**24)),
    ],
)  # fmt: skip
def test_a_mask_that_weighs_tokens_is_refused(mask, shown):
    message = rf"sample 7: `loss_mask` is {shown}(\.0)? at response token 1; .* 1 or 0"
    with pytest.raises(UserError, match=message):
        pack_sample(response_sample(index=7, loss_mask=mask))
    with pytest.raises(UserError, match=message):
        as_loss_mask(mask, "sample 7: `loss_mask`")


@pytest.mark.parametrize("dtype", ["i1", "u1", "<i8", ">i2", ">u4"])
def test_a_mask_of_integers_in_any_order_of_bytes_is_read(dtype):
    assert as_loss_mask(np.array([1, 0], dtype), "mask").tolist() == [1, 0]


def test_lengths_are_checked():
    with pytest.raises(ValueError, match="loss_mask has 1 entries, expected 2"):
        pack_sample(response_sample(loss_mask=[1]))


@pytest.mark.parametrize("tokens", [[1, 2.5, 3], np.array([1, np.nan, 3])])
def test_a_token_that_is_no_whole_number_is_refused_and_not_cut(tokens):
    with pytest.raises(ValueError, match=r"sample 4: tokens\[1\] is (2.5|nan), no whole number"):
        pack_sample(Sample(index=4, tokens=tokens, response_length=1))


def test_rows_are_views_of_one_array():
    ragged = RaggedArray.from_rows([np.array([1, 2]), np.array([], dtype=np.int64), np.array([3])], np.int32)
    assert ragged.values.dtype == np.int32 and ragged.values.tolist() == [1, 2, 3]
    assert ragged.offsets.tolist() == [0, 2, 2, 3] and ragged.lengths.tolist() == [2, 0, 1]
    assert [row.tolist() for row in ragged] == [[1, 2], [], [3]]
    assert np.shares_memory(ragged[0], ragged.values)


def test_no_rows():
    ragged = RaggedArray.from_rows([], np.float32)
    assert len(ragged) == 0 and ragged.values.dtype == np.float32


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [({}, None), ({"source_name": None}, None), ({"source_name": "gsm8k"}, "gsm8k"), ({"source_name": 3}, "3")],
)
def test_the_metadata_name_the_source(metadata, expected):
    assert get_source(Sample(metadata=metadata)) == expected
