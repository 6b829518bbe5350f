"""The order of a push and what becomes of engines that fail, without engines and trainer."""

import dataclasses
from types import SimpleNamespace

import pytest

from slime.utils.checkpoint_directory import WEIGHT_VERSION
from slime.utils.errors import RunError, UserError
from slime.weights import push
from slime.weights.push import Opening, WeightPush, read_weight_version, write_weight_version
from slime.weights.source import Connected, Sent
from slime.weights.transports import Delta, Receiver
from slime.weights.transports.transport import FLUSH_SECONDS
from slime.weights.verification import NamesDiffer

ARGS = SimpleNamespace(
    update_weight_transport="nccl", update_weight_mode="full", custom_update_weight_post_write_path=None, colocate=False,
    update_weights_in_flight=False, http_control_timeout=60.0, engine_load_timeout=60.0,
)  # fmt: skip
NAMES = [["a", "b"], ["c"]]


class Log(list):
    """Everything that happened, with what is to go wrong: (method, engine id) → error, once."""

    def __init__(self, problems=()):
        super().__init__()
        self.problems = dict(problems)


class Handle:
    """An engine that carries out orders."""

    def __init__(self, id, log):
        self.id, self.log, self.has_failed = id, log, False

    @property
    def carry_out(self):
        return SimpleNamespace(remote=self._carry_out)

    def _carry_out(self, orders):
        for method, *arguments in orders:
            self.log.append((method, self.id, *arguments))
            if (error := self.log.problems.pop((method, self.id), None)) is not None:
                self.has_failed = isinstance(error, RunError)
                return error
        return None


class Trainer:
    """Two sources, each of which sends its names in one bucket of ten bytes; what it sends to an engine that has failed already
    arrives nowhere."""

    def __init__(self, log, names=NAMES, expected=("a", "b", "c"), version=0, refusal=None, certain=True):
        self.log, self.names, self.expected, self.version = log, names, expected, version
        self.refusal, self.certain = refusal, certain
        self.connected = {}

    def open_weight_push(self):
        expected = None if self.expected is None else set(self.expected)
        return Opening(len(self.names), self.version, expected)

    def connect_engines(self, source, engines):
        self.log.append(("connect", source, [engine.id for engine in engines]))
        self.connected[source] = list(engines)
        return Connected(self.log.problems.pop(("connect", source), {}), self.certain)

    def send_weights(self, source, version, whole):
        self.log.append(("send", source, version))
        if self.refusal is not None and source == self.refusal:
            return Sent([], 0, 0, {}, False, "an unknown name")
        if any(engine.handle.has_failed for engine in self.connected[source]):
            return Sent([], 0, 0, {engine.id: "it is broken" for engine in self.connected[source]}, False, None)
        return Sent(self.names[source], 10, 1, self.log.problems.pop(("send", source), {}), self.certain, None)

    def weights_pushed(self, version):
        self.log.append(("pushed", version))

    def weights_settled(self):
        self.log.append(("settled",))

    def require_files(self):
        self.log.append(("files",))


@pytest.fixture
def limits(monkeypatch):
    limits = []

    def wait(answers, name, limit, pending):
        limits.append(limit)
        assert answers == [] or pending(range(len(answers))).startswith("engine "), "whoever waits can say for whom"
        return answers

    monkeypatch.setattr("slime.observability.waiting.wait_for_each", wait)
    return limits


def engines_of(log, count=2):
    return [Receiver(id, Handle(id, log), 1, id) for id in range(count)]


def test_a_push_that_waits_names_the_engines_that_it_waits_for(monkeypatch):
    told = []

    def wait(answers, name, limit, *, pending):
        told.append(pending([position for position, _ in enumerate(answers) if position != 1]))
        return answers

    monkeypatch.setattr("slime.observability.waiting.wait_for_each", wait)
    log = Log()
    WeightPush(ARGS, Trainer(log)).push([Receiver(id, Handle(id, log), 1, id) for id in (2, 5, 7)])
    assert set(told) == {"engine 2, 7"}


