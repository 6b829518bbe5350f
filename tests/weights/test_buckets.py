import random
import weakref

import pytest
import torch

from slime.weights.buckets import BucketFlattener, loading_order, split_into_buckets


def tensors(*sizes):
    return [(f"t{index}", torch.zeros(size, dtype=torch.uint8)) for index, size in enumerate(sizes)]


def names_of(buckets):
    return [[name for name, _ in bucket] for bucket in buckets]


def test_buckets_stay_below_the_limit_and_keep_the_order():
    buckets = list(split_into_buckets(tensors(40, 60, 1, 50, 49), 100))
    assert names_of(buckets) == [["t0", "t1"], ["t2", "t3", "t4"]]


def test_s10_a_tensor_larger_than_the_buffer_travels_alone():
    assert names_of(split_into_buckets(tensors(10, 500, 10), 100)) == [["t0"], ["t1"], ["t2"]]


def test_what_engines_load_together_is_in_one_bucket():
    attention = "model.layers.{}.self_attn.{}"
    sizes = {
        "a": 60, attention.format(0, "q_a_proj.weight"): 30, attention.format(0, "kv_a_proj_with_mqa.weight"): 20,
        attention.format(1, "q_a_proj.weight"): 70, attention.format(1, "q_a_proj.weight_scale_inv"): 1,
        attention.format(1, "kv_a_proj_with_mqa.weight"): 120, attention.format(1, "kv_a_proj_with_mqa.weight_scale_inv"): 1,
        attention.format(1, "kv_b_proj.weight"): 10, attention.format(2, "kv_b_proj.weight"): 90,
        attention.format(2, "indexer.wk.weight"): 10, attention.format(2, "indexer.wk.weight_scale_inv"): 1,
    }  # fmt: skip
    names = list(sizes)
    buckets = split_into_buckets([(name, torch.zeros(size, dtype=torch.uint8)) for name, size in sizes.items()], 100)
    assert names_of(buckets) == [names[:1], names[1:3], names[3:7], names[7:9], names[9:]]


# In the order of the modules, with scales as an FP8 checkpoint has them.
SPARSE_ATTENTION = [
    "q_a_proj.weight", "q_a_proj.weight_scale_inv", "kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.weight_scale_inv",
    "kv_b_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight", "indexer.wq_b.weight", "indexer.wk.weight",
    "indexer.wk.weight_scale_inv", "indexer.k_norm.weight", "indexer.weights_proj.weight", "o_proj.weight",
]  # fmt: skip


@pytest.mark.parametrize("max_bytes", [60, 100, 130, 250, 400])
@pytest.mark.parametrize("seed", range(8))
def test_no_tensor_is_lost_or_sent_twice_where_engines_load_some_together(max_bytes, seed):
    generator = random.Random(seed)
    named = [
        (f"model.layers.{layer}.self_attn.{name}", torch.zeros(generator.randint(1, 60), dtype=torch.uint8))
        for layer in range(4)
        for name in SPARSE_ATTENTION
    ]
    buckets = names_of(split_into_buckets(named, max_bytes))
    assert sum(buckets, []) == [name for name, _ in named]
    for layer in range(4):
        for parts in (SPARSE_ATTENTION[:4], SPARSE_ATTENTION[8:10]):
            wanted = {f"model.layers.{layer}.self_attn.{name}" for name in parts}
            assert sum(not wanted.isdisjoint(bucket) for bucket in buckets) == 1


@pytest.mark.parametrize("max_bytes", [60, 100, 250])
def test_names_can_be_sorted_so_that_what_engines_load_together_follows(max_bytes):
    """Between them the alphabet has others."""
    names = [f"model.layers.{layer}.self_attn.{name}" for layer in (61, 6) for name in SPARSE_ATTENTION]
    names += ["model.layers.61.eh_proj.weight", "model.layers.61.mlp.gate.weight"]
    ordered = sorted(names, key=loading_order)
    assert sorted(ordered) == sorted(names) and ordered != sorted(names)
    buckets = names_of(split_into_buckets([(name, torch.zeros(40, dtype=torch.uint8)) for name in ordered], max_bytes))
    for layer in (61, 6):
        for parts in (SPARSE_ATTENTION[:4], SPARSE_ATTENTION[8:10]):
            wanted = {f"model.layers.{layer}.self_attn.{name}" for name in parts}
            assert sum(not wanted.isdisjoint(bucket) for bucket in buckets) == 1


def test_no_tensors_no_buckets():
    assert list(split_into_buckets([], 100)) == []


def test_buckets_are_made_lazily():
    seen = []

    def source():
        for item in tensors(60, 60, 60):
            seen.append(item[0])
            yield item

    iterator = split_into_buckets(source(), 100)
    next(iterator)
    assert seen == ["t0", "t1"]


