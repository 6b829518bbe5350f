"""Row orders by hand, and every layout's two pairs of inverses."""

import pytest
import torch

from slime.models.tensor_layouts import (
    FusedGatedLinear,
    GatedLinear,
    GatedQueryKeyValue,
    IndexerHeads,
    PerKeyHead,
    QueryKeyValue,
    Replicated,
    Sharded,
    TensorSizes,
    Vocabulary,
)
from slime.utils.errors import UserError

# 4 query heads in 2 groups, head dimension 2. Linear attention: 2 key heads of width 1 with two values of width 2 each. Heads
# of an indexer have six channels, of which two are rotated.
SIZES = TensorSizes(
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=5,
    padded_vocab_size=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=1,
    linear_value_head_dim=2,
    dsa_indexer_head_dim=6,
    qk_pos_emb_head_dim=2,
)


class Counting:
    """A tensor that counts the entries that are taken out of it."""

    def __init__(self, tensor):
        self._tensor, self.shape, self.taken = tensor, tensor.shape, 0

    def __getitem__(self, index):
        found = self._tensor[index]
        self.taken += found.numel()
        return found


def part(layout, tensors, rank=0, size=1):
    return layout.part(tensors, SIZES, rank, size)


def test_query_key_value_rows_stand_together_per_group():
    rows = torch.arange(8), torch.arange(100, 104), torch.arange(200, 204)
    merged = [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]
    assert part(QueryKeyValue(), rows).tolist() == merged
    # Of four ranks two share a group.
    for size in (2, 4):
        parts = [part(QueryKeyValue(), rows, rank, size).tolist() for rank in range(size)]
        assert parts == [merged[start : start + 16 // size] for start in range(0, 16, 16 // size)]


def test_gated_queries_of_a_group_stand_before_their_gates():
    rows = torch.arange(8), torch.arange(100, 102), torch.arange(200, 202)
    merged = [0, 2, 1, 3, 100, 200, 4, 6, 5, 7, 101, 201]
    assert part(GatedQueryKeyValue(), rows).tolist() == merged
    assert part(GatedQueryKeyValue(), rows, rank=1, size=2).tolist() == merged[6:]


def test_rows_of_linear_attention_stand_together_per_key_head():
    queries_keys_values, decays = torch.arange(12), torch.arange(100, 104)
    apart = PerKeyHead(("k", "k", "v"), ("h",))
    merged = [0, 2, 4, 5, 6, 7, 100, 101, 1, 3, 8, 9, 10, 11, 102, 103]
    assert part(apart, (queries_keys_values, decays)).tolist() == merged
    assert part(apart, (queries_keys_values, decays), rank=1, size=2).tolist() == merged[8:]
    together = PerKeyHead(("kkv",), ("h",))
    merged = [*range(6), 100, 101, *range(6, 12), 102, 103]
    assert part(together, (queries_keys_values, decays)).tolist() == merged


def test_rows_that_contradict_the_sizes_of_linear_attention_are_an_error():
    with pytest.raises(UserError, match=r"--linear-num-key-heads 2 .* ask for \[12\] rows, .* has \[10\]"):
        part(PerKeyHead(("k", "k", "v")), (torch.zeros(10),))


def test_gated_shards_hold_their_part_of_gate_and_of_up():
    rows = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11, 12, 13])
    assert part(GatedLinear(), rows, rank=1, size=2).tolist() == [2, 3, 12, 13]
    assert part(FusedGatedLinear(), (torch.cat(rows),), rank=1, size=2).tolist() == [2, 3, 12, 13]


def test_rotated_channels_stand_last_in_each_head_of_an_indexer():
    rows = torch.arange(12)
    merged = [2, 3, 4, 5, 0, 1, 8, 9, 10, 11, 6, 7]
    for rank in range(2):
        assert part(IndexerHeads(), (rows,), rank, 2).tolist() == merged
    assert IndexerHeads().split(torch.tensor(merged), SIZES)[0].equal(rows)


def test_vocabulary_is_padded_with_zero_rows():
    rows = torch.ones(5, 1)
    assert part(Vocabulary(), (rows,))[:, 0].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    halves = [part(Vocabulary(), (rows,), rank, 4)[:, 0].tolist() for rank in range(4)]
    assert halves == [[1, 1], [1, 1], [1, 0], [0, 0]]


