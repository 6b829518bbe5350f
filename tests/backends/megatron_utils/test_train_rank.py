"""What a rank reports about its optimizer steps, without a model."""

from types import SimpleNamespace

import pytest

from slime.backends.megatron_utils import train_step
from slime.backends.megatron_utils.train_rank import MegatronRank
from slime.observability.logging_utils import drain_outbox


def make_rank() -> MegatronRank:
    rank = MegatronRank.__new__(MegatronRank)
    rank.args = SimpleNamespace(num_steps_per_rollout=2, reset_optimizer_states=False)
    rank.rank, rank.model, rank.optimizer, rank.scheduler = 0, [], None, None
    drain_outbox()
    return rank


@pytest.mark.parametrize("failing, expected", [(0, {}), (1, {6: 0.0}), (2, {6: 0.0, 7: 1.0}), (3, {6: 0.0, 7: 1.5})])
def test_a_step_that_fails_leaves_the_metrics_of_those_before_it(monkeypatch, failing, expected):
    def step(*arguments, **options):
        if arguments[6] == failing:
            raise RuntimeError("not finite")
        return {"loss": float(arguments[6])}

    monkeypatch.setattr(train_step, "train_one_step", step)
    with pytest.raises(RuntimeError, match="not finite"):
        make_rank()._train_steps(3, {"num_microbatches": [1] * 4})
    assert {metrics["train/step"]: metrics["train/loss"] for metrics, _ in drain_outbox()} == expected


@pytest.mark.parametrize(
    "came, expected",
    [
        (1, {6: 0.0}),
        (2, {6: 0.0, 7: 1.0}),
        # Rollout 4 begins at 8: the steps that were not announced share the last number before it.
        (4, {6: 0.0, 7: 2.0}),
    ],
)
def test_the_steps_of_a_rollout_stay_before_those_of_the_next(monkeypatch, caplog, came, expected):
    monkeypatch.setattr(train_step, "train_one_step", lambda *arguments, **options: {"loss": float(arguments[6])})
    make_rank()._train_steps(3, {"num_microbatches": [1] * came})
    logged = drain_outbox()
    assert {metrics["train/step"]: metrics["train/loss"] for metrics, _ in logged} == expected
    assert len(logged) == len(expected)
    assert ("brings 4 optimizer steps instead of 2" in caplog.text) == (came == 4)
