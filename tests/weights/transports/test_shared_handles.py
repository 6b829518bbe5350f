"""When memory is written again, who is to blame for a bucket that was not taken, and whose memory an engine is given.

Engines are processes that open handles as SGLang does. On a GPU nothing of this has run.
"""

import concurrent.futures
import multiprocessing
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slime.utils.device import Accelerator
from slime.utils.errors import RunError
from slime.weights.source import WeightSource
from slime.weights.transports import ColocatedTransport, Receiver, transport_of
from slime.weights.transports.shared_handles import SharedHandlesTransport
from tests.support.processes.distributed import run_distributed
from tests.support.processes.opened_buckets import open_bucket

ARGS = SimpleNamespace(
    update_weight_transport="nccl", colocate=True, distributed_timeout_minutes=1, update_weight_buffer_size=2**20,
    has_trainer=True, has_engines=True, rollout_external=False, rollout_external_engine_infos=None, world_size=4,
    rollout_num_gpus=4, actor_num_nodes=1, num_gpus_per_node=4,
)  # fmt: skip


def with_flags(**flags):
    return SimpleNamespace(**{**vars(ARGS), **flags})


def open_handle(handle, owners=None):
    """Name → what stands in the tensor, as SGLang's engine finds it. `owners` gets the process whose memory it is."""
    owner, tensors = open_bucket(handle)
    if owners is not None:
        owners.append(owner)
    return {name: set(tensor.flatten().tolist()) for name, tensor in tensors.items()}


class Engine:
    """A server in a thread: takes one order after the other. `trouble`: what it does instead with the second bucket."""

    def __init__(self, open_one=open_handle, trouble=None):
        self._server = concurrent.futures.ThreadPoolExecutor(1)
        self._open, self.trouble, self.received = open_one, trouble, []
        self.go_on = threading.Event()
        self.go_on.set()
        self.update_weights_from_tensor = SimpleNamespace(remote=self._order)

    def _order(self, handles, load_format, timeout, version):
        assert load_format == "flattened_bucket" and timeout == 60.0
        return self._server.submit(self._take, handles)

    def _take(self, handles):
        self.go_on.wait(60)
        if self.received and self.trouble == "refuses":
            raise RunError("the shape is another")
        if self.received and self.trouble == "hangs":
            raise TimeoutError
        self.received.append([self._open(handle) for handle in handles])


def wait_for_each(answers, name, timeout, **options):
    """The driver's wait, on answers of threads. One that hangs does so until the limit."""
    outcomes = []
    for answer in answers:
        try:
            outcomes.append(answer.result(60))
        except RunError as error:
            outcomes.append(error)
        except TimeoutError:
            outcomes.append(RunError(f"no answer within {timeout:g} s"))
    return outcomes


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    monkeypatch.setattr("slime.observability.waiting.wait_for_each", wait_for_each)


