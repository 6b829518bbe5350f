"""The waits of a transfer, and who is to blame for one that breaks: peers in processes of their own play the engines."""

import re
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from slime.utils.errors import RunError
from slime.utils.process_groups import create_store
from slime.weights.push import WeightPush
from slime.weights.source import WeightSource
from slime.weights.transports import process_group
from slime.weights.transports.process_group import ProcessGroupTransport, communicator_environment
from slime.weights.transports.transport import Background, EnginesFailed, Receiver
from tests.support.processes.local_ray import start_ray
from tests.support.processes.served_engines import Trainer
from tests.support.processes.weight_peers import engine_of, start_peers


@pytest.mark.parametrize(
    ("flags", "typed", "given", "sharp", "cumem"),
    [
        ({}, {}, None, "2", "0"),
        ({}, {}, "0", "0", "0"),
        ({"sglang_enable_nccl_nvls": True}, {}, "0", "1", "0"),
        ({"sglang_enable_symm_mem": True}, {}, None, "1", "1"),
        ({}, {"NCCL_NVLS_ENABLE": 0, "NCCL_CUMEM_ENABLE": 1}, "1", "0", "1"),
    ],
    ids=["nothing is said", "in the environment", "for the engines", "symmetric memory", "for the ranks"],
)
def test_ranks_and_engines_agree_on_what_nccl_reads(monkeypatch, flags, typed, given, sharp, cumem):
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    if given is not None:
        monkeypatch.setenv("NCCL_NVLS_ENABLE", given)
    args = SimpleNamespace(has_trainer=True, has_engines=True, train_env_vars=typed, **flags)
    assert communicator_environment(args) == {"NCCL_NVLS_ENABLE": sharp, "NCCL_CUMEM_ENABLE": cumem}


@pytest.mark.parametrize("has_trainer", [True, False])
def test_who_is_alone_is_left_alone(has_trainer):
    args = SimpleNamespace(has_trainer=has_trainer, has_engines=not has_trainer, train_env_vars={})
    assert communicator_environment(args) == {}


ARGS = SimpleNamespace(distributed_timeout_minutes=1, update_weight_buffer_size=100, rollout_external_engine_infos=None)


class Collective(Background):
    """One that ends after `seconds` of the clock, if ever."""

    def __init__(self, now, seconds):
        self.now, self.end = now, now[0] + seconds

    def ended_within(self, timeout):
        self.now[0] = min(self.now[0] + timeout, max(self.end, self.now[0]))
        return self.now[0] >= self.end

    def raise_error(self):
        pass


@pytest.mark.parametrize("seconds, in_time", [(10.0, True), (59.0, True), (61.0, False), (float("inf"), False)])
def test_answers_and_collective_have_one_time_limit(monkeypatch, seconds, in_time):
    """Engines answer after 40 s of a minute: 20 s are left for the collective."""
    now = [1000.0]

    def answer(answers, name, timeout_s, **options):
        assert timeout_s == 60.0
        now[0] += 40.0

    monkeypatch.setattr("slime.observability.waiting.wait_for_all", answer)
    monkeypatch.setattr(process_group.time, "monotonic", lambda: now[0])
    transport = ProcessGroupTransport(ARGS, 0, 1)
    collective = Collective(now, seconds)
    if in_time:
        transport._finish({}, collective, "sending weights")
        assert now[0] == 1000.0 + max(40.0, seconds)
        return
    message = r"^sending weights: the collective did not end within 60 s \(--distributed-timeout-minutes\)$"
    with pytest.raises(RunError, match=message):
        transport._finish({}, collective, "sending weights")
    assert now[0] == 1060.0


def test_a_bucket_goes_to_the_group_that_it_was_sent_to(monkeypatch):
    """Not to all ranks of the trainer (no group), when this one is given up before its broadcast begins."""
    given_up, broadcast_to = threading.Event(), []
    accelerator = SimpleNamespace(set_device=lambda index: given_up.wait(10), shares_host_memory=True)
    monkeypatch.setattr(process_group, "get_accelerator", lambda: accelerator)

    def broadcast(buffer, src, group, async_op):
        broadcast_to.append(group)
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

    monkeypatch.setattr("torch.distributed.broadcast", broadcast)
    transport = ProcessGroupTransport(ARGS, 0, 1)
    transport._group = group = object()
    transport.send([("a", torch.ones(3))])
    transport._group = None
    given_up.set()
    assert transport._in_flight[1].ended_within(10)
    assert broadcast_to == [group]


