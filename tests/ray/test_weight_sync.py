"""What the driver does around a weight push, without trainer and engines."""

import dataclasses
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.ray import weight_sync
from slime.ray.weight_sync import WeightSync, mean_difference, probe_sequences
from slime.scheduling.device_turns import Turn
from slime.scheduling.served_models import ModelServing, ServerGroup
from slime.serving.fleet import EngineName, EngineSnapshot, EngineState, FleetSnapshot
from slime.utils import filesystem
from slime.utils.errors import RunError
from slime.utils.filesystem import make_shared_scratch_directory, remove_scratch_directory
from slime.weights.push import PushReport


def test_the_probe_is_the_same_in_every_process_and_inside_the_vocabulary():
    """So what it measures in two runs of a model can be compared."""
    assert probe_sequences(50) == [
        [24, 48, 26, 2, 16, 32, 31, 25, 19, 30, 22, 37, 13, 32, 8, 18, 8, 48, 6, 39, 16, 34, 45, 38],
        [9, 19, 6, 46, 4, 43, 21, 30, 35, 6, 22, 27, 20, 39, 40, 13, 35, 30, 28, 33, 16, 3, 35, 0],
        [5, 46, 25, 45, 42, 40, 0, 39, 31, 21, 15, 46, 20, 45, 4, 12, 36, 14, 15, 9, 34, 28, 5, 5],
        [20, 32, 31, 6, 19, 35, 18, 45, 7, 35, 21, 34, 13, 38, 35, 37, 18, 28, 5, 38, 24, 20, 36, 15],
    ]
    large = probe_sequences(151936)
    assert large[0][:4] == [100989, 110250, 10612, 67873] and large[-1][-2:] == [56413, 109949]


def test_mean_difference():
    assert mean_difference([[1.0, 2.0], [3.0]], [[1.5, 2.0], [2.0]]) == pytest.approx(0.5)


def test_lost_tokens_are_an_error():
    with pytest.raises(ValueError):
        mean_difference([[1.0, 2.0]], [[1.0]])


def test_engines_have_the_time_to_load_that_their_flag_gives_and_a_moment_more(monkeypatch):
    limits = []
    monkeypatch.setattr(
        weight_sync, "wait_for_all", lambda refs, name, limit, flag, **options: limits.append((flag, limit)) or [None]
    )
    engine = SimpleNamespace(update_weights_from_disk=SimpleNamespace(remote=lambda directory: "its answer"))
    monkeypatch.setattr(weight_sync, "WeightPush", lambda args, train_group: None)
    manager = SimpleNamespace(bring_weights_by=lambda bring: None)
    sync = WeightSync(SimpleNamespace(engine_load_timeout=5000.0, use_fault_tolerance=False), None, manager, None)
    sync._call(fleet_of(engine), "update_weights_from_disk", "directory")
    assert limits == [("--engine-load-timeout", 5000.0 + weight_sync._ANSWER_SECONDS)]


def fleet_of(*handles, version=None, first=0) -> FleetSnapshot:
    engines = [
        EngineSnapshot(EngineName(first + position), EngineState.STALE, None, handle, 1, first + position, first)
        for position, handle in enumerate(handles)
    ]
    return FleetSnapshot(version, tuple(engines))


class Pushes:
    """Stands for `WeightPush`: the versions count from 5; `failed` is what fails, push by push, and nothing after that."""

    def __init__(self, events):
        self.events, self.version, self.failed = events, 4, []

    def push(self, receivers):
        failed = self.failed.pop(0) if self.failed else {}
        self.version += len(failed) < len(receivers)
        return self._report(receivers, failed)

    def repeat(self, receivers):
        self.events.append("again")
        return self._report(receivers, self.failed.pop(0) if self.failed else {})

    def repeat_from_files(self, receivers):
        self.events.append("from files")
        return self._report(receivers, {})

    def _report(self, receivers, failed):
        self.events.append([(of.id, of.handle, of.num_gpus, of.gpu_offset) for of in receivers])
        return PushReport(self.version, failed, {"perf/update_weights_time": 1.0})


@pytest.fixture
def events():
    return []