def test_a_bucket_that_is_full_is_not_held_while_the_next_tensor_is_made():
    alive = []

    def source():
        made = []
        for size in (100, 40, 60, 500, 10):
            # Of those that were made before, as this one is made.
            alive.append([reference() is not None for reference in made])
            tensor = torch.zeros(size, dtype=torch.uint8)
            made.append(weakref.ref(tensor))
            yield str(size), tensor
            del tensor

    buckets = split_into_buckets(source(), 100)
    assert [len(next(buckets)) for _ in range(4)] == [1, 2, 1, 1]
    assert alive == [[], [False], [False, True], [False] * 3, [False] * 4]


def test_flat_bucket_can_be_viewed_in_place_whatever_dtypes_meet():
    bucket = [
        ("half", torch.randn(3).to(torch.bfloat16)),
        ("byte", torch.arange(5, dtype=torch.uint8)),
        ("full", torch.randn(2, 3)),
        ("scalar", torch.tensor(7.0, dtype=torch.float64)),
        ("transposed", torch.randn(2, 3).t()),
    ]
    flat = BucketFlattener().flatten(bucket)
    assert flat.nbytes == 3 * 2 + 5 + 6 * 4 + 8 + 6 * 4
    originals, start = dict(bucket), 0
    for name, dtype, shape in zip(flat.names, flat.dtypes, flat.shapes, strict=True):
        original = originals.pop(name)
        # As the receiver does it: a view of the bytes, without a copy.
        received = flat.buffer[start : start + original.nbytes].view(getattr(torch, dtype)).reshape(shape)
        assert torch.equal(received, original)
        start += original.nbytes
    assert not originals


def test_views_and_dtypes_of_all_kinds_arrive_as_they_are():
    numbers = torch.arange(12.0)
    tensors = {
        "transposed": numbers.view(3, 4).t(),
        "strided": numbers[::3],
        "float8": numbers.to(torch.float8_e4m3fn),
        "bool": numbers > 5,
        "whole": numbers.long(),
        "conjugated": torch.complex(numbers, numbers + 1).conj(),
        "negative": torch.complex(numbers, numbers + 1).conj().imag,
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "none": torch.zeros(0, 4),
    }
    flat = BucketFlattener().flatten(list(tensors.items()))
    start = 0
    for name, dtype, shape in zip(flat.names, flat.dtypes, flat.shapes, strict=True):
        expected = tensors[name]
        arrived = flat.buffer[start : start + expected.nbytes].view(expected.dtype).view(expected.shape)
        assert (dtype, shape) == (str(expected.dtype).removeprefix("torch."), list(expected.shape))
        assert torch.equal(arrived.to(torch.complex128), expected.to(torch.complex128))
        start += expected.nbytes
    assert start == flat.nbytes


def test_two_buffers_in_turn_and_no_growth():
    flattener = BucketFlattener(count=2)
    first = flattener.flatten([("a", torch.full((8,), 1.0))])
    second = flattener.flatten([("a", torch.full((8,), 2.0))])
    assert first.buffer.view(torch.float32).tolist() == [1.0] * 8
    third = flattener.flatten([("a", torch.full((4,), 3.0))])
    assert third.buffer.data_ptr() == first.buffer.data_ptr()
    assert third.nbytes == 16
    assert second.buffer.view(torch.float32).tolist() == [2.0] * 8


def test_a_tensor_that_is_larger_than_a_bucket_is_not_copied():
    flattener = BucketFlattener(max_bytes=31)
    large, small = torch.randn(4, 2).to(torch.float32), torch.randn(4)
    flat = flattener.flatten([("large", large)])
    assert flat.buffer.data_ptr() == large.data_ptr() and flat.nbytes == 32 and flat.shapes == [[4, 2]]
    assert not flat.is_copy and flat.single().equal(large)
    copied = flattener.flatten([("small", small)])
    assert copied.buffer.data_ptr() != small.data_ptr() and copied.is_copy and copied.single().equal(small)
    # Several tensors, and one that does not lie in one piece, have to be brought together.
    transposed = flattener.flatten([("large", large.t())])
    assert transposed.buffer.view(torch.float32).tolist() == large.t().flatten().tolist()
    several = flattener.flatten([("a", large), ("b", large)])
    assert several.nbytes == 64 and several.is_copy


def test_buffers_are_given_up():
    flattener = BucketFlattener(count=1)
    first = flattener.flatten([("a", torch.ones(8))])
    assert flattener.flatten([("a", torch.ones(8))]).buffer.data_ptr() == first.buffer.data_ptr()
    flattener.release()
    assert flattener.flatten([("a", torch.ones(8))]).buffer.data_ptr() != first.buffer.data_ptr()
