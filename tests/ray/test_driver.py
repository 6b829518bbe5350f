import contextlib
import functools
import weakref
from types import SimpleNamespace

import pytest

import train
import train_async
from slime.arguments.checkpoints import WeightSource
from slime.arguments.rules.algorithm import unavoidable_staleness
from slime.ray.driver import (
    RolloutResult,
    RunLength,
    RunProgress,
    SharedDevices,
    StartedRun,
    StepReport,
    Turn,
    evaluates_before_training,
    evaluation_is_due,
    push_is_due,
    save_is_due,
)
from slime.scheduling.device_turns import IllegalTurn
from slime.utils.checkpoint_directory import EVALUATED, evaluated_rollouts
from slime.utils.errors import RunError


def make(**values):
    defaults = {
        "has_engines": True, "eval_interval": 5, "skip_eval_before_train": False, "save_interval": 5,
        "loss_type": "policy_loss", "offload_train": False, "release_train": False, "offload_rollout": False,
        "async_save": False, "ci_test": False, "ci_disable_kl_checker": False, "ci_save_grad_norm": None,
        "ci_load_grad_norm": None, "ci_train_rollout_logprob_abs_diff_threshold": 0.1, "num_steps_per_rollout": 2,
        "use_rollout_logprobs": False, "keep_old_actor": False, "log_interval": 1,
        "save": None, "initial_weights": None,
    }  # fmt: skip
    return SimpleNamespace(**{**defaults, **values})


def started(start=0, num_rollout=12, manager=None, actor=None):
    return StartedRun(manager, actor, RunLength(num_rollout), start)


def test_evaluation_is_periodic_and_at_the_end():
    assert [r for r in range(12) if evaluation_is_due(make(), RunLength(12), r)] == [4, 9, 11]
    assert [r for r in range(12) if save_is_due(make(), RunLength(12), r)] == [4, 9, 11]
    assert [r for r in range(12) if save_is_due(make(save_interval=100), RunLength(12, 3), r)] == [2, 5, 8, 11]


@pytest.mark.parametrize(
    "values, start, num_rollout, expected",
    [
        ({}, 0, 12, True),
        ({"skip_eval_before_train": True}, 0, 12, False),
        ({}, 5, 12, False),
        ({"eval_interval": None}, 0, 12, False),
        ({"has_engines": False}, 0, 12, False),
        # An evaluation of a checkpoint, wherever its training stood.
        ({"skip_eval_before_train": True}, 30, 0, True),
    ],
)
def test_evaluation_before_training(values, start, num_rollout, expected):
    assert evaluates_before_training(make(**values), started(start, num_rollout)) is expected


class FakeManager:
    """Generates nothing, and looks whether the rollout before is still held."""

    serving = None

    def __init__(self):
        self.results, self.held = [], []

    def generate(self, rollout_id):
        self.held.append([result() is not None for result in self.results])
        result = RolloutResult(["shard"], [], ["shard of the critic"])
        self.results.append(weakref.ref(result))
        return SimpleNamespace(result=lambda: result)


@pytest.mark.parametrize("with_trainer", [True, False])
def test_the_driver_lets_a_batch_go_before_it_asks_for_the_next(with_trainer):
    args = make(has_engines=False, has_trainer=True, save_interval=None)
    trained = []
    actor = SimpleNamespace(train=lambda rollout_id, rollout, report: trained.append(rollout.critic_shards))
    manager = FakeManager()
    train.loop(args, started(0, 3, manager, actor if with_trainer else None), RunProgress())
    assert manager.held == [[], [False], [False, False]]
    assert trained == [["shard of the critic"]] * 3 * with_trainer


def test_a_run_needs_nothing_but_its_arguments(monkeypatch):
    manager, ended = FakeManager(), []
    manager.dispose = lambda: ended.append("manager")
    placement = "slime.ray.placement_group"
    monkeypatch.setattr(f"{placement}.create_placement_groups", lambda args: {"rollout": None})
    monkeypatch.setattr(f"{placement}.create_rollout_manager", lambda args, group: manager)
    monkeypatch.setattr(
        f"{placement}.create_training_models", lambda args, groups, manager: started(1, 3, manager, None)
    )
    train.train(make(has_engines=False, has_trainer=False))
    assert len(manager.held) == 2 and ended == ["manager"]