@pytest.fixture
def sync(monkeypatch, events):
    """`sync.fleets` are those that pushes go to, one after the other; `sync.stale` the one that lacks weights.

    `sync.unproven`: whose log-probs are not told once, and why.
    """
    fleets = [fleet_of("a", "b"), fleet_of("a", "b"), fleet_of("b", first=1)]
    pushes = Pushes(events)
    monkeypatch.setattr(weight_sync, "WeightPush", lambda args, train_group: pushes)
    manager = SimpleNamespace(
        begin_push=lambda: fleets.pop(0),
        begin_push_to_stale=lambda: sync.stale,
        end_push=lambda names, *rest: events.append((*map(str, names), *rest)),
        bring_weights_by=lambda bring: events.append(bring),
    )
    flags = {
        "check_weight_update_equal": False, "use_fault_tolerance": False, "max_weight_staleness": None,
        "release_train": False, "offload_rollout": False, "hf_checkpoint": None, "sglang_config": "serving.yaml",
        "sglang_dp_size": None, "sglang_enable_dp_attention": None, "engine_load_timeout": 60.0,
    }  # fmt: skip
    in_groups = ServerGroup("regular", 6, 6, {"enable_dp_attention": True, "dp_size": 6})
    flags["served_models"] = [ModelServing("default", None, True, (ServerGroup("regular", 2, 2, {}), in_groups))]
    args = SimpleNamespace(**flags, vocab_size=50)
    turns = []
    ranks = SimpleNamespace(
        rollouts_trained=0, lives=True, probe_log_probs=lambda sequences: turns.append("probe") or ["of the trainer"]
    )
    sync = WeightSync(args, ranks, manager, SimpleNamespace(turn_to=turns.append))
    assert events.pop() == sync.push_to_stale

    def compare(fleet, sequences, trainer):
        # Every group of an engine is asked for one.
        assert (sequences, trainer) == (probe_sequences(50, 6), ["of the trainer"])
        events.append(("log-probs", *map(str, fleet.names)))
        turns.append("compare")
        unproven = {name.engine_id: sync.unproven.pop(name) for name in fleet.names if name in sync.unproven}
        sync._proven.update(name for name in fleet.names if name.engine_id not in unproven)
        return unproven

    sync._compare_log_probs = compare
    sync.pushes, sync.fleets, sync.unproven, sync.turns = pushes, fleets, {}, turns
    return sync


def train_and_push(sync):
    sync._train_group.rollouts_trained += 1
    return sync.push()


def test_a_push_goes_to_the_engines_that_are_there_and_the_fleet_hears_of_its_end(sync, events):
    for _ in range(3):
        assert train_and_push(sync) == {"perf/update_weights_time": 1.0}
    assert events == [
        [(0, "a", 1, 0), (1, "b", 1, 1)], ("log-probs", "engine 0", "engine 1"), ("engine 0", "engine 1", 5, {}),
        [(0, "a", 1, 0), (1, "b", 1, 1)], ("engine 0", "engine 1", 6, {}),
        [(1, "b", 1, 1)], ("engine 1", 7, {}),
    ]  # fmt: skip


def test_a_push_counts_the_devices_of_engines_and_not_the_engines(sync, events):
    """By its devices an engine has its ranks in a group, and the training ranks that it shares them with."""
    engines = [
        EngineSnapshot(EngineName(number), EngineState.STALE, None, "abc"[number], num_gpus, offset, 0)
        for number, (num_gpus, offset) in enumerate([(2, 0), (4, 2), (1, 8)])
    ]
    sync.fleets[0] = FleetSnapshot(None, tuple(engines))
    sync.push()
    assert events[0] == [(0, "a", 2, 0), (1, "b", 4, 2), (2, "c", 1, 8)]


def test_without_engines_there_is_no_push_and_nothing_to_prove(sync, events):
    sync.fleets.insert(0, fleet_of())
    assert sync.push() == {"perf/update_weights_time": 1.0}
    assert events == [[], (4, {})]


def test_devices_turn_to_the_push_and_then_to_generation_and_log_probs_are_told_by_whoever_is_awake(sync, events):
    sync.push()
    train_and_push(sync)
    assert sync.turns == [Turn.PUSH, "probe", Turn.GENERATION, "compare", Turn.PUSH, Turn.GENERATION]
    sync.turns.clear()
    sync.stale = fleet_of("new", first=1)
    sync.push_to_stale()
    assert sync.turns == [Turn.PUSH, "probe", Turn.GENERATION, "compare"]
    sync.turns.clear()
    sync.stale = fleet_of()
    sync.push_to_stale()
    assert sync.turns == []


