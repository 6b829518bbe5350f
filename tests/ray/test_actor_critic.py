"""The order of the two models' work, with recorded calls in place of ranks."""

from types import SimpleNamespace

import pytest

from slime.arguments.checkpoints import WeightSource
from slime.ray.driver import RolloutResult
from slime.ray.placement_group import ActorCritic
from slime.ray.train_group import TrainGroup
from slime.scheduling.device_turns import Holds
from slime.utils.errors import RunError
from tests.support.models.args import parse

ANSWERS = {
    "values": ["values 0", None],
    "train_on_values": [(["logged by the actor"], "returns 0"), (["the same"], None)],
    "train": [["logged by the critic"], ["the same"]],
}


@pytest.fixture
def calls(monkeypatch):
    """(name of the rank, method, arguments) of every call."""
    recorded = []

    def call_all(group, method, *arguments, **limit):
        recorded.append((group.rank_name, method, *arguments))
        return ANSWERS.get(method, [None])

    monkeypatch.setattr(TrainGroup, "_call_all", call_all)
    monkeypatch.setattr(TrainGroup, "_call_first", call_all)
    return recorded


@pytest.fixture
def models(tmp_path):
    args = parse(tmp_path, "--advantage-estimator", "ppo", "--save", str(tmp_path / "run"))
    return ActorCritic(args, None, [(0, 0), (1, 1)])


def test_l8_the_critic_learns_the_returns_of_the_actor_after_it(models, calls):
    reported = []
    models.train(3, RolloutResult(["shard"], [], ["shard of the critic"]), reported.extend)
    assert calls == [
        ("critic rank", "values", 3, ["shard of the critic"]),
        ("training rank", "train_on_values", 3, ["shard"], ["values 0"]),
        ("critic rank", "train", 3, ["returns 0"]),
    ]
    assert reported == ["logged by the actor", "logged by the critic"]


@pytest.mark.parametrize(
    "failing, expected",
    [
        ("values", ["what the critic ranks logged before"]),
        ("train_on_values", ["what the training ranks logged before", "what the critic ranks logged before"]),
        ("train", ["logged by the actor", "what the critic ranks logged before"]),
    ],
)
def test_what_was_logged_before_a_failure_of_either_model_is_reported(models, monkeypatch, failing, expected):
    def call_all(group, method, *arguments):
        if method == failing:
            raise RunError("not finite")
        return ANSWERS[method]

    monkeypatch.setattr(TrainGroup, "_call_all", call_all)
    monkeypatch.setattr(
        TrainGroup, "_logged_before_error", lambda group: [f"what the {group.rank_name}s logged before"]
    )
    reported = []
    with pytest.raises(RunError, match="^not finite$"):
        models.train(3, RolloutResult(["shard"], [], ["shard of the critic"]), reported.extend)
    assert reported == expected


def test_the_actors_pointer_moves_last_and_nothing_goes_before_it_does(models, calls):
    models.save(3)
    models.finish_save()
    models.publish(3)
    assert calls == [
        ("critic rank", "save", 3),
        ("training rank", "save", 3),
        ("critic rank", "finish_save"),
        ("training rank", "finish_save"),
        ("critic rank", "publish", 3),
        ("training rank", "publish", 3),
        ("critic rank", "forget", 3),
    ]


@pytest.mark.parametrize("critic", [[True, True], [True, False]])
@pytest.mark.parametrize("actor", [[True, True], [False, True]])
def test_a_save_has_ended_when_no_rank_of_either_model_writes(models, monkeypatch, critic, actor):
    answers = {"critic rank": critic, "training rank": actor}
    monkeypatch.setattr(TrainGroup, "_call_all", lambda group, method, limit: answers[group.rank_name])
    assert models.save_has_ended() is (all(critic) and all(actor))


@pytest.mark.parametrize("resumes, of_critic, accepted", [(True, 4, True), (True, 5, False), (False, 0, True)])
def test_both_continue_with_the_same_rollout(models, monkeypatch, resumes, of_critic, accepted):
    first = {"training rank": 4, "critic rank": of_critic}
    monkeypatch.setattr(TrainGroup, "wait_ready", lambda group: first[group.rank_name])
    models._critic._args.initial_weights = WeightSource("megatron", "/critic", resume=resumes)
    if accepted:
        assert models.wait_ready() == 4
    else:
        with pytest.raises(RunError, match="continues with rollout 4, the critic's with rollout 5"):
            models.wait_ready()


def test_ranks_that_are_waited_for_have_names(models):
    models._starting, models._critic._starting = ["a", "b"], ["c", "d"]
    assert models.starting == ["a", "b", "c", "d"]
    assert models.name_starting([1, 2, 3]) == "training rank 1, critic rank 0, 1"
    assert models.name_starting([3]) == "critic rank 1"


def test_the_end_of_one_is_the_end_of_both(models, monkeypatch):
    killed = []
    monkeypatch.setattr(
        "slime.ray.train_group.ray", SimpleNamespace(kill=lambda actor, no_restart: killed.append(actor))
    )
    models._actors, models._critic._actors = ["actor"], ["critic"]
    models.kill()
    assert sorted(killed) == ["actor", "critic"] and models.starting == []


def test_both_models_sleep_and_wake_and_only_the_actor_has_weights_to_push(models, calls):
    for holds in Holds:
        models.hold(holds)
    assert calls == [
        ("critic rank", "hold", Holds.NOTHING), ("training rank", "hold", Holds.NOTHING),
        ("critic rank", "hold", Holds.NOTHING), ("training rank", "hold", Holds.WEIGHTS),
        ("critic rank", "hold", Holds.ALL), ("training rank", "hold", Holds.ALL),
    ]  # fmt: skip


@pytest.mark.parametrize("with_critic", [False, True])
def test_a_rollout_counts_as_trained_from_its_beginning_on(models, calls, monkeypatch, with_critic):
    """By this number it is seen that weights have changed: engines that come later must not get them as the last version."""
    group = models if with_critic else TrainGroup(models._args, None, [(0, 0)])
    monkeypatch.setattr("slime.ray.train_group.logged_pairs", lambda logged, *who: logged)
    for trained in (1, 2):
        group.train(trained, RolloutResult(["shard"], [], ["shard of the critic"]), lambda logged: None)
        assert group.rollouts_trained == trained

    def fail(group, method, *arguments):
        raise RunError("in the middle")

    monkeypatch.setattr(TrainGroup, "_call_all", fail)
    monkeypatch.setattr(TrainGroup, "_logged_before_error", lambda group: [])
    with pytest.raises(RunError, match="in the middle"):
        group.train(3, RolloutResult(["shard"], [], ["shard of the critic"]), lambda logged: None)
    assert group.rollouts_trained == 3