def test_a_finished_run_says_so(caplog):
    with caplog.at_level("INFO"):
        evaluates_before_training(make(), started(12))
    assert "nothing left to do: 12 of 12 rollouts are done" in caplog.text


def test_an_evaluation_is_told_by_the_rollout_that_it_precedes_or_follows(caplog):
    report = StepReport(make(log_interval=8), started(3), RunProgress())
    with caplog.at_level("INFO"):
        report.evaluation([({"eval/math": 0.5, "eval/step": 3}, "eval/step")])
        for rollout_id in (3, 4):
            with report.step(rollout_id):
                pass
        report.evaluation([({"eval/math": 0.75, "eval/step": 5}, "eval/step")])
    told = [record.getMessage().partition(" | ")[0] for record in caplog.records]
    before, after = "evaluation before rollout 3: math 0.5000", "evaluation after rollout 4: math 0.7500"
    assert told == [before, "rollout 3 (4/12)", after]


@pytest.mark.parametrize(
    ("start", "resume", "evaluated", "is_made"),
    [
        # The evaluation after rollout 4 is due, and after the last one, but not after rollout 3.
        (5, True, "0", True), (5, True, "5", False), (4, True, "0", False), (12, True, "10", True), (12, True, "12", False),
        # A checkpoint of another start, or of a run that told nothing.
        (5, False, "0", False), (5, True, None, False), (5, True, "damaged", False),
    ],
)  # fmt: skip
def test_an_evaluation_that_was_cut_off_is_made_at_the_resume(tmp_path, start, resume, evaluated, is_made):
    if evaluated is not None:
        (tmp_path / EVALUATED).write_text(evaluated)
    args = make(initial_weights=WeightSource("megatron", str(tmp_path), resume=resume))
    assert evaluates_before_training(args, started(start)) is is_made
    assert not evaluates_before_training(make(**{**vars(args), "eval_interval": None}), started(start))
    assert not evaluates_before_training(make(**{**vars(args), "has_engines": False}), started(start))


def test_evaluations_are_noted_beside_the_checkpoints(tmp_path):
    args, actor = make(save=str(tmp_path)), SimpleNamespace()
    report = StepReport(args, started(3, actor=actor), RunProgress())
    assert evaluated_rollouts(tmp_path) == 3, "if the first one is cut off"
    with report.step(3):
        pass
    report.evaluation([])
    assert evaluated_rollouts(tmp_path) == 4
    StepReport(args, started(8, actor=actor), RunProgress())
    assert evaluated_rollouts(tmp_path) == 4, "a start is no evaluation"
    StepReport(args, started(8, actor=actor), RunProgress()).evaluation([])
    assert evaluated_rollouts(tmp_path) == 8
    for values, ranks in (({"eval_interval": None}, actor), ({}, None)):
        StepReport(make(save=str(tmp_path / "none"), **values), started(0, actor=ranks), RunProgress()).evaluation([])
    assert not (tmp_path / "none").exists()


def test_an_evaluation_that_cannot_be_noted_is_no_failure(tmp_path, caplog):
    (tmp_path / "file").touch()
    StepReport(make(save=str(tmp_path / "file")), started(actor=SimpleNamespace()), RunProgress()).evaluation([])
    assert caplog.text.count(EVALUATED) == 2


def test_the_end_of_a_run_knows_what_was_saved():
    args, progress = make(has_engines=False, has_trainer=True, save_interval=2), RunProgress()
    seen = []
    actor = SimpleNamespace(
        train=lambda rollout_id, rollout, report: None,
        save=lambda rollout_id: seen.append(progress.rollout_saved),
        # Whatever ends the run from here on may find the checkpoint of this rollout to be the newest.
        publish=lambda rollout_id: seen.append(progress.rollout_saved),
    )
    manager = FakeManager()
    manager.save = lambda rollout_id: None
    train.loop(args, started(0, 3, manager, actor), progress)
    assert seen == [None, 1, 1, 2] and (progress.rollout_saved, progress.rollouts_done) == (2, 3)


