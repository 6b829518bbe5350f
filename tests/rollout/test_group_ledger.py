"""What became of groups, as a step and the worker that never stops count it."""

import asyncio

import pytest

from slime.rollout.group_ledger import MAX_INTERRUPTIONS_OF_A_GROUP, GroupLedger
from slime.utils.errors import RunError
from slime.utils.types import Sample
from tests.support.models.rollout_args import make_args
from tests.support.models.rollout_steps import plugin

Status = Sample.Status


def group(number, *statuses):
    """A group whose finished samples have rewards, and whose failed ones are masked."""
    samples = [
        Sample(group_index=number, index=2 * number + place, prompt=str(number)) for place in range(len(statuses))
    ]
    for sample, status in zip(samples, statuses, strict=True):
        sample.status, sample.reward, sample.remove_sample = status, 1.0, status is Status.FAILED
    return samples


def test_interruptions_are_counted_until_the_group_has_ended_and_over_pages():
    ledger = GroupLedger(make_args(""))
    origin, other = group(3, Status.PENDING), group(4, Status.PENDING)
    for _ in range(MAX_INTERRUPTIONS_OF_A_GROUP):
        ledger.interrupted(origin)
    ledger.finished(other, other)
    ledger.begin_page()
    with pytest.raises(RunError, match=f"group 3 was aborted {MAX_INTERRUPTIONS_OF_A_GROUP + 1} times"):
        ledger.interrupted(origin)
    ledger.finished(origin, origin)
    ledger.interrupted(origin)
    assert ledger.counts["finished"] == 1


@pytest.mark.parametrize("partial", [False, True])
def test_what_goes_back_of_an_interrupted_group(partial):
    ledger = GroupLedger(make_args("", partial_rollout=partial))
    origin, half = group(0, *[Status.PENDING] * 3), group(0, Status.ABORTED, Status.COMPLETED, Status.ABORTED)
    half[0].tokens, half[0].response, half[0].response_length = [1, 2], "x", 1
    left = ledger.unfinished(origin, half, 7)
    assert ledger.counts == {"aborted_samples": 2}
    expected = [Status.ABORTED, Status.COMPLETED, Status.PENDING] if partial else [Status.PENDING] * 3
    assert [sample.status for sample in left] == expected
    assert left[0].metadata.get("start_rollout_id") == (7 if partial else None)
    ledger.begin_page()
    assert not ledger.counts


@pytest.mark.parametrize(("obtainable", "dropped"), [(2, False), (3, True)])
def test_the_filter_is_told_what_can_still_be_had_when_its_verdict_is_there(tmp_path, obtainable, dropped):
    path = plugin(
        tmp_path,
        "from slime.rollout.filter_hub.base_types import DynamicFilterOutput\n"
        "def fn(args, samples, **kwargs):\n"
        "    args.asked = True\n"
        "    return DynamicFilterOutput(keep=False, reason='dull', keep_when_insufficient=True)\n",
    )
    args = make_args("", dynamic_sampling_filter_path=path)
    ledger = GroupLedger(args)
    found = asyncio.run(ledger.drops_group(group(0, Status.COMPLETED), lambda: obtainable if args.asked else 99))
    assert found is dropped and ledger.counts["dropped"] == dropped
    assert ledger.drops.collect() == ({"rollout/dynamic_filter/drop_dull": 1} if dropped else {})


def test_without_a_filter_every_group_is_kept():
    ledger = GroupLedger(make_args(""))
    assert asyncio.run(ledger.drops_group(group(0, Status.FAILED), lambda: 0)) is False and not ledger.counts


def test_a_service_seems_dead_when_most_samples_of_a_whole_rollout_failed():
    ledger = GroupLedger(make_args(""), "the groups of a test")
    failed, whole = group(0, *[Status.FAILED] * 2), group(1, *[Status.COMPLETED] * 2)
    ledger.finished(failed, failed)
    ledger.stop_if_a_service_seems_dead()
    ledger.finished(whole, whole)
    ledger.stop_if_a_service_seems_dead()
    ledger.finished(failed, failed)
    with pytest.raises(RunError, match="4 of 6 samples of the groups of a test failed"):
        ledger.stop_if_a_service_seems_dead()
