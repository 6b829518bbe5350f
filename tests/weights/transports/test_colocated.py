"""Which engines are fed in which way, and what becomes of a bucket that one of the ways loses."""

from types import SimpleNamespace

import pytest
import torch

from slime.arguments.sizes import GpuRanges
from slime.utils.errors import UserError
from slime.weights.push import WeightPush
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
from tests.support.processes.local_ray import start_ray
from tests.support.processes.served_engines import Trainer
from tests.support.processes.weight_peers import engine_of, start_peers

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


@pytest.fixture(scope="module")
def devices():
    """Three processes, each of which is a device of an engine."""
    import ray

    start_ray(num_cpus=4)
    yield start_peers(3)
    ray.shutdown()


@pytest.fixture(scope="module")
def engine_actors(devices):
    """Two processes that speak for an engine each, of whichever devices."""
    return [engine_of(devices[:1]) for _ in range(2)]


def told(engines):
    import ray

    return ray.get([engine.handle.all_told.remote() for engine in engines], timeout=60)


@pytest.mark.parametrize(("sizes", "ranks"), [((1, 2), 1), ((2, 1), 2), ((1, 2), 2)], ids=["1+2", "2+1", "1+2, half"])
@pytest.mark.parametrize("wrong", [None, 0, 1], ids=["all right", "by handles", "by the group"])
def test_s5_engines_inside_and_beside_get_one_version_whole_or_are_left_out(
    devices, engine_actors, sizes, ranks, wrong
):
    """The first engine has devices of ranks, the second one others, or one of each kind. `wrong`: one that says after the push
    that it has other weights."""
    import ray

    ray.get([device.start.remote(None) for device in devices], timeout=60)
    starts = [
        engine_actors[id].start.remote(of_engine, "0" if id == wrong else None)
        for id, of_engine in enumerate((devices[: sizes[0]], devices[sizes[0] :]))
    ]
    ray.get(starts, timeout=60)
    engines = [Receiver(id, engine_actors[id], sizes[id], id * sizes[0]) for id in range(2)]
    flags = {"world_size": ranks, "rollout_num_gpus": 3, "update_weight_buffer_size": 400, "update_weight_mode": "full",
             "update_weights_in_flight": False, "http_control_timeout": 60.0, "engine_load_timeout": 60.0,
             "custom_update_weight_post_write_path": None, "distributed_timeout_minutes": 5}  # fmt: skip
    args = SimpleNamespace(**{**vars(ARGS), **flags})
    tensors = {name: torch.full((100,), float(value)) for value, name in enumerate("abc")}
    trainer = Trainer(args, tensors, set(tensors))
    pushes = WeightPush(args, trainer)
    try:
        versions = []
        for _ in range(2 if wrong is None else 1):
            report = pushes.push(engines)
            versions.append((report.version, sorted(report.failed)))
    finally:
        for source in trainer.sources:
            source.close()
    assert versions == ([(1, []), (2, [])] if wrong is None else [(1, [wrong])])
    for id, (of_engine, way) in enumerate(zip(told(engines), ("handles", "broadcast"), strict=True)):
        expected = []
        for version, _ in versions:
            # No other way reaches it, and the connection stands for the second push.
            joined = [("join", 1, 1 + sizes[1])] if (way, version) == ("broadcast", 1) else []
            whole = [("begin",), *[(way, str(version))] * 3, ("end",), ("version?",)]
            expected += [*joined, ("pause", "abort"), ("flush",), *whole]
            expected += [] if id == wrong else [("continue",)]
        assert of_engine == expected
    received = ray.get([device.all_received.remote() for device in devices], timeout=60)
    assert received == [[(["a"], {0.0}), (["b"], {1.0}), (["c"], {2.0})] * len(versions)] * 3