class WritingActor:
    """Trains nothing; its writers are done when the rollout `done_at` of a save's has been trained."""

    def __init__(self, events, progress, done_at):
        self.events, self.progress, self.done_at = events, progress, done_at
        self.trained = self.begun = None
        self.lost = ()

    def train(self, rollout_id, rollout, report):
        self.trained = rollout_id

    def save(self, rollout_id):
        self.begun = rollout_id
        self.events.append(("begin", rollout_id))

    def save_has_ended(self, limit=None):
        return self.trained >= self.done_at[self.begun]

    def finish_save(self, limit=None):
        if self.begun in self.lost:
            raise RunError("a disk is full")
        self.events.append(("finish", self.trained))

    def publish(self, rollout_id):
        assert self.progress.rollout_saved == rollout_id
        self.events.append(("publish", rollout_id))


@pytest.fixture
def background():
    events, progress = [], RunProgress()
    actor = WritingActor(events, progress, {1: 2, 3: 9, 5: 9, 6: 9})
    manager = FakeManager()
    manager.save = lambda rollout_id: events.append(("data", rollout_id))
    args = make(has_engines=False, has_trainer=True, save_interval=2, async_save=True)
    run = functools.partial(train.loop, args, started(0, 7, manager, actor), progress)
    return SimpleNamespace(run=run, events=events, actor=actor, manager=manager, progress=progress)


def test_a_checkpoint_in_the_background_is_published_when_it_is_written_or_the_next_one_or_the_end_comes(background):
    background.run()
    assert background.events == [
        ("begin", 1), ("data", 1), ("finish", 2), ("publish", 1),
        ("begin", 3), ("data", 3), ("finish", 5), ("publish", 3),
        ("begin", 5), ("data", 5), ("finish", 6), ("publish", 5),
        ("begin", 6), ("data", 6), ("finish", 6), ("publish", 6),
    ]  # fmt: skip
    assert background.progress.rollout_saved == 6


def test_a_checkpoint_that_the_background_could_not_write_ends_the_run_and_the_one_before_stays_the_newest(background):
    background.actor.lost = (3,)
    with pytest.raises(RunError, match="a disk is full"):
        background.run()
    assert background.events[-1] == ("data", 3) and background.progress.rollout_saved == 1


@pytest.mark.parametrize("error", [RunError("an engine is lost"), KeyboardInterrupt()])
@pytest.mark.parametrize(("fails_at", "lost", "rescued"), [(4, (), 3), (2, (), None), (4, (3,), None)])
def test_an_error_leaves_the_checkpoint_that_was_written_until_then(background, caplog, error, fails_at, lost, rescued):
    actor, manager = background.actor, background.manager
    actor.done_at, actor.lost = {1: 9 if fails_at == 2 else 1, 3: 3}, lost
    generate = manager.generate

    def fail(rollout_id):
        if rollout_id == fails_at:
            raise error
        return generate(rollout_id)

    manager.generate = fail
    with pytest.raises(type(error)) as raised:
        background.run()
    assert raised.value is error
    published = [rollout_id for event, rollout_id in background.events if event == "publish"]
    assert published == [1] * (fails_at == 4) + [rescued] * (rescued is not None)
    assert ("was not wholly written, and is lost with the run" in caplog.text) == (rescued is None)


@pytest.mark.parametrize("begun", [1, 3, 6], ids=["when it is found written", "at the next save", "at the end"])
@pytest.mark.parametrize("at", ["finish_save", "publish"])
@pytest.mark.parametrize("ends", [True, False, RunError("no answer within 10 s")], ids=str)
def test_a_stop_while_a_checkpoint_is_finished_keeps_it_if_the_ranks_get_done(
    background, monkeypatch, caplog, begun, at, ends
):
    """The ranks go on with what they were asked: of a publication it is not known here whether it was."""
    actor, stopped, work = background.actor, [], getattr(background.actor, at)

    def stop(*arguments):
        if actor.begun == begun and not stopped:
            stopped.append(begun)
            monkeypatch.setattr(actor, "save_has_ended", has_ended)
            raise KeyboardInterrupt
        work(*arguments)

    def has_ended(limit):
        if isinstance(ends, RunError):
            raise ends
        return ends

    monkeypatch.setattr(actor, at, stop)
    with pytest.raises(KeyboardInterrupt):
        background.run()
    before_stop = {"finish_save": ("data", begun), "publish": ("finish", actor.trained)}[at]
    rescued = at == "finish_save" and ends is True
    assert background.events[-1] == (("publish", begun) if rescued else before_stop)
    is_lost = at == "finish_save" and ends is not True
    assert ("was not wholly written, and is lost with the run" in caplog.text) == is_lost
    names = [name for name, _ in background.events]
    assert names.count("finish") <= names.count("begin"), "what is written is not waited for twice"


