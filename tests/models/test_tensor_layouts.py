"""Row orders by hand, and every layout's two pairs of inverses."""

import pytest
import torch

from slime.models.tensor_layouts import GatedLinear, QueryKeyValue, Replicated, Sharded, TensorSizes, Vocabulary
from slime.utils.errors import UserError

# 4 query heads in 2 groups, head dimension 2.
SIZES = TensorSizes(num_attention_heads=4, num_query_groups=2, vocab_size=5, padded_vocab_size=8)


def test_query_key_value_rows_stand_together_per_group():
    query, key, value = torch.arange(8), torch.arange(100, 104), torch.arange(200, 204)
    merged = QueryKeyValue().merge((query, key, value), SIZES)
    assert merged.tolist() == [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]


def test_gated_shards_hold_their_part_of_gate_and_of_up():
    merged = GatedLinear().merge((torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11, 12, 13])), SIZES)
    assert GatedLinear().shard(merged, rank=1, size=2).tolist() == [2, 3, 12, 13]


def test_vocabulary_is_padded_with_zero_rows():
    rows = torch.ones(5, 1)
    assert Vocabulary().merge((rows,), SIZES)[:, 0].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("layout", "tensors"),
    [
        (Replicated(), (torch.randn(6),)),
        (Sharded(dim=1), (torch.randn(3, 8),)),
        (Vocabulary(), (torch.randn(5, 3),)),
        (QueryKeyValue(), (torch.randn(8, 3), torch.randn(4, 3), torch.randn(4, 3))),
        (QueryKeyValue(), (torch.randn(8), torch.randn(4), torch.randn(4))),
        (GatedLinear(), (torch.randn(8, 3), torch.randn(8, 3))),
    ],
    ids=["replicated", "row parallel", "vocabulary", "qkv weight", "qkv bias", "gated"],
)
@pytest.mark.parametrize("size", [1, 2])
def test_round_trip_is_exact(layout, tensors, size):
    whole = layout.merge(tensors, SIZES)
    shards = [layout.shard(whole, rank, size) for rank in range(size)]
    gathered = layout.gather(shards)
    assert torch.equal(gathered, whole) and torch.equal(layout.gather(torch.stack(shards)), whole)
    back = layout.split(gathered, SIZES)
    assert len(back) == len(tensors)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(back, tensors, strict=True))


def test_sizes_that_contradict_the_flags_are_named():
    with pytest.raises(UserError, match="--vocab-size 5 .* 6 rows"):
        Vocabulary().merge((torch.ones(6, 1),), SIZES)
    with pytest.raises(UserError, match="--num-query-groups 2"):
        QueryKeyValue().merge((torch.ones(8), torch.ones(3), torch.ones(3)), SIZES)