def test_a_group_whose_peers_are_dead_does_not_hold_who_closes_it(monkeypatch):
    released = threading.Event()
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda group: released.wait(60))
    monkeypatch.setattr(process_group, "_AFTER_FAILURE_SECONDS", 0.1)
    transport = ProcessGroupTransport(ARGS, 0, 1)
    transport._group = object()
    try:
        assert Background(transport.close, "closing").ended_within(10)
    finally:
        released.set()


@pytest.mark.parametrize("backend, limit", [("gloo", 60.0), ("nccl", 180.0)])
def test_a_watchdog_acts_later_than_we_do(monkeypatch, backend, limit):
    """The making of the next bucket takes a minute at most, as does our wait for the one before; then it is aborted."""
    limits = []

    def init_process_group(backend, store, world_size, rank, name, timeout):
        limits.append((backend, timeout.total_seconds()))
        return "group"

    monkeypatch.setattr("slime.utils.process_groups.init_process_group", init_process_group)
    monkeypatch.setattr("torch.distributed.TCPStore", lambda *arguments, **options: SimpleNamespace(port=1))
    monkeypatch.setattr(
        process_group,
        "get_accelerator",
        lambda: SimpleNamespace(process_group_backend=backend, shares_host_memory=True),
    )
    transport = ProcessGroupTransport(ARGS, 0, 1)
    monkeypatch.setattr(transport, "_settle_answers", lambda answers, joining, name: joining.wait(60.0, "late"))
    transport.connect([])
    assert transport._group == "group" and limits == [(backend, limit)]


def test_a_tensor_that_is_larger_than_a_bucket_is_sent_without_a_copy(monkeypatch):
    """And has arrived when the next bucket is made; one of a bucket's size is on its way."""
    sent = []
    monkeypatch.setattr(process_group, "_broadcast", lambda tensors, group: sent.extend(tensors))
    transport = ProcessGroupTransport(ARGS, 0, 1)
    transport._group = object()
    large, small = torch.ones(13, 2), torch.ones(5, 5)
    for name, tensor, in_flight in (("large", large, False), ("small", small, True)):
        transport.send([(name, tensor)])
        assert (transport._in_flight is not None) == in_flight
    transport.finish()
    assert sent[0].data_ptr() == large.data_ptr() and sent[1].data_ptr() != small.data_ptr()
    assert sent[0].equal(large) and sent[1].equal(small)


class Work:
    """A broadcast that hangs until its communicator is aborted, which is what `abort` does to it."""

    def __init__(self):
        self.aborted = threading.Event()

    def is_completed(self):
        return self.aborted.is_set()

    def wait(self):
        self.aborted.wait()
        raise RuntimeError("the communicator was aborted")


def test_a_broadcast_that_hangs_is_aborted_and_ends(monkeypatch):
    work, left = Work(), []
    accelerator = SimpleNamespace(set_device=lambda index: None, shares_host_memory=True)
    monkeypatch.setattr(process_group, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr("torch.distributed.broadcast", lambda *arguments, **options: work)
    monkeypatch.setattr("torch.distributed.destroy_process_group", left.append)
    monkeypatch.setattr(process_group, "_AFTER_FAILURE_SECONDS", 0.2)
    transport = ProcessGroupTransport(ARGS, 0, 1)
    group = transport._group = SimpleNamespace(abort=work.aborted.set)
    transport.send([("a", torch.ones(3))])
    _, broadcast = transport._in_flight
    assert not broadcast.ended_within(0.0)
    transport._abandon_group(broadcast)
    assert broadcast.ended_within(10) and left == [group]
    with pytest.raises(RunError, match="weight broadcast failed: the communicator was aborted"):
        broadcast.raise_error()


def test_a_broadcast_that_ends_is_not_aborted(monkeypatch):
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda group: None)
    transport = ProcessGroupTransport(ARGS, 0, 1)
    # Without `abort`.
    transport._group = object()
    ended = Background(lambda: None, "weight broadcast")
    transport._abandon_group(ended)
    assert transport._group is None