@pytest.mark.usefixtures("limits")
def test_the_first_push_is_told_of_which_no_rollout_has_the_metrics(caplog):
    caplog.set_level("INFO")
    log = Log()
    pushes = WeightPush(ARGS, Trainer(log))
    for _ in range(2):
        pushes.push(engines_of(log, 1))
    (line,) = caplog.messages
    assert line.startswith("weights version 1: 0.0 MB in 2 parts, ")


@pytest.mark.usefixtures("limits")
def test_without_engines_nothing_is_sent_and_no_version_is_given(caplog):
    caplog.set_level("INFO")
    log = Log()
    report = WeightPush(ARGS, Trainer(log)).push([])
    assert (report.version, report.failed) == (0, {}) and log == [] and caplog.messages == []


@pytest.mark.usefixtures("limits")
def test_one_order_for_every_push():
    log = Log()
    pushes = WeightPush(ARGS, Trainer(log))
    report = pushes.push(engines_of(log, 1))
    assert log == [
        ("connect", 0, [0]),
        ("connect", 1, [0]),
        ("pause_generation", 0, "abort"),
        ("flush_cache", 0),
        ("begin_weight_update", 0),
        ("send", 0, 1),
        ("send", 1, 1),
        ("end_weight_update", 0),
        ("prove_weight_version", 0, "1"),
        ("continue_generation", 0),
        ("pushed", 1),
    ]
    assert (report.version, report.failed) == (1, {})
    assert (report.metrics["perf/update_weights_bytes"], report.metrics["perf/update_weights_parts"]) == (20.0, 2.0)


@pytest.mark.usefixtures("limits")
def test_sources_connect_when_engines_are_others_than_before_or_it_is_not_known_to_whom_they_are_connected():
    log = Log()
    trainer = Trainer(log)
    pushes, engines = WeightPush(ARGS, trainer), engines_of(log, 3)

    def connected_in(engines):
        log.clear()
        pushes.push(engines)
        return [entry[1:] for entry in log if entry[0] == "connect"]

    assert connected_in(engines) == [(0, [0, 1, 2]), (1, [0, 1, 2])]
    assert connected_in(engines) == []
    log.problems["end_weight_update", 2] = RunError("engine 2 died")
    assert connected_in(engines) == [], "it dies when the sources have done with it"
    assert connected_in(engines[:2]) == [(0, [0, 1]), (1, [0, 1])]
    restarted = [engines[0], Receiver(1, Handle(1, log), 1, 1)]
    assert connected_in(restarted) == [(0, [0, 1]), (1, [0, 1])]
    connect, trainer.connect_engines = trainer.connect_engines, lambda source, engines: 1 / 0
    with pytest.raises(ZeroDivisionError):
        connected_in(engines)
    trainer.connect_engines = connect
    assert connected_in(restarted) == [(0, [0, 1]), (1, [0, 1])]


@pytest.mark.usefixtures("limits")
def test_in_flight_running_requests_are_retracted_and_none_is_aborted():
    log = Log()
    args = SimpleNamespace(**{**vars(ARGS), "update_weights_in_flight": True})
    WeightPush(args, Trainer(log)).push(engines_of(log, 1))
    # Their caches are of the old weights.
    assert log[2:4] == [("pause_generation", 0, "retract"), ("flush_cache", 0)] and log[-2] == (
        "continue_generation",
        0,
    )


@pytest.mark.usefixtures("limits")
def test_who_missed_a_push_gets_it_under_its_version_and_the_trainer_pushes_nothing_new():
    log = Log()
    pushes = WeightPush(ARGS, Trainer(log, version=6))
    pushes.push(engines_of(log))
    log.clear()
    late = Receiver(1, Handle(1, log), 1, 1)
    assert pushes.repeat([late]).version == pushes.version == 7
    assert ("send", 0, 7) in log and ("send", 1, 7) in log and ("prove_weight_version", 1, "7") in log
    assert ("settled",) in log and ("pushed", 7) not in log
    assert [entry for entry in log if entry[0] == "pause_generation"] == [("pause_generation", 1, "abort")]


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("local", [None, "/local"])
def test_where_the_trainer_has_ended_who_missed_a_push_gets_the_files_that_are_there(local):
    log = Log([(("fetch_weights", 2), "disk full")])
    args = SimpleNamespace(
        **{**vars(ARGS), "update_weight_transport": "disk", "update_weight_disk_dir": "/d"},
        update_weight_local_checkpoint_dir=local,
    )
    pushes = WeightPush(args, Trainer(log, version=6))
    pushes.push(engines_of(log))
    log.clear()
    late = [Receiver(id, Handle(id, log), 1, id) for id in (1, 2)]
    report = pushes.repeat_from_files(late)
    assert report.version == pushes.version == 7
    assert log.pop(0) == ("files",), "nobody is asked for anything before it is known whose they are"
    assert report.failed == ({} if local is None else {2: "disk full"})
    assert [entry for entry in log if entry[1] == 1] == [
        *([] if local is None else [("fetch_weights", 1, "/d/weight_v000007")]),
        ("pause_generation", 1, "abort"),
        ("flush_cache", 1),
        ("update_weights_from_disk", 1, local or "/d/weight_v000007", "7"),
        ("prove_weight_version", 1, "7"),
        ("continue_generation", 1),
    ]
    assert not [entry for entry in log if entry[0] in ("connect", "send", "settled", "pushed")]