def test_a_trainer_that_ends_tells_its_log_probs_for_engines_that_come_when_it_is_gone(sync, events):
    sync._args.release_train = True
    sync.push()
    train_and_push(sync)
    assert sync.turns == [Turn.PUSH, "probe", Turn.GENERATION, "compare", Turn.PUSH, "probe", Turn.GENERATION]
    sync._train_group.lives = False
    sync.turns.clear()
    events.clear()
    sync.stale = fleet_of("new", first=1)
    sync.push_to_stale()
    assert sync.turns == [Turn.GENERATION, "compare"]
    assert events == ["from files", [(1, "new", 1, 1)], ("log-probs", "engine 1"), ("engine 1", 6, {})]


def test_a_push_that_ends_the_run_gives_nobody_its_caches(sync):
    sync.pushes.failed = [{1: "engine 1 died"}]
    with pytest.raises(RunError):
        sync.push()
    assert sync.turns == [Turn.PUSH]


def test_after_a_push_that_nobody_took_the_trainer_stays_as_it_is_for_the_engines_to_come(sync):
    sync._args.use_fault_tolerance = sync._args.release_train = True
    sync.pushes.failed = [{0: "engine 0 died", 1: "engine 1 died"}]
    sync.push()
    # To turn to what is there already does nothing.
    assert sync.turns == [Turn.PUSH, Turn.PUSH, "probe", Turn.GENERATION, "compare"]


def test_a_new_server_proves_its_first_weights_and_nobody_later_ones(sync, events):
    sync.push()
    second_life = dataclasses.replace(sync.fleets[0].engines[1], name=EngineName(1, 1))
    sync.fleets[0] = dataclasses.replace(sync.fleets[0], engines=(sync.fleets[0].engines[0], second_life))
    events.clear()
    train_and_push(sync)
    assert events[1:-1] == [("log-probs", "engine 1")]
    sync._args.check_weight_update_equal = True
    events.clear()
    train_and_push(sync)
    assert events[1:-1] == [("log-probs", "engine 1")], "with the flag, after every push"


def test_an_engine_that_fails_ends_the_run_with_its_message_and_the_fleet_knows_it(sync, events):
    sync.pushes.failed = [{1: "engine 1 died"}]
    with pytest.raises(RunError, match="^engine 1 died$"):
        sync.push()
    assert events[1:] == [("engine 1", 5, {1: "engine 1 died"}), ("engine 0", 5, {})]


def test_with_fault_tolerance_the_others_go_on_without_the_one_that_failed(sync, events):
    sync._args.use_fault_tolerance = True
    sync.pushes.failed = [{1: "engine 1 died"}]
    assert sync.push() == {"perf/update_weights_time": 1.0}
    assert events[1:] == [("engine 1", 5, {1: "engine 1 died"}), ("log-probs", "engine 0"), ("engine 0", 5, {})]


def test_one_that_failed_a_push_is_given_up_before_the_turn_to_generation(sync, events):
    """It may hang, and the turn waits for all engines that have no caches yet."""
    sync._args.use_fault_tolerance = True
    sync._devices.turn_to = events.append
    lost = ("engine 1", 5, {1: "engine 1 hangs"})
    sync.pushes.failed = [lost[-1]]
    sync.push()
    assert events.index(lost) < events.index(Turn.GENERATION) < events.index(("engine 0", 5, {}))
    events.clear()
    sync.stale, sync.pushes.failed = fleet_of("new", "newer"), [lost[-1]]
    sync.push_to_stale()
    assert events.index(lost) < events.index(Turn.GENERATION) < events.index(("engine 0", 5, {}))


