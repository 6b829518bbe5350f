"""Which engines are fed in which way, and what becomes of a bucket that one of the ways loses."""

from types import SimpleNamespace

import pytest

from slime.arguments.sizes import GpuRanges
from slime.utils.errors import UserError
from slime.weights.transports import (
    ColocatedTransport,
    DiskTransport,
    EnginesFailed,
    ProcessGroupTransport,
    Receiver,
    split_engines,
    transport_of,
)  # fmt: skip
from slime.weights.transports.shared_handles import SharedHandlesTransport

ARGS = SimpleNamespace(
    update_weight_transport="nccl", colocate=True, distributed_timeout_minutes=1, update_weight_buffer_size=2**20,
    has_trainer=True, has_engines=True, rollout_external=False, rollout_external_engine_infos=None, world_size=2,
    rollout_num_gpus=4, actor_num_nodes=1, num_gpus_per_node=4,
)  # fmt: skip


@pytest.mark.parametrize(
    "transport, colocate, way",
    [
        ("nccl", True, ColocatedTransport), ("nccl", False, ProcessGroupTransport), ("disk", True, DiskTransport),
        ("disk", False, DiskTransport),
    ],
)  # fmt: skip
def test_who_shares_devices_shares_memory(transport, colocate, way):
    args = SimpleNamespace(update_weight_transport=transport, update_weight_mode="full", colocate=colocate)
    assert transport_of(args) is way


@pytest.mark.parametrize(
    "layout, sizes, inside",
    [
        # The trainer's devices 0 to 3, engines from 0 on.
        (GpuRanges(4, 4, 4, 0), [1, 1, 1, 1], [0, 1, 2, 3]),
        (GpuRanges(8, 4, 8, 0), [2, 2, 2, 2], [0, 1]),
        (GpuRanges(8, 4, 8, 0), [4, 1, 3], [0]),
        # One has devices of both kinds.
        (GpuRanges(6, 4, 6, 0), [3, 3], [0]),
        (GpuRanges(8, 1, 8, 0), [2, 2, 2, 2], []),
        # Engines apart, from 4 on.
        (GpuRanges(8, 4, 4, 4), [1, 1, 1, 1], []),
    ],
)
def test_engines_inside_the_trainers_devices(layout, sizes, inside):
    engines = [Receiver(id, None, size, sum(sizes[:id])) for id, size in enumerate(sizes)]
    found, beside = split_engines(engines, layout)
    assert [engine.id for engine in found] == inside
    assert [engine.id for engine in beside] == [engine.id for engine in engines if engine.id not in inside]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_nccl_gets_no_engine_on_the_device_of_the_sender_into_a_group(colocated, monkeypatch, backend, size, rank):
    """Ranks have devices 0 and 1, and with pipeline stages each of them sends. An engine of three has both of them, and one
    beside."""
    monkeypatch.setattr(
        "slime.weights.transports.get_accelerator", lambda: SimpleNamespace(process_group_backend=backend)
    )
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    engines = [Receiver(0, None, size, 0), Receiver(1, None, 1, size)]
    if (backend, size) == ("nccl", 3):
        with pytest.raises(
            UserError, match=f"engine 0 has the GPU of training rank {rank}.*--update-weight-transport disk"
        ):
            colocated.connect(engines)
        return
    colocated.connect(engines)
    assert ("group", "connect", engines[1:] if size == 2 else engines) in colocated.calls


class Way:
    def __init__(self, name, calls, failures):
        self.name, self.calls, self.failures = name, calls, failures

    def __getattr__(self, method):
        def call(*arguments):
            self.calls.append((self.name, method, *arguments))
            if method in self.failures.get(self.name, {}):
                raise self.failures[self.name][method]

        return call


@pytest.fixture
def colocated():
    """A transport whose ways only note what they are asked; `failures`: way → method → error."""
    transport = ColocatedTransport(ARGS, 0, 1)
    transport.calls, transport.failures = [], {}
    transport._handles = Way("handles", transport.calls, transport.failures)
    transport._group = Way("group", transport.calls, transport.failures)
    return transport


ENGINES = [Receiver(id, None, 1, id) for id in range(4)]


def test_a_bucket_goes_both_ways(colocated):
    colocated.connect(ENGINES)
    colocated.begin(3)
    colocated.send("bucket")
    colocated.finish()
    assert colocated.calls == [
        ("handles", "connect", ENGINES[:2]), ("group", "connect", ENGINES[2:]), ("handles", "begin", 3), ("group", "begin", 3),
        ("handles", "send", "bucket"), ("group", "send", "bucket"), ("handles", "finish"), ("group", "finish"),
    ]  # fmt: skip


def test_engines_of_one_kind_need_one_way(colocated):
    colocated.connect(ENGINES[:2])
    colocated.send("bucket")
    assert colocated.calls == [("handles", "connect", ENGINES[:2]), ("group", "close"), ("handles", "send", "bucket")]
    colocated.connect(ENGINES[2:])
    colocated.calls.clear()
    colocated.send("bucket")
    assert colocated.calls == [("group", "send", "bucket")]


@pytest.mark.parametrize(
    "group_is_certain, failed", [(True, {0: "hangs", 3: "of the group"}), (False, {0: "hangs"})], ids=["both", "one"]
)
def test_both_ways_go_on_and_who_is_certainly_to_blame_is_told(colocated, group_is_certain, failed):
    colocated.connect(ENGINES)
    colocated.failures["handles"] = {"send": EnginesFailed({0: "hangs"}, certain=True)}
    colocated.failures["group"] = {"send": EnginesFailed({3: "of the group"}, certain=group_is_certain)}
    with pytest.raises(EnginesFailed) as raised:
        colocated.send("bucket")
    assert raised.value.failed == failed and raised.value.certain
    assert ("group", "send", "bucket") in colocated.calls


def test_a_rank_that_helps_has_to_do_with_handles_only(colocated):
    colocated.assist(ENGINES)
    colocated.help("bucket")
    assert colocated.calls == [("handles", "assist", ENGINES[:2]), ("handles", "help", "bucket")]


@pytest.mark.parametrize("reach", ["connect", "assist"])
def test_nobody_helps_with_handles_that_no_engine_is_given(colocated, reach):
    """Others would wait for the source, which gives none."""
    getattr(colocated, reach)(ENGINES)
    getattr(colocated, reach)(ENGINES[2:])
    colocated.calls.clear()
    colocated.help("bucket")
    assert not colocated.calls


def test_buckets_fit_both_ways_where_engines_are_of_both_kinds():
    small = SimpleNamespace(**{**vars(ARGS), "update_weight_buffer_size": 2**30})
    alone = SimpleNamespace(**{**vars(small), "rollout_num_gpus": 2})
    by_group, by_handles = ProcessGroupTransport.bucket_bytes(small), SharedHandlesTransport.bucket_bytes(small)
    assert ColocatedTransport.bucket_bytes(small) == min(by_group, by_handles)
    assert ColocatedTransport.bucket_bytes(alone) == by_handles