@pytest.mark.usefixtures("limits")
def test_the_version_goes_on_where_the_trainer_was():
    log = Log()
    pushes = WeightPush(ARGS, Trainer(log, version=6))
    assert [pushes.push(engines_of(log)).version for _ in range(2)] == [7, 8]


def test_a_checkpoint_keeps_the_version_and_an_older_one_has_none(tmp_path):
    write_weight_version(tmp_path, 12)
    assert read_weight_version(tmp_path) == 12
    assert read_weight_version(tmp_path / "older") == 0


@pytest.mark.parametrize("content", [b"", b'{"weight_ver', b"\xff\x00", b"{}", b"[1]", b'{"weight_version": null}'])
def test_a_damaged_version_is_told_by_file(tmp_path, content):
    (tmp_path / WEIGHT_VERSION).write_bytes(content)
    with pytest.raises(UserError, match=f"{tmp_path / WEIGHT_VERSION} .*remove this file to count from 0"):
        read_weight_version(tmp_path)


METHODS = (
    "pause_generation", "flush_cache", "begin_weight_update", "end_weight_update", "prove_weight_version",
    "continue_generation",
)  # fmt: skip


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("method", METHODS)
def test_an_engine_that_fails_is_left_out_of_the_rest(method):
    log = Log({(method, 0): RunError("engine 0 died")})
    report = WeightPush(ARGS, Trainer(log)).push(engines_of(log))
    assert report.failed == {0: "engine 0 died"} and report.version == 1
    asked = [entry[0] for entry in log if entry[1] == 0 and entry[0] in METHODS]
    assert asked[-1] == method
    assert ("continue_generation", 1) in log
    # Nothing is sent to it: the others would wait for it, and have used up the try that they have.
    sends = [position for position, entry in enumerate(log) if entry[0] == "send"]
    early = METHODS.index(method) < METHODS.index("end_weight_update")
    joined = [[0, 1], [0, 1], [1], [1]] if early else [[0, 1], [0, 1]]
    assert [entry[2] for entry in log[: sends[0]] if entry[0] == "connect"] == joined and len(sends) == 2


def test_an_engine_keeps_the_reason_that_it_failed_of_first():
    served = push._Engines(ARGS, engines_of(Log()))
    served.leave_out({0: "engine 0 died"})
    served.leave_out({0: "connection closed by peer"})
    assert served.failed == {0: "engine 0 died"} and [engine.id for engine in served.remaining] == [1]


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("source", [0, 1])
def test_after_a_broken_transfer_the_others_get_all_of_it_again(source):
    log = Log({("send", source): {1: "engine 1 broke it"}})
    report = WeightPush(ARGS, Trainer(log)).push(engines_of(log, 3))
    assert report.failed == {1: "engine 1 broke it"}
    start = log.index(("send", source, 1)) + 1
    assert log[start : start + 4] == [("connect", 0, [0, 2]), ("connect", 1, [0, 2]), ("send", 0, 1), ("send", 1, 1)]
    assert [entry[1] for entry in log if entry[0] == "continue_generation"] == [0, 2]
    assert [entry for entry in log if entry[0] == "begin_weight_update"].count(("begin_weight_update", 0)) == 1
    assert report.metrics["perf/update_weights_bytes"] == 20.0


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("failed", [(1,), (0, 1), (0, 1, 2)])
def test_engines_that_answered_with_an_error_get_one_more_try(failed):
    log = Log({("send", 1): dict.fromkeys(failed, "connection closed by peer")})
    trainer = Trainer(log, certain=False)
    report = WeightPush(ARGS, trainer).push(engines_of(log, 3))
    assert report.version == 1 and report.failed == {}
    all_of_it = [("connect", 0, [0, 1, 2]), ("connect", 1, [0, 1, 2]), ("send", 0, 1), ("send", 1, 1)]
    start = log.index(("send", 1, 1)) + 1
    assert log[start : start + 4] == all_of_it
    assert [entry[1] for entry in log if entry[0] == "continue_generation"] == [0, 1, 2]


