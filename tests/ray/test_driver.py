import weakref
from types import SimpleNamespace

import pytest

import train
from slime.ray.driver import StepReport, evaluates, evaluates_before_training, saves
from slime.ray.rollout_manager import RolloutResult


def make(**values):
    defaults = {
        "has_engines": True, "eval_interval": 5, "num_rollout": 12, "start_rollout_id": 0, "rollouts_per_epoch": None,
        "skip_eval_before_train": False, "save_interval": 5,
    }  # fmt: skip
    return SimpleNamespace(**{**defaults, **values})


def test_evaluation_is_periodic_and_at_the_end():
    assert [r for r in range(12) if evaluates(make(), r)] == [4, 9, 11]
    assert [r for r in range(12) if saves(make(), r)] == [4, 9, 11]
    assert [r for r in range(12) if saves(make(rollouts_per_epoch=3, save_interval=100), r)] == [2, 5, 8, 11]


@pytest.mark.parametrize(
    "values, expected",
    [
        ({}, True),
        ({"skip_eval_before_train": True}, False),
        ({"start_rollout_id": 5}, False),
        ({"eval_interval": None}, False),
        ({"has_engines": False}, False),
        # An evaluation of a checkpoint, wherever its training stood.
        ({"num_rollout": 0, "start_rollout_id": 30, "skip_eval_before_train": True}, True),
    ],
)
def test_evaluation_before_training(values, expected):
    assert evaluates_before_training(make(**values)) is expected


class FakeManager:
    """Generates nothing, and looks whether the rollout before is still held."""

    serving = None

    def __init__(self):
        self.results, self.held = [], []

    def generate(self, rollout_id):
        self.held.append([result() is not None for result in self.results])
        result = RolloutResult(["shard"], [], ["shard of the critic"])
        self.results.append(weakref.ref(result))
        return result


@pytest.mark.parametrize("with_trainer", [True, False])
def test_the_driver_lets_a_batch_go_before_it_asks_for_the_next(with_trainer):
    args = make(
        num_rollout=3,
        has_engines=False,
        has_trainer=True,
        save_interval=None,
        loss_type="policy_loss",
        start_rollout_id=0,
    )
    trained = []
    actor = SimpleNamespace(train=lambda rollout_id, rollout, report: trained.append(rollout.critic_shards))
    manager = FakeManager()
    train.run(args, manager, actor if with_trainer else None)
    assert manager.held == [[], [False], [False, False]]
    assert trained == [["shard of the critic"]] * 3 * with_trainer


def test_a_finished_run_says_so(caplog):
    with caplog.at_level("INFO"):
        evaluates_before_training(make(start_rollout_id=12))
    assert "nothing left to do: 12 of 12 rollouts are done" in caplog.text


def test_an_evaluation_is_told_by_the_rollout_that_it_precedes_or_follows(caplog):
    report = StepReport(make(start_rollout_id=3, loss_type="policy_loss"))
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
    args = make(num_rollout=3, has_engines=False, has_trainer=True, save_interval=2, loss_type="policy_loss")
    seen = []
    actor = SimpleNamespace(
        train=lambda rollout_id, rollout, report: None,
        save=lambda rollout_id: seen.append(args.rollout_saved),
        # Whatever ends the run from here on may find the checkpoint of this rollout to be the newest.
        publish=lambda rollout_id: seen.append(args.rollout_saved),
    )
    manager = FakeManager()
    manager.save = lambda rollout_id: None
    train.run(args, manager, actor)
    assert seen == [None, 1, 1, 2] and args.rollout_saved == 2


def test_a_stop_in_the_first_rollout_knows_where_the_run_stands():
    args = make(start_rollout_id=3, loss_type="policy_loss")
    report = StepReport(args)
    with pytest.raises(KeyboardInterrupt), report.step(3):
        assert args.rollouts_done == 3
        raise KeyboardInterrupt
    assert args.rollouts_done == 3
