import weakref
from types import SimpleNamespace

import pytest

import train
from slime.ray.driver import (
    RolloutResult,
    RunLength,
    RunProgress,
    StartedRun,
    StepReport,
    evaluates,
    evaluates_before_training,
    saves,
)


def make(**values):
    defaults = {
        "has_engines": True, "eval_interval": 5, "skip_eval_before_train": False, "save_interval": 5,
        "loss_type": "policy_loss",
    }  # fmt: skip
    return SimpleNamespace(**{**defaults, **values})


def started(start=0, num_rollout=12, manager=None, actor=None):
    return StartedRun(manager, actor, RunLength(num_rollout), start)


def test_evaluation_is_periodic_and_at_the_end():
    assert [r for r in range(12) if evaluates(make(), RunLength(12), r)] == [4, 9, 11]
    assert [r for r in range(12) if saves(make(), RunLength(12), r)] == [4, 9, 11]
    assert [r for r in range(12) if saves(make(save_interval=100), RunLength(12, 3), r)] == [2, 5, 8, 11]


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
    report = StepReport(make(), started(3), RunProgress())
    with caplog.at_level("INFO"):
        report.evaluation([({"eval/math": 0.5, "eval/step": 3}, "eval/step")])
        with report.step(3):
            pass
        report.evaluation([({"eval/math": 0.75, "eval/step": 4}, "eval/step")])
    told = [record.getMessage().partition(" | ")[0] for record in caplog.records]
    assert told == [
        "evaluation before rollout 3: math 0.5000",
        "rollout 3 (4/12)",
        "evaluation after rollout 3: math 0.7500",
    ]


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
    assert seen == [None, 1, 1, 2] and progress.rollout_saved == 2


def test_a_stop_in_the_first_rollout_knows_where_the_run_stands():
    progress = RunProgress()
    report = StepReport(make(), started(3), progress)
    with pytest.raises(KeyboardInterrupt), report.step(3):
        assert progress.rollouts_done == 3
        raise KeyboardInterrupt
    assert progress.rollouts_done == 3