@pytest.fixture
def checksums(sync, monkeypatch, tmp_path):
    """What engines report before the push, after their reset and after the push: handle → checksum of the only tensor.

    `dies`: (number of the call, handle of the engine that fails it); None: nobody.
    """
    sync._args.check_weight_update_equal, sync._args.save = True, str(tmp_path)
    sync._train_group.export_hf = lambda directory: None
    reports = [{"a": "1", "b": "1"}, {"a": "2", "b": "3"}, {"a": "1", "b": "1"}]
    asked, order = [], []

    def call(fleet, method, *arguments):
        order.append(method)
        answers = {handle: None for handle in fleet.handles}
        if method == "weights_checksum":
            asked.append(fleet.handles)
            answers = {handle: {"norm": reports[len(asked) - 1][handle]} for handle in fleet.handles}
        number, who = seen.dies or (None, None)
        if len(order) - 1 == number and who in answers:
            answers[who] = RunError(f"{who} died")
        return {name.engine_id: answers[handle] for name, handle in zip(fleet.names, fleet.handles, strict=True)}

    monkeypatch.setattr(sync, "_call", call)
    seen = SimpleNamespace(reports=reports, asked=asked, order=order, dies=None)
    return seen


def test_the_scratch_checkpoint_of_another_run_that_checks_its_weights_stays(sync, checksums, tmp_path):
    """Two runs may have one `--save`: one that only evaluates claims nothing there."""
    of_another, of_a_dead_one = (make_shared_scratch_directory(tmp_path, "weight-check", 60.0) for _ in range(2))
    os.close(filesystem._locks.pop(of_a_dead_one))
    exported = []
    sync._train_group.export_hf = lambda directory: exported.append((Path(directory), set(os.listdir(tmp_path))))
    sync.push()
    ((directory, beside),) = exported
    assert beside == {of_another.name, directory.parent.name} and directory.parent.parent == tmp_path
    assert os.listdir(tmp_path) == [of_another.name]
    remove_scratch_directory(of_another)


def test_with_fault_tolerance_those_that_go_on_are_checked_when_another_fails_the_first_push(sync, checksums, events):
    sync._args.use_fault_tolerance = True
    sync.pushes.failed = [{0: "engine 0 died"}]
    sync.push()
    assert checksums.asked == [["a", "b"], ["a", "b"], ["b"]]
    told = "weights_checksum"
    assert checksums.order == ["update_weights_from_disk", told, "reset_weights", told, told], "those of the trainer"
    assert ("engine 0", 5, {0: "engine 0 died"}) in events and events[-1] == ("engine 1", 5, {})


@pytest.mark.parametrize("number", range(5))
def test_with_fault_tolerance_one_that_dies_while_checksums_are_made_is_replaced_like_one_that_dies_in_a_push(
    sync, checksums, events, number
):
    sync._args.use_fault_tolerance = True
    checksums.dies = (number, "a")
    sync.push()
    _, given_up, *proven, told = events
    assert (given_up, told) == (("engine 0", 5, {0: "a died"}), ("engine 1", 5, {}))
    sent = [(1, "b", 1, 1)] if number < 4 else [(0, "a", 1, 0), (1, "b", 1, 1)]
    assert events[0] == sent, "its part of the weights is not waited for"
    assert proven == [("log-probs", "engine 1")]
    assert len(checksums.order) == 5 and checksums.asked[-1] == (["b"] if number < 4 else ["a", "b"])