@pytest.fixture(scope="module")
def process():
    """Opens handles in a process of its own: here they would be found to be ours."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        yield lambda handle: pool.submit(open_handle, handle).result(60)


def buckets_of(values):
    return [[(f"a{value}", torch.full((100,), value)), (f"b{value}", torch.full((3,), -value))] for value in values]


def receivers_of(*engines, num_gpus=1):
    return [Receiver(id, engine, num_gpus, id * num_gpus) for id, engine in enumerate(engines)]


def seen(values):
    return [{f"a{value}": {value}, f"b{value}": {-value}} for value in values]


def test_every_engine_gets_a_handle_for_each_of_its_ranks(process):
    engines = [Engine(process), Engine(process)]
    transport = SharedHandlesTransport(ARGS, 0, 2)
    transport.connect(receivers_of(*engines, num_gpus=2))
    for push in range(2):
        transport.begin(push + 1)
        for bucket in buckets_of([1.0, 2.0, 3.0, 4.0, 5.0]):
            transport.send(bucket)
        transport.finish()
        transport.settle()
    expected = [[one, one] for one in 2 * seen([1.0, 2.0, 3.0, 4.0, 5.0])]
    assert [engine.received for engine in engines] == [expected, expected]
    transport.close()


def test_memory_is_written_again_only_when_all_engines_have_answered(process):
    slow, quick = Engine(process), Engine(process)
    slow.go_on.clear()
    transport = SharedHandlesTransport(ARGS, 0, 1)
    transport.connect(receivers_of(slow, quick))
    first, second, third = buckets_of([1.0, 2.0, 3.0])
    transport.send(first)
    transport.send(second)
    sending = threading.Thread(target=transport.send, args=(third,), daemon=True)
    sending.start()
    # It waits for the slow one: the quick one has both buckets, and no order for the third.
    quick.update_weights_from_tensor.remote([], "flattened_bucket", 60.0, None).result(60)
    sending.join(0.2)
    assert sending.is_alive() and quick.received == [[one] for one in seen([1.0, 2.0])] + [[]]
    slow.go_on.set()
    sending.join(60)
    transport.finish()
    assert slow.received == [[one] for one in seen([1.0, 2.0, 3.0])]
    transport.close()


@pytest.mark.parametrize("trouble, reason", [("refuses", "the shape is another"), ("hangs", "no answer within 90 s")])
def test_who_did_not_take_a_bucket_did_it_alone_and_the_others_get_all_of_it(process, trouble, reason):
    engines = [Engine(process), Engine(process, trouble)]
    transport = SharedHandlesTransport(ARGS, 0, 1)
    receivers, values = receivers_of(*engines), [1.0, 2.0, 3.0, 4.0]
    walk = WeightSource(lambda: iter(buckets_of(values)), transport)
    assert walk.connect(receivers).failed == {}
    sent = walk.send(1)
    assert sent.failed == {1: reason} and sent.certain
    assert walk.connect(receivers[:1]).failed == {}
    sent = walk.send(1)
    assert (sent.failed, sent.num_buckets) == ({}, 4)
    assert engines[0].received[-4:] == [[one] for one in seen(values)]
    walk.close()


def test_a_refused_name_leaves_no_bucket_on_its_way(process):
    engine = Engine(process)
    transport = SharedHandlesTransport(ARGS, 0, 1)
    buckets = [*buckets_of([1.0]), [("unknown", torch.ones(3))]]
    walk = WeightSource(lambda: iter(buckets), transport, {"a1.0", "b1.0"})
    walk.connect(receivers_of(engine))
    assert "unknown" in walk.send(1).refusal
    assert engine.received == [[one] for one in seen([1.0])] and not transport._in_flight
    walk.close()


def test_the_host_has_small_buckets_and_keeps_their_memory_and_no_larger_one():
    assert SharedHandlesTransport.bucket_bytes(with_flags(update_weight_buffer_size=2**29)) == 2**26
    assert SharedHandlesTransport.bucket_bytes(ARGS) == 2**20
    engine = Engine(lambda handle: handle)
    transport = SharedHandlesTransport(ARGS, 0, 1)
    transport.connect(receivers_of(engine))
    for size in (2**18, 2**19, 2**18, 2**17):
        transport.send([("a", torch.ones(size))])
    transport.finish()
    transport.settle()
    kept = [buffer.numel() for buffer in transport._flattener._buffers if buffer is not None]
    assert kept == [2**20], "the other one was of 2 MiB"
    transport.close()


def test_engines_that_stay_are_given_the_memory_that_they_have_mapped():
    """New memory would be taken beside that, of which containers have little."""

    def files():
        return {path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")}

    of_others = files()
    engines, names = [Engine(lambda handle: handle) for _ in range(3)], []
    receivers = receivers_of(*engines)
    transport = SharedHandlesTransport(ARGS, 0, 1)
    # One leaves, and another one comes in its place.
    for connected in (receivers[:2], receivers[:1], [receivers[0], receivers[2]]):
        transport.connect(connected)
        for bucket in buckets_of([1.0, 2.0, 3.0]):
            transport.send(bucket)
        transport.finish()
        transport.settle()
        names.append(files() - of_others)
    assert len(names[0]) == 2 and names == 3 * names[:1]
    transport.send([("a", torch.ones(2**19))])
    transport.connect(receivers[:1])
    kept = [buffer.numel() for buffer in transport._flattener._buffers if buffer is not None]
    assert len(kept) == 1 and kept[0] < 2**20, "the other one is larger than a bucket"
    transport.connect([])
    # Those of others may go at any time.
    assert files() <= of_others
    transport.close()


class FakeGpu(Accelerator):
    """Says of the host what holds of a GPU."""

    shares_host_memory = False


def push_of_two_ranks(memory_of_rank_1=True, trouble=None, num_buckets=3):
    """Two ranks on devices that an engine has, too. What came of a push on this rank, and how many handles it made."""
    import torch.distributed as dist

    from slime.observability import waiting
    from slime.utils.device import register_accelerator
    from slime.utils.process_groups import init_gloo_group
    from slime.weights.transports import shared_handles

    os.environ["SLIME_ACCELERATOR"] = "fake-gpu"
    register_accelerator("fake-gpu", FakeGpu)
    waiting.wait_for_each = wait_for_each
    dist.init_process_group("gloo")
    init_gloo_group()
    rank = dist.get_rank()
    if rank == 1 and not memory_of_rank_1:

        def allocate(self, size, device):
            raise RunError("no memory on rank 1")

        shared_handles.SharedMemory.allocate = allocate
    opened, made, handle_of = [], [], shared_handles.handle_of
    shared_handles.handle_of = lambda bucket: made.append(bucket.names) or handle_of(bucket)
    engine = Engine(lambda handle: open_handle(handle, opened), trouble)
    args = with_flags(world_size=2, rollout_num_gpus=2)
    assert transport_of(args) is ColocatedTransport and ColocatedTransport.takes_every_rank(args)
    transport = ColocatedTransport(args, 0, 1)
    values = [float(number) for number in range(1, num_buckets + 1)]
    walk = WeightSource(lambda: iter(buckets_of(values)), transport, None, sends=rank == 0)
    # Ray would hand over the same receivers.
    walk.connect(receivers_of(engine, num_gpus=2))
    try:
        sent = walk.send(1)
    except RunError as error:
        sent = str(error)
    # The driver tells all ranks when the push is over.
    dist.barrier()
    walk.settle()
    held = [buffer is not None for buffer in transport._handles._flattener._buffers]
    walk.close()
    dist.destroy_process_group()
    return os.getpid(), sent, engine.received, opened, held, made


def test_where_memory_is_of_a_device_each_engine_rank_has_it_of_the_rank_there():
    source, helper = run_distributed(push_of_two_ranks, 2)
    assert source[2] == [[one, one] for one in seen([1.0, 2.0, 3.0])]
    assert source[3] == 3 * [source[0], helper[0]]
    assert helper[1] is None and helper[3] == []
    assert source[4] == helper[4] == [False, False], "training has the memory again"


def test_a_bucket_of_which_engines_do_not_hear_gets_no_handle():
    """A GPU's memory is kept for whoever may still open a handle of it."""
    ranks = run_distributed(push_of_two_ranks, 2, (True, "refuses", 4))
    assert ranks[0][1].failed == {0: "the shape is another"} and len(ranks[0][2]) == 1
    # The source hears of the second bucket before it sends the fourth.
    assert [len(of_rank[5]) for of_rank in ranks] == [3, 3]


def test_ranks_of_several_nodes_share_no_memory_of_the_host():
    assert not SharedHandlesTransport.takes_every_rank(ARGS)
    assert SharedHandlesTransport.takes_every_rank(with_flags(actor_num_nodes=2))
    # However many nodes the flag of training says: four ranks lie on two of two devices.
    assert SharedHandlesTransport.takes_every_rank(with_flags(num_gpus_per_node=2))


def test_a_rank_without_memory_stops_the_push_and_no_rank_hangs():
    source, helper = run_distributed(push_of_two_ranks, 2, (False,))
    assert source[1] == "no memory on rank 1" and source[2] == [] and helper[1] is None