def test_a_stop_in_the_first_rollout_knows_where_the_run_stands():
    progress = RunProgress()
    report = StepReport(make(), started(3), progress)
    with pytest.raises(KeyboardInterrupt), report.step(3):
        assert progress.rollouts_done == 3
        raise KeyboardInterrupt
    assert progress.rollouts_done == 3


class EventActor:
    """Trains nothing; notes what happens."""

    def __init__(self, events):
        self.train = lambda rollout_id, rollout, report: events.append(("train", rollout_id))
        self.save = lambda rollout_id: events.append(("save", rollout_id))
        self.publish = lambda rollout_id: None


class EventManager:
    """Generates nothing; notes what it is asked for, and what is awaited."""

    def __init__(self, events):
        self._events = events
        self.pushes_ahead = {}
        self.save = lambda rollout_id: events.append(("save data", rollout_id))

    def _call(self, name, rollout_id, result):
        self._events.append((name, rollout_id))
        return SimpleNamespace(result=lambda: self._events.append((f"{name} is there", rollout_id)) or result)

    def generate(self, rollout_id, pushes_ahead):
        self.pushes_ahead[rollout_id] = pushes_ahead
        return self._call("generate", rollout_id, RolloutResult(["shard"], []))

    def evaluate(self, rollout_id, before=False):
        return self._call("evaluate", rollout_id, [])

    @contextlib.contextmanager
    def between_rollouts(self):
        self._events.append(("pause", None))
        yield
        self._events.append(("go on", None))


@pytest.fixture
def run_ahead(monkeypatch):
    """The events of a run of the asynchronous loop; `run_ahead.manager` is what it asked."""

    def run(start, num_rollout, **values):
        events = []
        run.manager = EventManager(events)
        sync = SimpleNamespace(push=lambda: events.append(("push", None)) or {})
        monkeypatch.setattr("slime.ray.weight_sync.WeightSync", lambda args, actor, manager, devices: sync)
        defaults = {
            "async_buffer_size": 1, "update_weights_interval": 1, "has_trainer": True, "eval_interval": None,
            "save_interval": None, "update_weights_in_flight": False,
        }  # fmt: skip
        args = make(**{**defaults, **values})
        train_async.loop(args, started(start, num_rollout, run.manager, EventActor(events)), RunProgress())
        return events

    return run


def of(events, *names):
    return [event for event in events if event[0] in names]


def test_the_next_rollout_is_generated_while_this_one_is_trained(run_ahead):
    events = run_ahead(0, 3, save_interval=2)
    assert events == [
        ("push", None), ("generate", 0), ("generate", 1),
        ("generate is there", 0), ("train", 0), ("pause", None), ("push", None), ("go on", None), ("generate", 2),
        ("generate is there", 1), ("train", 1), ("save", 1), ("save data", 1), ("pause", None), ("push", None), ("go on", None),
        ("generate is there", 2), ("train", 2), ("save", 2), ("save data", 2), ("pause", None), ("push", None), ("go on", None),
    ]  # fmt: skip


@pytest.mark.parametrize("buffer, interval", [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (5, 3)])
@pytest.mark.parametrize("start", [0, 3])
def test_no_more_rollouts_are_ahead_than_the_buffer_holds_and_none_is_older_than_the_rule_says(
    run_ahead, buffer, interval, start
):
    events = run_ahead(start, 14, async_buffer_size=buffer, update_weights_interval=interval)
    asked_for, version, generated_with, oldest = set(), 0, {}, 0
    for name, rollout_id in of(events, "push", "generate", "train"):
        if name == "push":
            version += 1
        elif name == "generate":
            asked_for.add(rollout_id)
            generated_with[rollout_id] = version
        else:
            asked_for.remove(rollout_id)
            assert asked_for == set(range(rollout_id + 1, min(rollout_id + 1 + buffer, 14)))
            assert version == generated_with[rollout_id] + run_ahead.manager.pushes_ahead[rollout_id]
            oldest = max(oldest, version - generated_with[rollout_id])
    args = SimpleNamespace(async_buffer_size=buffer, update_weights_interval=interval, asynchronous=True)
    assert oldest == unavoidable_staleness(args)
    assert [rollout_id for name, rollout_id in events if name == "train"] == list(range(start, 14))