@pytest.mark.parametrize("number", [0, 4])
def test_where_all_die_while_checksums_are_made_those_in_their_place_are_checked(sync, checksums, events, number):
    sync._args.use_fault_tolerance = True
    sync.fleets[0], sync.fleets[1] = fleet_of("a"), fleet_of("b", first=1)
    checksums.dies = (number, "a")
    checksums.reports[:] = [*checksums.reports[: 2 + number // 4], {"b": "1"}, {"b": "2"}, {"b": "1"}]
    sync.push()
    failed = ("engine 0", 5 if number == 4 else 4, {0: "a died"})
    assert [event for event in events if event[:1] == ("engine 0",)] == [failed]
    assert events[-1] == ("engine 1", 5, {}) and checksums.asked[-1] == ["b"]


def test_engines_are_waited_for_one_by_one_only_where_the_others_go_on_without_one_that_fails(monkeypatch, sync):
    def answer(kind):
        return lambda refs, name, limit, pending, flag: [f"{ref} by {kind}" for ref in refs]

    monkeypatch.setattr(weight_sync, "wait_for_all", answer("all"))
    monkeypatch.setattr(weight_sync, "wait_for_each", answer("each"))
    fleet = fleet_of(*(SimpleNamespace(reset_weights=SimpleNamespace(remote=lambda name=name: name)) for name in "ab"))
    assert sync._call(fleet, "reset_weights") == {0: "a by all", 1: "b by all"}
    sync._args.use_fault_tolerance = True
    assert sync._call(fleet, "reset_weights") == {0: "a by each", 1: "b by each"}


def test_one_that_goes_on_with_other_weights_is_named_also_when_another_failed(sync, checksums):
    sync._args.use_fault_tolerance = True
    sync.pushes.failed = [{0: "engine 0 died"}]
    checksums.reports[2]["b"] = "3"
    with pytest.raises(
        RunError, match="^weight check: engine 1 does not hold the trainer's weights after the push: .* norm$"
    ):
        sync.push()


@pytest.mark.parametrize("alike", [True, False])
def test_engines_that_load_other_bytes_of_a_checkpoint_are_not_started_alike(sync, checksums, alike):
    checksums.reports[0]["b"] = checksums.reports[2]["b"] = "of another dtype"
    if alike:
        with pytest.raises(RunError, match="engine 1 and engine 0 differ after loading the same checkpoint"):
            sync.push()
        return
    first, second = sync.fleets[0].engines
    sync.fleets[0] = FleetSnapshot(None, (first, dataclasses.replace(second, alike=1)))
    sync.push()


def test_nobody_is_checked_where_a_failure_ends_the_run_or_none_is_left(sync, checksums):
    sync.pushes.failed = [{0: "engine 0 died"}]
    with pytest.raises(RunError, match="^engine 0 died$"):
        sync.push()
    assert len(checksums.asked) == 2
    sync._args.use_fault_tolerance = True
    sync.fleets.append(sync.fleets[-1])
    sync.pushes.failed = [{0: "engine 0 died", 1: "engine 1 died"}]
    checksums.asked.clear()
    checksums.reports.extend([{"b": "7"}, {"b": "8"}, {"b": "7"}])
    del checksums.reports[2]
    sync.push()
    assert checksums.asked == [["a", "b"], ["a", "b"], ["b"], ["b"], ["b"]], "all failed: the next one in its place is"


def test_with_fault_tolerance_one_that_does_not_prove_its_weights_does_not_serve_and_is_not_taken_for_proven(
    sync, events
):
    sync._args.use_fault_tolerance = True
    sync.unproven[EngineName(1)] = "engine 1 hangs"
    sync.push()
    assert events[1:] == [
        ("log-probs", "engine 0", "engine 1"),
        ("engine 0", "engine 1", 5, {1: "engine 1 hangs"}),
    ]
    assert sync._proven == {EngineName(0)}
    events.clear()
    sync.stale = fleet_of("new", first=1)
    sync.unproven[EngineName(1)] = "engine 1 hangs again"
    sync.push_to_stale()
    assert events[2:] == [("log-probs", "engine 1"), ("engine 1", 5, {1: "engine 1 hangs again"})]


def test_where_none_proves_its_weights_their_successors_get_them_under_the_same_version(sync, events):
    """Samples that were made before are as old as they would be if nobody had failed."""
    sync._args.use_fault_tolerance = True
    sync.unproven = {EngineName(0): "engine 0 hangs", EngineName(1): "engine 1 hangs"}
    sync.push()
    assert [event for event in events if event[0] == "engine 0"] == [
        ("engine 0", "engine 1", 5, {0: "engine 0 hangs", 1: "engine 1 hangs"}),
        ("engine 0", "engine 1", 5, {}),
    ]
    assert events.count("again") == 1
    train_and_push(sync)
    assert events[-1] == ("engine 1", 6, {}) and events.count("again") == 1, "the next ones are new weights"


def test_where_all_failed_their_successors_get_the_same_weights_at_once_but_not_for_ever(sync, events):
    sync._args.use_fault_tolerance = True
    lost = {0: "engine 0 died", 1: "engine 1 died"}
    sync.pushes.failed = [lost]
    sync.push()
    ends = [event for event in events if event[0] == "engine 0"]
    assert ends == [("engine 0", "engine 1", 4, lost), ("engine 0", "engine 1", 5, {})]
    sync.fleets[:] = [fleet_of("a", "b") for _ in range(9)]
    sync.pushes.failed = [lost] * 9
    with pytest.raises(RunError, match="^engine 0 died$"):
        sync.push()
    assert len(sync.fleets) == 9 - weight_sync._ROUNDS


def test_engines_that_missed_a_push_get_it_under_its_version_and_prove_it_before_they_serve(sync, events):
    sync._args.use_fault_tolerance = True
    sync.push()
    events.clear()
    sync.stale = fleet_of("new", first=1)
    sync.push_to_stale()
    assert events == ["again", [(1, "new", 1, 1)], ("log-probs", "engine 1"), ("engine 1", 5, {})]
    events.clear()
    sync.pushes.failed = [{1: "engine 1 died"}]
    sync.push_to_stale()
    assert events[2:] == [("engine 1", 5, {1: "engine 1 died"}), (5, {})]
    events.clear()
    sync.stale = fleet_of()
    sync.push_to_stale()
    assert events == []


@pytest.mark.parametrize("told", [RunError("engine 0 died"), "<html>", [{"error": "no"}], {"error": "no"}])
@pytest.mark.parametrize("tolerant", [False, True])
def test_an_engine_that_does_not_tell_its_log_probs_is_left_to_who_watches_it(
    sync, monkeypatch, tolerant, told, caplog
):
    words = (
        "engine 0 died"
        if isinstance(told, RunError)
        else f"an engine that was asked for log-probs answered {str(told)!r}"
    )
    compare = WeightSync._compare_log_probs
    engine = SimpleNamespace(generate=SimpleNamespace(remote=lambda request: None))
    monkeypatch.setattr(weight_sync, "wait_for_each", lambda refs, name, limit, **options: [told])
    sync._args = SimpleNamespace(
        use_fault_tolerance=tolerant, vocab_size=50, params_dtype_name="float32", engine_load_timeout=1.0,
        hf_checkpoint="/nowhere",
    )  # fmt: skip
    if not tolerant:
        with pytest.raises(RunError, match=f"^{re.escape(words)}$"):
            compare(sync, fleet_of(engine), [], [])
        return
    assert compare(sync, fleet_of(engine), [], []) == {0: words}
    assert f"weight check: {words}" in caplog.text and not sync._proven


def test_of_engines_with_roles_those_that_read_prompts_tell_log_probs(sync, monkeypatch, tmp_path):
    """One that only decodes has none to tell, and nobody waits for them at the next push either."""
    (tmp_path / "config.json").write_text("{}")
    answers = [{"meta_info": {"input_token_logprobs": [[None], [-1.0]]}}]
    monkeypatch.setattr(weight_sync, "wait_for_each", lambda refs, name, limit, **options: [answers for _ in refs])
    sync._args = SimpleNamespace(params_dtype_name="float32", engine_load_timeout=1.0, hf_checkpoint=str(tmp_path))
    asked = []
    handles = [
        SimpleNamespace(generate=SimpleNamespace(remote=lambda request, number=number: asked.append(number)))
        for number in range(3)
    ]
    engines = fleet_of(*handles).engines
    roles = ("prefill", "decode", "decode")
    fleet = FleetSnapshot(
        None, tuple(dataclasses.replace(engine, role=role) for engine, role in zip(engines, roles, strict=True))
    )
    assert WeightSync._compare_log_probs(sync, fleet, [], [[-1.0]]) == {}
    assert asked == [0] and sync._proven == set(fleet.names)


@pytest.mark.parametrize("others_work", [True, False])
def test_an_engine_that_missed_weights_which_nobody_has_any_more_waits_for_others_to_finish(sync, events, others_work):
    """Trained on since the push: the weights of its version are gone, and newer ones would cut off what others do."""
    sync._args.use_fault_tolerance = True
    sync.push()
    sync._train_group.rollouts_trained += 1
    sync._rollout_manager.is_working = lambda: others_work
    events.clear()
    sync.stale = fleet_of("new", first=1)
    sync.push_to_stale()
    if others_work:
        assert events == []
    else:
        assert events[-1] == ("engine 0", "engine 1", 6, {}) and "again" not in events
        sync.push_to_stale()
        assert events[-1] == ("engine 1", 6, {}) and "again" in events, "now all have what the trainer has"


def test_weights_that_a_push_between_two_has_taken_ahead_keep_their_version_at_the_next(sync, events):
    """Rollouts that were asked for before expect one version more, and `--keep-old-actor` moves once for each training."""
    sync._args.use_fault_tolerance = True
    sync.push()
    sync._train_group.rollouts_trained += 1
    sync._rollout_manager.is_working = lambda: False
    sync.push_to_stale()
    assert events[-1] == ("engine 0", "engine 1", 6, {}) and "again" not in events
    sync.push()
    assert events[-1] == ("engine 1", 6, {}) and events.count("again") == 1
    sync.fleets.append(fleet_of("b", first=1))
    train_and_push(sync)
    assert events[-1] == ("engine 1", 7, {}) and events.count("again") == 1


@pytest.mark.parametrize("quantised, difference", [(False, 0.3), (True, 0.3), (True, 0.7)])
def test_engines_with_quantised_weights_may_differ_and_are_told_of_when_they_differ_much(
    sync, monkeypatch, tmp_path, quantised, difference, caplog
):
    config = {"quantization_config": {"quant_method": "fp8"}} if quantised else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    answers = [{"meta_info": {"input_token_logprobs": [[None], [-1.0]]}}]
    monkeypatch.setattr(weight_sync, "wait_for_each", lambda refs, name, limit, **options: [answers])
    sync._args = SimpleNamespace(
        use_fault_tolerance=False, vocab_size=50, params_dtype_name="float32", engine_load_timeout=1.0,
        hf_checkpoint=str(tmp_path), check_weight_update_equal=False,
    )  # fmt: skip
    trainer = [[-1.0 - difference]]
    fleet = fleet_of(SimpleNamespace(generate=SimpleNamespace(remote=lambda request: None)))
    if not quantised:
        with pytest.raises(RunError, match="differ from the trainer"):
            WeightSync._compare_log_probs(sync, fleet, [], trainer)
        return
    assert WeightSync._compare_log_probs(sync, fleet, [], trainer) == {}
    assert ("differ from the trainer" in caplog.text) is (difference > 0.5)


def test_newer_weights_between_two_pushes_would_break_a_bound_on_staleness(sync, events):
    sync._args.max_weight_staleness = 3
    sync.push()
    sync._train_group.rollouts_trained += 1
    sync._rollout_manager.is_working = lambda: False
    with pytest.raises(RunError, match="--max-weight-staleness 3"):
        sync.push_to_stale()


@pytest.mark.parametrize(
    ("dtype", "asked_for", "difference", "outcome"),
    [
        ("float32", False, 2e-5, "ends"),
        ("float32", False, 5e-6, "equal"),
        ("float32", False, float("nan"), "ends"),
        ("bfloat16", False, 0.04, "equal"),
        ("bfloat16", True, 0.04, "equal"),
        # Two correct implementations may differ by more, so only who asked for the proof is stopped.
        ("bfloat16", False, 0.06, "warns"),
        ("bfloat16", False, float("nan"), "warns"),
        ("bfloat16", True, 0.06, "ends"),
        ("bfloat16", True, float("nan"), "ends"),
        ("float16", True, 0.02, "ends"),
    ],
)
def test_an_engine_that_computes_other_log_probs_ends_the_run_or_is_told_of(
    sync, monkeypatch, tmp_path, caplog, dtype, asked_for, difference, outcome
):
    (tmp_path / "config.json").write_text("{}")
    answers = [{"meta_info": {"input_token_logprobs": [[None], [-1.0]]}}]
    monkeypatch.setattr(weight_sync, "wait_for_each", lambda refs, name, limit, **options: [answers])
    sync._args = SimpleNamespace(
        use_fault_tolerance=True, vocab_size=50, params_dtype_name=dtype, engine_load_timeout=1.0,
        hf_checkpoint=str(tmp_path), check_weight_update_equal=asked_for,
    )  # fmt: skip
    fleet = fleet_of(SimpleNamespace(generate=SimpleNamespace(remote=lambda request: None)))
    if outcome == "ends":
        with pytest.raises(RunError, match="^weight check: the log-probs of engine 0 differ from the trainer's by "):
            WeightSync._compare_log_probs(sync, fleet, [], [[-1.0 - difference]])
    else:
        assert WeightSync._compare_log_probs(sync, fleet, [], [[-1.0 - difference]]) == {}
        assert ("differ from the trainer's" in caplog.text) is (outcome == "warns")