@pytest.mark.parametrize("on_host, kept", [(True, [20, 16]), (False, [])])
def test_when_a_push_ends_two_small_buffers_of_the_host_stay(monkeypatch, on_host, kept):
    """An allocator would not find their room again; what it maps, and the memory of a GPU, is given up."""
    accelerator = SimpleNamespace(shares_host_memory=on_host)
    monkeypatch.setattr(process_group, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(process_group, "_broadcast", lambda buffer, group: None)
    monkeypatch.setattr(process_group, "_KEPT_HOST_BYTES", 20)
    transport = ProcessGroupTransport(ARGS, 0, 1)
    transport._group = object()

    def held():
        return sorted((len(buffer) for buffer in transport._flattener._buffers if buffer is not None), reverse=True)

    for sizes in ([6, 6], [5, 4]):
        for size in sizes:
            transport.send([("a", torch.ones(size))])
        assert held() == [4 * size for size in sizes]
        transport.finish()
        assert transport._in_flight is None and held() == ([] if sizes[0] == 6 else kept)
    transport._group = None
    transport.close()
    assert held() == []


@pytest.mark.parametrize(
    ("early", "late", "hanging", "gone", "mute", "failed"),
    [
        ([0], [0, 2], [], [], [], {0: "error of 0"}),
        ([], [0, 2], [], [], [], {0: "error of 0", 2: "error of 2"}),
        ([], [], [], [], [], {0: "broken", 1: "broken", 2: "broken"}),
        ([], [2], [1], [], [], {1: "broken"}),
        ([0], [0, 2], [1], [], [], {1: "no answer after another engine had failed: broken"}),
        ([0], [0, 1, 2], [], [1], [], {1: "error of 1"}),
        ([0], [0], [2], [1], [], {2: "no answer after another engine had failed: broken", 1: "no probe of 1"}),
        ([], [], [1], [], [1, 2], {1: "broken", 2: "broken"}),
    ],
    ids=[
        "one failed first", "all failed when it was given up", "nobody failed", "one hangs", "one failed and another hangs",
        "one failed and another died", "one failed, one hangs, one died", "servers are mute",
    ],
)  # fmt: skip
def test_who_is_gone_or_hangs_is_to_blame_and_else_who_failed_first(
    monkeypatch, early, late, hanging, gone, mute, failed
):
    def errors_of(answers, seconds):
        if set(answers.values()) == {"probe"}:
            return {id: f"no probe of {id}" for id in gone}
        return {id: f"error of {id}" for id in (late if seconds else early)}

    monkeypatch.setattr(process_group, "_errors_of", errors_of)
    monkeypatch.setattr(process_group, "_unanswered", lambda of: mute if "probe" in of.values() else hanging)
    transport = ProcessGroupTransport(ARGS, 0, 1)
    monkeypatch.setattr(transport, "_abandon_group", lambda collective: None)
    handle = SimpleNamespace(get_weight_version=SimpleNamespace(remote=lambda: "probe"))
    transport._engines = [Receiver(id, handle, 1, id) for id in range(3)]
    error = transport._blame(dict.fromkeys(range(3), "answer"), None, "broken")
    assert error.failed == failed and error.certain == bool(hanging or gone or mute)


VISIT = """
import socket, sys

sys.stdin.readline()
visits = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(2)]
sys.stdin.readline()
"""


def test_the_store_stays_until_engines_on_their_way_have_found_it(monkeypatch):
    """One with two GPUs, and later another; our own connections do not count."""
    monkeypatch.setattr(process_group, "_JOINING_SECONDS", 600.0)
    unanswered = [0]
    monkeypatch.setattr(process_group, "_unanswered", lambda answers: unanswered)
    transport = ProcessGroupTransport(ARGS, 0, 1)
    transport._engines = [Receiver(0, None, 2, 0), Receiver(1, None, 4, 2)]
    transport._store = create_store("127.0.0.1", timedelta(seconds=60))
    port = transport._store.port
    own = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    visitor = subprocess.Popen([sys.executable, "-c", VISIT, str(port)], stdin=subprocess.PIPE, text=True)
    try:
        waiting = Background(lambda: transport._wait_for_who_joins({}), "waiting")
        assert not waiting.ended_within(0.3)
        visitor.stdin.write("\n")
        visitor.stdin.flush()
        assert waiting.ended_within(60)
        waiting.raise_error()
        unanswered += [1]
        waiting = Background(lambda: transport._wait_for_who_joins({}), "waiting")
        assert not waiting.ended_within(0.3)
        unanswered.clear()
        assert waiting.ended_within(60), "who has answered does not come"
        waiting.raise_error()
    finally:
        for connection in own:
            connection.close()
        visitor.kill()
        visitor.wait(60)


def test_engines_that_do_not_come_are_waited_for_no_longer_than_a_moment(monkeypatch):
    monkeypatch.setattr(process_group, "_JOINING_SECONDS", 0.2)
    monkeypatch.setattr(process_group, "_unanswered", lambda answers: [0])
    transport = ProcessGroupTransport(ARGS, 0, 1)
    transport._engines, transport._store = [Receiver(0, None, 2, 0)], create_store("127.0.0.1", timedelta(seconds=60))
    assert Background(lambda: transport._wait_for_who_joins({}), "waiting").ended_within(60)


@pytest.fixture(scope="module")
def receivers():
    import ray

    start_ray(num_cpus=4)
    yield [Receiver(id, peer, 1, id) for id, peer in enumerate(start_peers(3))]
    ray.shutdown()


BUCKETS = [
    [(name, torch.full((500, 100), value)) for name in names] for names, value in (("a", 1.0), ("bc", 2.0), ("d", 3.0))
]
RECEIVED = [(["a"], {1.0}), (["b", "c"], {2.0}), (["d"], {3.0})]


def transfer(transport, receivers):
    """Send `BUCKETS` to the receivers that remain, until nobody breaks it; who broke it, for certain or not, by round."""
    rounds = []
    while receivers:
        try:
            transport.connect(receivers)
            transport.begin(1)
            for bucket in BUCKETS:
                transport.send(bucket)
            transport.finish()
        except EnginesFailed as error:
            rounds.append((error.failed, error.certain))
            receivers = [receiver for receiver in receivers if receiver.id not in error.failed]
        else:
            return rounds
    return rounds


def received_by(receivers):
    import ray

    return ray.get([receiver.handle.all_received.remote() for receiver in receivers], timeout=60)


def test_a_connection_that_stands_is_kept_and_another_set_of_engines_joins_a_new_one(receivers):
    transport = ProcessGroupTransport(SimpleNamespace(**{**vars(ARGS), "distributed_timeout_minutes": 5}), 0, 1)
    try:
        assert transfer(transport, receivers[:2]) == []
        group = transport._group
        assert transfer(transport, receivers[:2]) == [] and transport._group is group
        assert transfer(transport, receivers) == [] and transport._group is not group
        assert received_by(receivers) == [3 * RECEIVED, 3 * RECEIVED, RECEIVED]
    finally:
        transport.close()


def test_a_bucket_is_made_while_the_one_before_it_is_on_its_way(receivers, tmp_path):
    """No engine takes the order for a bucket, nor joins its broadcast, before the next one is being made."""
    import ray

    def made():
        for number, bucket in enumerate([*BUCKETS, None]):
            (tmp_path / str(number)).touch()
            yield bucket

    ray.get([of.handle.start.remote(tmp_path) for of in receivers], timeout=60)
    # Beside a tensor that is larger than a bucket none is made.
    args = SimpleNamespace(**{**vars(ARGS), "update_weight_buffer_size": 2**20})
    source = WeightSource(made, ProcessGroupTransport(args, 0, 1))
    try:
        assert source.connect(receivers).failed == {}
        assert source.send(1).failed == {}
    finally:
        source.close()
    assert received_by(receivers) == [RECEIVED] * 3


@pytest.fixture(scope="module")
def two_engines(receivers):
    return [engine_of([]) for _ in range(2)]


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_engines_of_several_sizes_are_one_world(receivers, two_engines, sizes):
    """Each has the ranks behind those of the engines before it, one for each of its devices."""
    import ray

    ray.get([of.handle.start.remote(None) for of in receivers], timeout=60)
    ranks, engines = [of.handle for of in receivers], []
    for id, (size, engine) in enumerate(zip(sizes, two_engines, strict=True)):
        first = sum(sizes[:id])
        ray.get(engine.start.remote(ranks[first : first + size]), timeout=60)
        # Their devices may lie anywhere: a placeholder is before the second one.
        engines.append(Receiver(id, engine, size, first + id))
    transport = ProcessGroupTransport(SimpleNamespace(**{**vars(ARGS), "distributed_timeout_minutes": 5}), 0, 1)
    try:
        assert transfer(transport, engines) == []
    finally:
        transport.close()
    assert received_by(receivers) == [RECEIVED] * 3
    told = ray.get([of.handle.all_told.remote() for of in engines], timeout=60)
    broadcasts = [("broadcast", "1")] * len(BUCKETS)
    assert told == [[("join", 1, 4), *broadcasts], [("join", 1 + sizes[0], 4), *broadcasts]]


@pytest.mark.parametrize(("sizes", "ranks"), [((1, 2), 1), ((2, 1), 2), ((1, 2), 2)], ids=["1+2", "2+1", "1+2, half"])
@pytest.mark.parametrize("wrong", [None, 0, 1], ids=["all right", "by handles", "by the group"])
def test_s5_engines_inside_and_beside_get_one_version_whole_or_are_left_out(
    receivers, two_engines, sizes, ranks, wrong
):
    """By both ways. The first engine has devices of ranks, the second one others, or one of each kind. `wrong`: one that says
    after the push that it has other weights."""
    import ray

    devices = [of.handle for of in receivers]
    ray.get([device.start.remote(None) for device in devices], timeout=60)
    starts = [
        two_engines[id].start.remote(of_engine, "0" if id == wrong else None)
        for id, of_engine in enumerate((devices[: sizes[0]], devices[sizes[0] :]))
    ]
    ray.get(starts, timeout=60)
    engines = [Receiver(id, two_engines[id], sizes[id], id * sizes[0]) for id in range(2)]
    args = SimpleNamespace(
        update_weight_transport="nccl", colocate=True, has_trainer=True, has_engines=True, rollout_external=False,
        rollout_external_engine_infos=None, world_size=ranks, rollout_num_gpus=3, actor_num_nodes=1, num_gpus_per_node=4,
        update_weight_buffer_size=400, update_weight_mode="full", update_weights_in_flight=False, http_control_timeout=60.0,
        engine_load_timeout=60.0, custom_update_weight_post_write_path=None, distributed_timeout_minutes=5,
    )  # fmt: skip
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
    told = ray.get([engine.handle.all_told.remote() for engine in engines], timeout=60)
    for id, (of_engine, way) in enumerate(zip(told, ("handles", "broadcast"), strict=True)):
        expected = []
        for version, _ in versions:
            # No other way reaches it, and the connection stands for the second push.
            joined = [("join", 1, 1 + sizes[1])] if (way, version) == ("broadcast", 1) else []
            whole = [("begin",), *[(way, str(version))] * 3, ("end",), ("version?",)]
            expected += [*joined, ("pause", "abort"), ("flush",), *whole]
            expected += [] if id == wrong else [("continue",)]
        assert of_engine == expected
    assert received_by(receivers) == [[(["a"], {0.0}), (["b"], {1.0}), (["c"], {2.0})] * len(versions)] * 3


def test_large_tensors_of_the_host_travel_as_they_are_and_small_ones_in_one_piece(receivers):
    args = SimpleNamespace(**{**vars(ARGS), "update_weight_buffer_size": 2**24, "distributed_timeout_minutes": 5})
    transport = ProcessGroupTransport(args, 0, 1)
    count = len(received_by(receivers[:1])[0])
    try:
        transport.connect(receivers[:2])
        transport.begin(1)
        for size in (2**18, 2**18 - 1):
            transport.send([(name, torch.full((size,), float(value))) for value, name in enumerate("xyz")])
        transport.finish()
        assert [len(buffer) for buffer in transport._flattener._buffers if buffer is not None] == [12 * (2**18 - 1)]
    finally:
        transport.close()
    expected = [(list("xyz"), {0.0, 1.0, 2.0}, load_format) for load_format in (None, "flattened_bucket")]
    assert [of_engine[count:] for of_engine in received_by(receivers[:2])] == [expected, expected]


@pytest.mark.parametrize(
    "dtype, size, is_flat",
    [
        (torch.float32, 2**18, False), (torch.float32, 2**18 - 1, True), (torch.bfloat16, 2**19, False),
        (torch.float8_e4m3fn, 2**20, True),
    ],
)  # fmt: skip
def test_what_goes_in_one_piece(dtype, size, is_flat):
    """Gloo has no eight-bit floats."""
    assert (
        process_group._goes_flat([("a", torch.empty(size, dtype=dtype)), ("b", torch.empty(size, dtype=dtype))])
        == is_flat
    )


@pytest.mark.parametrize("dtype, load_format", [(torch.bfloat16, None), (torch.float8_e4m3fn, "flattened_bucket")])
def test_a_single_tensor_goes_as_bytes_where_gloo_lacks_its_dtype(dtype, load_format):
    tensor = torch.ones(3, 4).to(dtype)
    (names, dtypes, shapes, announced_format), [sent] = ProcessGroupTransport(ARGS, 0, 1)._flat([("a", tensor)])
    assert (names, dtypes, shapes, announced_format) == (["a"], [str(dtype)[6:]], [[3, 4]], load_format)
    assert str(sent.dtype)[6:] in process_group._GLOO_DTYPES and sent.view(dtype).view(3, 4).equal(tensor)


def test_the_host_has_small_buckets():
    for flag, size in ((2**29, 2**27), (2**20, 2**20)):
        assert ProcessGroupTransport.bucket_bytes(SimpleNamespace(update_weight_buffer_size=flag)) == size


@pytest.mark.parametrize(
    "troubles, seconds, reason",
    [
        ({1: "does not join"}, 300, "the engine does not join"),
        ({1: "refuses"}, 300, "no memory for this bucket"),
        pytest.param({1: "hangs"}, 8, "8 s|8000ms", marks=pytest.mark.slow),
        # The second engine may have failed because of the first: it gets all of it again.
        (
            {1: "hangs", 2: "refuses once"},
            300,
            "no answer after another engine had failed: .*no memory for this bucket",
        ),
        ({1: "dies"}, 300, "died"),
    ],
    ids=lambda value: " and ".join(value.values()) if isinstance(value, dict) else None,
)
def test_who_broke_a_transfer_is_known_and_the_others_get_all_of_it(monkeypatch, receivers, troubles, seconds, reason):
    import ray

    # For this long one that hangs is waited for; the others have answered before.
    monkeypatch.setattr(process_group, "_AFTER_FAILURE_SECONDS", 5.0)
    starts = [of.handle.start.remote(troubles.get(of.id)) for of in receivers]
    ray.get(starts, timeout=60)
    args = SimpleNamespace(**{**vars(ARGS), "distributed_timeout_minutes": seconds / 60})
    transport = ProcessGroupTransport(args, 0, 1)
    try:
        ((failed, certain),) = transfer(transport, receivers)
    finally:
        transport.close()
    assert list(failed) == [1] and re.search(reason, failed[1])
    assert certain == (troubles[1] in ("hangs", "dies"))
    for of_engine in received_by([receivers[0], receivers[2]]):
        assert of_engine[-len(RECEIVED) :] == RECEIVED