def test_weights_are_pushed_at_intervals_of_the_whole_run_and_at_its_end(run_ahead):
    args, length = SimpleNamespace(update_weights_interval=3), RunLength(8)
    assert [r for r in range(8) if push_is_due(args, length, r)] == [2, 5, 7]
    events = run_ahead(1, 5, update_weights_interval=2)
    assert of(events, "train", "push") == [
        ("push", None), ("train", 1), ("push", None), ("train", 2), ("train", 3), ("push", None), ("train", 4), ("push", None),
    ]  # fmt: skip


def test_an_evaluation_runs_beside_the_next_rollouts_and_sees_the_weights_that_were_pushed_last(run_ahead):
    events = run_ahead(0, 3, eval_interval=1, async_buffer_size=2)
    assert of(events, "evaluate", "push", "generate") == [
        ("push", None), ("generate", 0), ("generate", 1), ("generate", 2), ("evaluate", 0),
        ("push", None), ("evaluate", 0), ("push", None), ("evaluate", 1), ("push", None), ("evaluate", 2),
    ]  # fmt: skip


def test_an_evaluation_alone_generates_no_rollout(run_ahead):
    assert run_ahead(4, 0, eval_interval=1) == [("push", None), ("evaluate", 4), ("evaluate is there", 4)]


def test_weights_that_are_swapped_in_flight_wait_for_no_rollout(run_ahead):
    events = run_ahead(0, 2, update_weights_in_flight=True)
    assert of(events, "push", "train", "pause") == [
        ("push", None), ("train", 0), ("push", None), ("train", 1), ("push", None),
    ]  # fmt: skip


class Side:
    def __init__(self, name, told):
        self.name, self.told, self.fails = name, told, False

    def hold(self, holds):
        if self.fails:
            raise RunError(f"{self.name} failed")
        self.told.append((self.name, holds.name))


@pytest.fixture
def make_pool():
    def make(**flags):
        values = {
            "has_trainer": True, "has_engines": True, "colocate": True, "offload_train": True, "offload_rollout": True,
            "use_critic": False, "typed_flags": set(), "rollout_external": False, "release_train": False,
        }  # fmt: skip
        told = []
        ranks, engines = Side("ranks", told), Side("engines", told)
        devices = SharedDevices(SimpleNamespace(**{**values, **flags}), ranks, engines)
        return SimpleNamespace(devices=devices, ranks=ranks, engines=engines, told=told)

    return make


def test_ranks_and_engines_are_told_in_the_order_of_the_turns(make_pool):
    pool = make_pool()
    for turn in (Turn.PUSH, Turn.GENERATION, Turn.GENERATION, Turn.TRAINING):
        pool.devices.turn_to(turn)
    assert pool.told == [
        ("ranks", "WEIGHTS"), ("engines", "WEIGHTS"), ("ranks", "NOTHING"), ("engines", "ALL"),
        ("engines", "NOTHING"), ("ranks", "ALL"),
    ]  # fmt: skip
    with pytest.raises(IllegalTurn):
        pool.devices.turn_to(Turn.GENERATION)