@pytest.mark.usefixtures("limits")
def test_engines_that_break_it_again_are_left_out():
    log = Log({("send", 1): {0: "broken"}})
    trainer = Trainer(log, certain=False)

    def send_weights(source, version, whole):
        if log.count(("send", 1, 1)) == 1:
            log.problems.setdefault(("send", 1), {0: "broken again", 2: "broken too"})
        return Trainer.send_weights(trainer, source, version, whole)

    trainer.send_weights = send_weights
    report = WeightPush(ARGS, trainer).push(engines_of(log, 3))
    assert report.version == 1 and report.failed == {0: "broken again", 2: "broken too"}
    assert [entry[2] for entry in log if entry[:2] == ("connect", 0)] == [[0, 1, 2], [0, 1, 2], [1]]


@pytest.mark.usefixtures("limits")
def test_a_group_that_cannot_be_joined_is_joined_again_by_all_sources():
    log = Log({("connect", 1): {0: "engine 0 hangs"}})
    report = WeightPush(ARGS, Trainer(log)).push(engines_of(log))
    assert report.failed == {0: "engine 0 hangs"}
    connected = [entry for entry in log if entry[0] == "connect"]
    assert connected == [("connect", 0, [0, 1]), ("connect", 1, [0, 1]), ("connect", 0, [1]), ("connect", 1, [1])]


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("failed", [(0,), (0, 1)])
def test_engines_that_answered_with_an_error_are_joined_once_more(failed):
    log = Log({("connect", 1): dict.fromkeys(failed, "connection closed by peer")})
    report = WeightPush(ARGS, Trainer(log, certain=False)).push(engines_of(log))
    assert report.version == 1 and report.failed == {}
    connected = [entry for entry in log if entry[0] == "connect"]
    assert connected == 2 * [("connect", 0, [0, 1]), ("connect", 1, [0, 1])]


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("then", ["connect", "send"])
def test_an_engine_that_fails_once_more_after_it_was_joined_again_is_left_out(then):
    log = Log({("connect", 0): {0: "does not join"}})
    trainer = Trainer(log, certain=False)

    def connect_engines(source, engines):
        connected = Trainer.connect_engines(trainer, source, engines)
        if connected.failed == {0: "does not join"}:
            log.problems[then, 0] = {0: "fails again"}
        return connected

    trainer.connect_engines = connect_engines
    report = WeightPush(ARGS, trainer).push(engines_of(log))
    assert report.version == 1 and report.failed == {0: "fails again"}
    assert [entry[1] for entry in log if entry[0] == "continue_generation"] == [1]


@pytest.mark.usefixtures("limits")
def test_without_an_engine_left_the_version_stays_and_the_trainer_hears_nothing():
    log = Log({("send", 0): {0: "broken", 1: "broken"}})
    pushes = WeightPush(ARGS, Trainer(log, version=4))
    report = pushes.push(engines_of(log))
    assert report.version == pushes.version == 4 and report.failed == {0: "broken", 1: "broken"}
    assert not [entry for entry in log if entry[0] in ("pushed", "continue_generation", "prove_weight_version")]
    assert pushes.push(engines_of(log)).version == 5


@pytest.mark.usefixtures("limits")
def test_a_push_whose_last_engine_dies_as_it_is_to_go_on_is_repeated_under_its_number():
    log = Log({("continue_generation", 0): RunError("engine 0 died")})
    pushes = WeightPush(ARGS, Trainer(log, version=4))
    report = pushes.push(engines_of(log, 1))
    assert report.version == pushes.version == 4 and report.failed == {0: "engine 0 died"}
    assert pushes.push(engines_of(log, 1)).version == 5
    assert [entry for entry in log if entry[0] == "pushed"] == [("pushed", 5)]


