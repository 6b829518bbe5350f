"""The age of samples, and how many groups may wait for it, by hand."""

from types import SimpleNamespace

import pytest

from slime.rollout.fully_async_rollout import AsyncRolloutWorker
from slime.rollout.staleness import hold_to_bound, is_too_old, oldest_version
from slime.utils.errors import UserError
from slime.utils.types import Sample
from tests.support.models.rollout_args import make_args


def sample(*versions: str, index: int = 0, spans: tuple = ()) -> Sample:
    return Sample(
        index=index, tokens=[1, 2], response_length=1, weight_versions=list(versions), weight_version_spans=list(spans)
    )


def bound(limit: int | None) -> SimpleNamespace:
    return SimpleNamespace(max_weight_staleness=limit)


def test_the_oldest_token_counts_of_all_leaves():
    assert oldest_version(sample("7")) == 7
    # A request that weights were swapped under ends with the new version; its spans know the old one.
    assert oldest_version(sample("10", spans=(("9", 0, 3), ("10", 3, 5)))) == 9
    assert oldest_version([sample("12"), [sample("11"), sample("10")]]) == 10
    assert oldest_version(sample()) is None
    assert oldest_version(sample("default", "8")) == 8


@pytest.mark.parametrize(
    ("limit", "version", "trained_as", "too_old"),
    [
        (0, "5", 5, False), (0, "4", 5, True), (2, "3", 5, False), (2, "2", 5, True),
        (None, "1", 99, False), (0, "1", None, False),
        # Of a run whose versions were counted otherwise.
        (2, "6", 5, True),
    ],
)  # fmt: skip
def test_the_bound(limit, version, trained_as, too_old):
    assert is_too_old(bound(limit), [sample(), sample(version)], trained_as) is too_old
    assert is_too_old(bound(0), [sample()], 5) is False, "prompts have no age"


@pytest.mark.parametrize(("limit", "buffer"), [(3, 1), (4, 3)])
def test_no_more_groups_are_begun_than_can_still_be_trained(fresh_singletons, checkpoint, limit, buffer):
    """A push follows every second rollout. The rollouts in front may be one push old, or two with the larger buffer, so two
    pushes are left for waiting: behind up to four rollouts. With its own that are five, of two groups each."""
    bounds = {"max_weight_staleness": limit, "async_buffer_size": buffer, "update_weights_interval": 2}
    worker = AsyncRolloutWorker(make_args(checkpoint, sglang_server_concurrency=64, **bounds), None)
    assert worker._room() == 10
    worker.in_flight, worker._taken = dict.fromkeys(range(3)), 2
    worker.queue.append(([], []))
    assert worker._room() == 10 - 3 - 2 - 1


def test_samples_over_the_bound_train_nothing_and_the_others_are_measured():
    samples = [sample("5", index=0), sample("4", index=1), sample("2", index=2)]
    metrics = hold_to_bound(bound(1), samples, 5)
    assert [s.remove_sample for s in samples] == [False, False, True]
    assert metrics == {"rollout/staleness/mean": 0.5, "rollout/staleness/max": 1.0, "rollout/stale_samples": 1}
    metrics = hold_to_bound(bound(1), samples[:2], 5)
    assert metrics == {"rollout/staleness/mean": 0.5, "rollout/staleness/max": 1.0, "rollout/stale_samples": 0}


def test_without_a_bound_all_are_measured_and_kept():
    samples = [sample("5"), sample("2"), sample()]
    assert hold_to_bound(bound(None), samples, 5) == {"rollout/staleness/mean": 1.5, "rollout/staleness/max": 3.0}
    assert not any(s.remove_sample for s in samples)
    assert hold_to_bound(bound(None), [sample()], 5) == {}
    assert hold_to_bound(bound(0), samples, None) == {}


def test_a_sample_that_does_not_say_which_weights_made_it_is_refused_where_that_matters():
    with pytest.raises(UserError, match="sample 3 does not say which weights made it"):
        hold_to_bound(bound(1), [sample("5"), sample(index=3)], 5)
    hold_to_bound(bound(1), [Sample(index=3)], 5)


def test_samples_of_weights_that_no_push_gave_are_told_of_once(caplog):
    """As an engine of others makes them that was started again behind a tunnel."""
    partly, wholly, filtered = sample("default", "4", index=1), sample("default", index=2), sample("default", index=3)
    filtered.remove_sample = True
    hold_to_bound(bound(None), [sample("5"), partly, wholly, filtered], 5)
    hold_to_bound(bound(3), [sample("5"), partly], 5)
    assert [words.partition(",")[0] for words in caplog.messages] == [
        "2 of 3 samples (the first: 1) train tokens of weights of version default",
        "1 of 2 samples (the first: 1) train tokens of weights of version default",
    ]
    caplog.clear()
    hold_to_bound(bound(3), [sample("5", spans=(("4", 0, 1),)), filtered], 5)
    hold_to_bound(bound(None), [sample()], 5)
    hold_to_bound(bound(None), [wholly], None)
    assert caplog.messages == []


def test_samples_that_train_nothing_already_are_neither_refused_nor_counted():
    failed, filtered = sample(index=3), sample("1", index=4)
    failed.status = Sample.Status.FAILED
    failed.remove_sample = filtered.remove_sample = True
    metrics = hold_to_bound(bound(1), [sample("5"), failed, filtered, sample("2")], 5)
    assert metrics == {"rollout/staleness/mean": 0, "rollout/staleness/max": 0, "rollout/stale_samples": 1}
    assert failed.remove_sample and filtered.remove_sample
