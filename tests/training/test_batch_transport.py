"""Shards that travel between real processes of a real Ray: their values, what stays of them, and a sender that dies."""

import contextlib
import os
import signal
import sys
import time
from importlib.metadata import version
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from slime.training import batch_transport
from slime.utils.errors import RunError, UserError
from slime.utils.misc import Box
from slime.utils.packed_sample import RaggedArray
from tests.support.processes.local_ray import start_ray
from tests.support.processes.waiting import wait_until

SECONDS = 60.0
BY_NIXL, BY_STORE = (
    SimpleNamespace(rollout_data_transport="nixl"),
    SimpleNamespace(rollout_data_transport="object-store"),
)


def a_shard(seed: int = 0, size: int = 1000) -> dict:
    """Every kind of column, and what a plug-in may bring: of each dtype, of no entry, of other layouts, none at all."""
    draw = np.random.default_rng(seed)
    image = draw.random((3, 5, 7)).astype(np.float32)
    return {
        "tokens": RaggedArray.from_rows([draw.integers(0, 2**40, n) for n in (1, size, 3)], np.int64),
        "rollout_log_probs": RaggedArray.from_rows([draw.random(n) for n in (2, 0, 5)], np.float32),
        "rollout_top_p_token_ids": RaggedArray.from_rows([], np.int32),
        "raw_reward": np.array([0.1, np.nan, -np.inf, -0.0]),
        "failed": np.array([True, False, True]),
        "multimodal_train_inputs": [{"pixel_values": image, "shape": (5, 7)}, None, {"pixel_values": image}],
        "metadata": [{"a": 1}, {}, {"text": "ü"}],
        "halves": draw.random(9).astype(np.float16),
        "columns": np.asfortranarray(draw.random((4, 6))),
        "every_other": np.arange(20)[::2],
        "names": np.array(["a", None, 3], dtype=object),
        "nothing": np.empty((0, 4), np.int32),
        "tensor": torch.arange(5, dtype=torch.bfloat16),
        "partition": [4, 0, 2],
    }


def described(value):
    """`value` with each array as what it consists of, to the bit."""
    if isinstance(value, RaggedArray):
        return ["ragged", described(value.values), described(value.offsets)]
    if isinstance(value, np.ndarray) and value.dtype != object:
        layout = value.flags.f_contiguous, value.flags.writeable
        return [str(value.dtype), value.shape, layout, value.tobytes(), value.ctypes.data % value.itemsize]
    if isinstance(value, np.ndarray | torch.Tensor):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {name: described(part) for name, part in value.items()}
    return [described(part) for part in value] if isinstance(value, list) else value


def listening() -> set[str]:
    return {
        f"{one.laddr.ip} {one.laddr.port}" for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"
    }


class Process:
    """What all of them are asked."""

    def pid(self):
        return os.getpid()

    def opened(self):
        """The addresses on which this process listens for others since it has its agent."""
        before = listening()
        batch_transport.open_transport(BY_NIXL)
        return sorted(one.split()[0] for one in listening() - before)

    def held(self):
        """How many pieces of memory are registered, known by Ray, kept by it, and words of readers that nobody took."""
        from ray._private.worker import global_worker

        transport, ray_side = batch_transport._nixl(), global_worker.rdt_manager
        words = transport.get_nixl_agent().get_new_notifs()
        kept = len(ray_side._managed_rdt_metadata), ray_side.rdt_store.get_num_objects()
        return len(transport._tensor_desc_cache), *kept, sum(map(len, words.values()))

    def registered(self):
        """How many pieces of memory are."""
        return len(batch_transport._nixl()._tensor_desc_cache)

    def awake(self, seconds):
        """Of these idle seconds those in which a thread ran or would have, if it had a core; of the busiest thread."""
        import threading

        def seconds_of_threads():
            times = {}
            for thread in os.listdir("/proc/self/task"):
                with open(f"/proc/self/task/{thread}/schedstat") as file:
                    times[thread] = sum(map(int, file.read().split()[:2])) / 1e9
            return times

        before = seconds_of_threads()
        threading.Event().wait(seconds)
        return max(after - before.get(thread, 0.0) for thread, after in seconds_of_threads().items())