@pytest.mark.usefixtures("limits")
def test_refused_names_let_engines_that_got_nothing_go_on():
    log = Log()
    with pytest.raises(RunError, match="an unknown name"):
        WeightPush(ARGS, Trainer(log, refusal=0)).push(engines_of(log))
    assert log[-4:] == [
        ("end_weight_update", 0), ("continue_generation", 0), ("end_weight_update", 1), ("continue_generation", 1),
    ]  # fmt: skip


@pytest.mark.usefixtures("limits")
def test_refused_names_leave_engines_that_got_a_part_paused():
    log = Log()
    with pytest.raises(RunError, match="an unknown name"):
        WeightPush(ARGS, Trainer(log, refusal=1)).push(engines_of(log))
    assert not [entry for entry in log if entry[0] == "continue_generation"]


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize(
    "names, expected, message",
    [
        ([["a"], ["a", "b"]], "abc", "weight push: sent twice: a"),
        ([["a"], ["c"]], "abc", "1 tensors of the checkpoint of the engines were not sent: b"),
        ([["a"], ["a"]], None, "weight push: sent twice: a"),
    ],
)
def test_names_of_all_sources_are_checked_together(names, expected, message):
    log = Log()
    with pytest.raises(RunError, match=message):
        WeightPush(ARGS, Trainer(log, names, expected)).push(engines_of(log))
    assert ("prove_weight_version", 0, "1") not in log


@pytest.mark.parametrize("control, load", [(60.0, 5000.0), (5000.0, 60.0)])
@pytest.mark.parametrize("transport, local", [("nccl", None), ("disk", None), ("disk", "/local")])
def test_engines_have_the_time_that_each_of_their_orders_may_take(limits, control, load, transport, local):
    """A driver that waits longer waits for an engine that is frozen."""
    args = SimpleNamespace(**{
        **vars(ARGS), "http_control_timeout": control, "engine_load_timeout": load, "update_weight_transport": transport,
        "update_weight_disk_dir": "/shared", "update_weight_local_checkpoint_dir": local,
    })  # fmt: skip
    log = Log()
    WeightPush(args, Trainer(log)).push(engines_of(log))
    pausing, placing, answer = control + FLUSH_SECONDS, load + 2 * control, push._ANSWER_SECONDS
    if transport == "nccl":
        # The opening too.
        assert limits == [pausing + control + answer, placing + answer]
    else:
        fetching = [] if local is None else [load + answer]
        assert limits == [*fetching, pausing + placing + answer]


class DeltaTrainer(Trainer):
    """One whose sources send a delta of `wire` bytes, of ten."""

    def __init__(self, *arguments, wire=1, **more):
        super().__init__(*arguments, **more)
        self.wire = wire

    def send_weights(self, source, version, whole):
        self.log.append(("whole" if whole else "delta", source, version))
        delta = Delta(10, 10) if whole else Delta(2, self.wire)
        return Sent(self.names[source], 10, 1, {}, True, None, delta)

    def weights_written(self, version, engines):
        self.log.append(("written", version, [engine.id for engine in engines]))


THROUGH_FILES = SimpleNamespace(**{
    **vars(ARGS), "update_weight_transport": "disk", "update_weight_mode": "delta", "update_weight_disk_dir": "/shared",
    "update_weight_local_checkpoint_dir": "/local", "custom_update_weight_post_write_path": "my.hook",
})  # fmt: skip


@pytest.mark.usefixtures("limits")
def test_engines_are_paused_when_the_files_are_on_their_hosts():
    log = Log()
    report = WeightPush(THROUGH_FILES, DeltaTrainer(log)).push(engines_of(log, 1))
    assert log == [
        ("connect", 0, [0]),
        ("connect", 1, [0]),
        ("delta", 0, 1),
        ("delta", 1, 1),
        ("written", 1, [0]),
        ("fetch_weights", 0, "/shared/weight_v000001"),
        ("pause_generation", 0, "abort"),
        ("flush_cache", 0),
        ("update_weights_from_disk", 0, "/local", "1"),
        ("prove_weight_version", 0, "1"),
        ("continue_generation", 0),
        ("pushed", 1),
    ]
    assert report.metrics["perf/update_weights_density"] == 4 / 20
    assert report.metrics["perf/update_weights_wire_bytes"] == 2.0