@pytest.mark.parametrize("release_train", [False, True])
def test_o4_a_trainer_that_sleeps_while_engines_generate_is_awake_for_a_save(monkeypatch, release_train):
    """A checkpoint of every rollout, also of the last one."""
    events = []

    class Sync:
        def __init__(self, args, actor, manager, devices):
            self._devices = devices

        def push(self):
            self._devices.turn_to(Turn.PUSH)
            self._devices.turn_to(Turn.GENERATION)
            return {}

    monkeypatch.setattr("slime.ray.weight_sync.WeightSync", Sync)
    args = make(
        has_trainer=True, colocate=True, offload_train=not release_train, offload_rollout=True, save_interval=1,
        eval_interval=None, use_critic=False, typed_flags=set(), rollout_external=False, release_train=release_train,
    )  # fmt: skip
    actor, manager = EventActor(events), FakeManager()
    actor.hold = lambda holds: events.append(("hold", holds.name))
    manager.hold, manager.save = lambda holds: None, lambda rollout_id: None
    train.loop(args, started(0, 2, manager, actor), RunProgress())
    awake, asleep = ("hold", "ALL"), [("hold", "WEIGHTS"), ("hold", "NOTHING")]
    step = [[awake, ("train", rollout_id), ("save", rollout_id), *asleep] for rollout_id in range(2)]
    assert events == [*asleep, *step[0], *step[1]]


@pytest.mark.parametrize("colocate", [True, False])
def test_ranks_that_end_take_the_turns_of_ranks_that_sleep(make_pool, colocate):
    pool = make_pool(release_train=True, offload_train=False, offload_rollout=colocate, colocate=colocate)
    for turn in (Turn.PUSH, Turn.GENERATION, Turn.TRAINING, Turn.PUSH, Turn.PUSH, Turn.GENERATION):
        pool.devices.turn_to(turn)
    told = [holds for side, holds in pool.told if side == "ranks"]
    assert told == ["WEIGHTS", "NOTHING", "ALL", "WEIGHTS", "NOTHING"]
    engines = [holds for side, holds in pool.told if side == "engines"]
    assert engines == (["WEIGHTS", "ALL", "NOTHING", "WEIGHTS", "ALL"] if colocate else [])


def test_after_an_error_in_the_middle_the_next_turn_begins_where_it_was(make_pool):
    pool = make_pool()
    pool.engines.fails = True
    with pytest.raises(RunError, match="engines failed"):
        pool.devices.turn_to(Turn.PUSH)
    assert pool.told == [("ranks", "WEIGHTS")]
    pool.engines.fails = False
    pool.devices.turn_to(Turn.PUSH)
    assert pool.told[1:] == [("engines", "WEIGHTS")]


@pytest.mark.parametrize(
    ("flags", "sides"),
    [
        ({"offload_rollout": False}, {"ranks"}),
        ({"offload_train": False}, {"engines"}),
        ({"colocate": False}, {"ranks", "engines"}),
        ({"offload_train": False, "offload_rollout": False}, set()),
        ({"has_engines": False}, set()),
        ({"has_trainer": False}, set()),
        ({"rollout_external": True}, {"ranks"}),
        # A critic switches `offload_train` on, for turns of the two models that are not built.
        ({"use_critic": True, "colocate": False}, {"engines"}),
        ({"use_critic": True, "colocate": False, "typed_flags": {"offload_train"}}, {"ranks", "engines"}),
        ({"use_critic": True}, {"ranks", "engines"}),
    ],
)
def test_who_sleeps_by_the_flags(make_pool, flags, sides):
    pool = make_pool(**flags)
    for turn in (Turn.PUSH, Turn.GENERATION, Turn.TRAINING):
        pool.devices.turn_to(turn)
    assert {side for side, _ in pool.told} == sides


def test_a_start_knows_whether_there_was_one_before_it(monkeypatch):
    told, progress = [], RunProgress()
    monkeypatch.setattr("slime.ray.driver.forget_lost_steps", lambda *arguments, again: told.append(again))
    reports = [StepReport(make(), started(), progress) for _ in range(2)]
    assert told == [False, True] and len(reports) == 2


def test_a_number_is_told_to_trackers_and_ends_the_run(monkeypatch):
    told = []
    monkeypatch.setattr("slime.ray.driver.write_to_trackers", told.extend)
    monkeypatch.setattr("slime.ray.driver.forget_lost_steps", lambda *arguments, again: None)
    report = StepReport(make(ci_test=True), started(), RunProgress())
    with pytest.raises(RunError, match="rollout/entropy is 1.5"), report.step(0):
        report.add([({"rollout/entropy": 1.5, "rollout/step": 0}, "rollout/step")])
    assert told