@pytest.mark.parametrize(
    ("layout", "tensors"),
    [
        (Replicated(), (torch.randn(6),)),
        (Sharded(dim=1), (torch.randn(3, 8),)),
        (Vocabulary(), (torch.randn(5, 3),)),
        (QueryKeyValue(), (torch.randn(8, 3), torch.randn(4, 3), torch.randn(4, 3))),
        (QueryKeyValue(), (torch.randn(8), torch.randn(4), torch.randn(4))),
        (GatedLinear(), (torch.randn(8, 3), torch.randn(8, 3))),
        (GatedQueryKeyValue(), (torch.randn(16, 3), torch.randn(4, 3), torch.randn(4, 3))),
        (PerKeyHead(("kkvv",), ("hh",)), (torch.randn(20, 3), torch.randn(8, 3))),
        (PerKeyHead(("k", "k", "v"), ("v",), ("h",)), (torch.randn(12, 3), torch.randn(8, 3), torch.randn(4, 3))),
        (PerKeyHead(("k", "k", "v")), (torch.randn(12, 1, 4),)),
    ],
    ids=[
        "replicated",
        "row parallel",
        "vocabulary",
        "qkv weight",
        "qkv bias",
        "gated",
        "gated qkv",
        "linear interleaved",
        "linear",
        "convolution",
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_round_trip_is_exact(layout, tensors, size):
    whole = layout.part(tensors, SIZES, 0, 1)
    shards = [layout.part(tensors, SIZES, rank, size) for rank in range(size)]
    gathered = layout.gather(shards)
    assert torch.equal(gathered, whole) and torch.equal(layout.gather(torch.stack(shards)), whole)
    back = layout.split(gathered, SIZES)
    assert len(back) == len(tensors)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(back, tensors, strict=True))


@pytest.mark.parametrize(
    ("layout", "shapes", "taken"),
    [
        (Replicated(), [(6,)], [[6], [6]]),
        (Sharded(dim=0), [(8, 3)], [[12], [12]]),
        (Sharded(dim=1), [(3, 8)], [[12], [12]]),
        # Of 8 rows with the padding 4 are the first rank's; 3 of the second rank's are none of the file.
        (Vocabulary(), [(5, 3)], [[12], [3]]),
        (QueryKeyValue(), [(8, 3), (4, 3), (4, 3)], [[12, 6, 6], [12, 6, 6]]),
        (QueryKeyValue(), [(8,), (4,), (4,)], [[4, 2, 2], [4, 2, 2]]),
        (GatedLinear(), [(8, 3), (8, 3)], [[12, 12], [12, 12]]),
    ],
    ids=["replicated", "column parallel", "row parallel", "vocabulary", "qkv weight", "qkv bias", "gated"],
)
def test_a_rank_takes_its_own_entries_alone(layout, shapes, taken):
    for rank in (0, 1):
        tensors = [Counting(torch.randn(shape)) for shape in shapes]
        part(layout, tensors, rank, 2)
        assert [tensor.taken for tensor in tensors] == taken[rank]


def test_sizes_that_contradict_the_flags_are_named():
    with pytest.raises(UserError, match="--vocab-size 5 .* 6 rows"):
        part(Vocabulary(), (torch.ones(6, 1),))
    with pytest.raises(UserError, match="--num-query-groups 2"):
        part(QueryKeyValue(), (torch.ones(8), torch.ones(3), torch.ones(3)))


@pytest.mark.parametrize("layout", [QueryKeyValue(), GatedLinear(), Vocabulary(), Sharded(1), Replicated()])
def test_parts_are_the_parameter_of_a_single_rank(layout):
    rows = (8, 4, 4) if isinstance(layout, QueryKeyValue) else (6, 6) if isinstance(layout, GatedLinear) else (5,)
    tensors = [torch.randn(count, 3) for count in rows]
    parts = layout.parts(tensors, SIZES)
    assert torch.cat(tuple(parts)).equal(part(layout, tensors))
    # Rows are where they were.
    own = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert all(given.untyped_storage().data_ptr() in own for given in parts if given.any())