class Sender(Process):
    """Has the concurrency groups that the rollout manager has, and like it sends in a thread."""

    async def send(self, args, shards):
        import asyncio

        return [await asyncio.to_thread(batch_transport.send_shard, args, shard) for shard in shards]

    async def send_made(self, count, size):
        return await self.send(BY_NIXL, [a_shard(seed, size) for seed in range(count)])


class Rank(Process):
    """Fetches shards."""

    def fetch(self, boxes, position=0):
        return described(batch_transport.fetch_shard(boxes[position], SECONDS))

    def fetch_while_the_sender(self, gets, boxes, pid, seconds=10.0):
        """The error, when the sender gets this signal as NIXL begins to read, and how long it took."""
        transport = batch_transport._nixl()
        begin = type(transport).fetch_multiple_tensors

        def has_heard():
            with contextlib.suppress(psutil.NoSuchProcess):
                return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD, psutil.STATUS_STOPPED)
            return True

        def signal_and_begin(*arguments):
            os.kill(pid, gets)
            wait_until(has_heard)
            return begin(transport, *arguments)

        transport.fetch_multiple_tensors = signal_and_begin
        started = time.monotonic()
        try:
            batch_transport.fetch_shard(boxes[0], seconds)
        except RunError as error:
            return str(error), time.monotonic() - started
        finally:
            del transport.fetch_multiple_tensors


@pytest.fixture(scope="module")
def ray():
    import ray

    start_ray(num_cpus=2)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def new_sender(ray):
    groups = {"_ray_system": 1}
    return lambda: ray.remote(num_cpus=0, concurrency_groups=groups)(Sender).remote()


@pytest.fixture(scope="module")
def sender(new_sender):
    return new_sender()


@pytest.fixture(scope="module")
def ranks(ray):
    """The node of the second one has a name in place of an address."""
    named = {"runtime_env": {"env_vars": {"SLIME_HOST_IP": "localhost"}}}
    return [ray.remote(num_cpus=0, **options)(Rank).remote() for options in ({}, named)]


@pytest.fixture(scope="module")
def asked(ray):
    return lambda references: ray.get(references, timeout=2 * SECONDS)


@pytest.fixture(scope="module")
def opened(sender, ranks, asked):
    """The addresses of the agents of the sender and of both ranks."""
    return asked([process.opened.remote() for process in (sender, *ranks)])


def test_an_agent_listens_to_this_machine_alone_and_sleeps_while_nothing_travels(sender, ranks, opened, asked):
    for addresses in opened[:2]:
        assert set(addresses) == {"127.0.0.1"}
    # What sleeps may be woken for other things, and wait for a core of a busy machine, but not all the time.
    wait_until(lambda: max(asked([process.awake.remote(1.0) for process in (sender, *ranks)])) < 0.5, SECONDS)


def test_ranks_get_the_same_bits_as_from_the_object_store(sender, ranks, asked):
    by_nixl = asked(sender.send.remote(BY_NIXL, [a_shard(1), a_shard(2)]))
    by_store = asked(sender.send.remote(BY_STORE, [a_shard(1), a_shard(2)]))
    assert asked(sender.held.remote())[0] == 2, "memory of two shards is registered, of those in the store none"
    for position in (0, 1):
        # All ranks of a model-parallel group read one shard, and those of a critic read it again.
        expected = asked(ranks[0].fetch.remote(by_store, position))
        for rank in (*ranks, *ranks):
            assert asked(rank.fetch.remote(by_nixl, position)) == expected
    assert expected["tokens"] == described(a_shard(2))["tokens"][:1] + [
        [*array[:2], (True, False), *array[3:]] for array in described(a_shard(2))["tokens"][1:]
    ]


def test_a_shard_without_any_bytes_of_arrays_travels_too(sender, ranks, asked):
    shard = {"metadata": [None], "rows": np.empty(0)}
    by_nixl, by_store = (asked(sender.send.remote(args, [shard])) for args in (BY_NIXL, BY_STORE))
    assert asked(ranks[0].fetch.remote(by_nixl)) == asked(ranks[0].fetch.remote(by_store))


def test_nothing_of_a_batch_that_is_consumed_stays_anywhere(sender, ranks, asked):
    for _ in range(4):
        boxes = asked(sender.send_made.remote(2, 100_000))
        asked([rank.fetch.remote(boxes, position) for position, rank in enumerate(ranks)])
        assert asked(sender.held.remote())[:3] == (2, 2, 2)
        del boxes
        wait_until(lambda: asked(sender.held.remote()) == (0, 0, 0, 0), SECONDS)
        assert asked([rank.held.remote() for rank in ranks]) == [(0, 0, 0, 0)] * 2