@pytest.mark.usefixtures("limits")
def test_the_hook_of_files_is_not_called_where_there_are_none():
    log = Log()
    hooked = SimpleNamespace(**{**vars(ARGS), "custom_update_weight_post_write_path": "my.hook"})
    assert WeightPush(hooked, DeltaTrainer(log)).push(engines_of(log, 1)).failed == {}
    assert log[-1] == ("pushed", 1) and not [event for event in log if event[0] == "written"]
    log.clear()
    WeightPush(THROUGH_FILES, DeltaTrainer(log)).push([])
    assert log == [], "nobody wrote any where no engine is left"


@pytest.mark.usefixtures("limits")
def test_what_a_host_cannot_use_is_written_again_whole_and_once():
    log = Log({("fetch_weights", 1): "the base is gone"})
    report = WeightPush(THROUGH_FILES, DeltaTrainer(log)).push(engines_of(log))
    assert [entry for entry in log if entry[0] in ("delta", "whole", "written", "fetch_weights", "pause_generation")] == [
        ("delta", 0, 1), ("delta", 1, 1), ("written", 1, [0, 1]),
        ("fetch_weights", 0, "/shared/weight_v000001"), ("fetch_weights", 1, "/shared/weight_v000001"),
        ("whole", 0, 1), ("whole", 1, 1), ("written", 1, [0, 1]),
        ("fetch_weights", 0, "/shared/weight_v000001"), ("fetch_weights", 1, "/shared/weight_v000001"),
        ("pause_generation", 0, "abort"), ("pause_generation", 1, "abort"),
    ]  # fmt: skip
    assert report.failed == {} and report.metrics["perf/update_weights_wire_bytes"] == 22.0


@pytest.mark.usefixtures("limits")
def test_a_host_that_cannot_use_all_of_it_either_is_left_out():
    class Never(Handle):
        def _carry_out(self, orders):
            return "still not" if orders[-1][0] == "fetch_weights" else super()._carry_out(orders)

    log = Log()
    engines = [Receiver(0, Handle(0, log), 1, 0), Receiver(1, Never(1, log), 1, 1)]
    report = WeightPush(THROUGH_FILES, DeltaTrainer(log)).push(engines)
    assert report.failed == {1: "still not"} and report.version == 1
    assert ("pause_generation", 1, "abort") not in log


@pytest.mark.usefixtures("limits")
def test_deltas_that_are_more_than_the_weights_are_followed_by_all_of_them():
    log = Log()
    pushes = WeightPush(THROUGH_FILES, DeltaTrainer(log, wire=4))
    engines = engines_of(log, 1)
    for _ in range(6):
        pushes.push(engines)
    # 8 of 20 bytes with every push: after the third one they are more.
    kinds = [entry[0] for entry in log if entry[0] in ("delta", "whole") and entry[1] == 0]
    assert kinds == ["delta", "delta", "delta", "whole", "delta", "delta"]


@pytest.mark.usefixtures("limits")
def test_what_a_source_sends_whole_on_its_own_account_is_not_sent_whole_again():
    class Forgetful(DeltaTrainer):
        def send_weights(self, source, version, whole):
            sent = super().send_weights(source, version, whole)
            return dataclasses.replace(sent, delta=Delta(10, 11, is_whole=True)) if version == 1 else sent

    log = Log()
    pushes = WeightPush(THROUGH_FILES, Forgetful(log))
    for _ in range(2):
        pushes.push(engines_of(log, 1))
    assert ("delta", 0, 2) in log


@pytest.mark.usefixtures("limits")
def test_a_refused_name_leaves_engines_that_read_files_alone():
    log = Log()
    with pytest.raises(NamesDiffer):
        WeightPush(THROUGH_FILES, Trainer(log, refusal=1)).push(engines_of(log, 1))
    assert not [entry for entry in log if entry[0] in ("pause_generation", "update_weights_from_disk")]