def test_words_of_readers_are_taken_when_memory_is_freed(sender, ranks, asked):
    boxes = asked(sender.send_made.remote(1, 10))
    asked([rank.fetch.remote(boxes) for rank in ranks])
    del boxes
    # Not asked for the words meanwhile, which takes them.
    wait_until(lambda: asked(sender.send.remote(BY_STORE, [])) == [] and not asked(sender.registered.remote()), SECONDS)
    assert asked(sender.held.remote()) == (0, 0, 0, 0)


def test_a_sender_that_dies_is_told_by_name_within_the_limit(new_sender, sender, ranks, asked):
    dying = new_sender()
    boxes, pid = asked(dying.send_made.remote(2, 1_000_000)), asked(dying.pid.remote())
    said = (
        "the train batch did not come from the rollout manager within 10 s (--http-control-timeout), or the manager has"
    )
    assert asked(ranks[1].fetch_while_the_sender.remote(signal.SIGKILL, boxes, pid))[0].startswith(said)
    with pytest.raises(RunError, match="manager has ended: (OwnerDiedError|RayDirectTransportError)"):
        asked(ranks[0].fetch.remote(boxes, 1))
    # The ranks are as they were: what others send reaches them.
    boxes = asked(sender.send_made.remote(1, 10))
    assert asked(ranks[1].fetch.remote(boxes)) == asked(ranks[0].fetch.remote(boxes))


def test_a_sender_that_hangs_is_not_waited_for_beyond_the_limit(new_sender, ranks, asked):
    """Nor does the rank wait for it when it gives the read up. Once it goes on, what it has is read."""
    hanging, rank = new_sender(), ranks[0]
    boxes, pid = asked(hanging.send_made.remote(2, 1_000_000)), asked(hanging.pid.remote())
    try:
        said, seconds = asked(rank.fetch_while_the_sender.remote(signal.SIGSTOP, boxes, pid, 3.0))
        assert "did not come from the rollout manager within 3 s (--http-control-timeout)" in said and seconds < 20
    finally:
        os.kill(pid, signal.SIGCONT)
    assert asked(rank.fetch.remote(boxes, 1))["tokens"] and asked(rank.fetch.remote(boxes, 0))["tokens"]


def test_an_agent_is_made_where_the_node_has_a_name_in_place_of_an_address(opened):
    assert set(opened[2]) == {"127.0.0.1"}


@pytest.mark.parametrize(
    "seconds, said",
    [
        (300.0, r"60 s \(Ray's limit of a read, RAY_rdt_fetch_fail_timeout_m\w+\)"),
        (5.0, r"5 s \(--http-control-t\w+\)"),
    ],
)
def test_the_limit_that_ended_a_read_is_named(monkeypatch, seconds, said):
    """Ray's own is shorter than the usual --http-control-timeout, which would be raised in vain."""
    import ray

    clock, limits = [0.0], []

    def get(reference, *, timeout):
        if reference == "shard":
            clock[0] += 2.0
            return batch_transport.SentShard(b"", (), "memory")
        limits.append(timeout)
        raise TimeoutError("no answer")

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(batch_transport, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(batch_transport, "_nixl", lambda: None)
    with pytest.raises(
        RunError, match=f"did not come from the rollout manager within {said}, or the manager has ended"
    ):
        batch_transport.fetch_shard(Box("shard"), seconds)
    assert limits == [seconds - 2.0], "both parts of it come within the limit"


@pytest.mark.parametrize("cause", ["missing", "unable"])
def test_a_process_without_nixl_says_so_before_anything_is_sent(monkeypatch, cause):
    if cause == "missing":
        monkeypatch.setitem(sys.modules, "nixl", None)
    else:
        monkeypatch.setattr(batch_transport, "_make_agent", lambda backend: 1 / 0)
    with pytest.raises(
        UserError,
        match=rf"^--rollout-data-transport nixl: .*pip install nixl=={version('nixl')}; else leave the flag out$",
    ):
        batch_transport.open_transport(BY_NIXL)
    batch_transport.open_transport(BY_STORE)
