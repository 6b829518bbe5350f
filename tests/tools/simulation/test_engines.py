"""The clock of an engine: times of a few requests worked out by hand."""

import pytest

from tools.simulation.engines import EngineSpeed, Fleet, Group

SPEED = EngineSpeed(step_seconds=1.0, request_seconds=0.1)


def fleet_with(lengths: list[list[int]], engines: int = 1, speed: EngineSpeed = SPEED, prompt: int = 0):
    """A fleet that was given groups of answers of these lengths, the groups, and the list of those that are finished."""
    fleet, finished = Fleet(speed, engines), []
    groups = [Group.of(prompt, of_group) for of_group in lengths]
    for group in groups:
        group.finished = finished
    fleet.submit(groups)
    return fleet, groups, finished


def test_a_step_takes_longer_for_every_request_that_runs():
    fleet, groups, _ = fleet_with([[2], [5]])
    fleet.run()
    # Two steps for both at 1.2 s, three for the longer one at 1.1 s.
    assert groups[0].ended == pytest.approx(2.4)
    assert groups[1].ended == pytest.approx(2.4 + 3.3)


def test_requests_are_dealt_to_the_engines_evenly():
    fleet, groups, _ = fleet_with([[3, 3, 3, 3]], engines=2)
    fleet.run()
    assert groups[0].ended == pytest.approx(3 * 1.2)


def test_what_has_no_room_waits_and_starts_when_one_ends():
    fleet, groups, _ = fleet_with([[2], [5], [4]], speed=EngineSpeed(1.0, 0.1, max_running=2))
    fleet.run()
    # The third starts after two steps; the second ends three steps later, and the third goes on alone for one.
    assert [group.ended for group in groups] == pytest.approx([2.4, 6.0, 7.1])


def test_prompts_are_read_before_the_next_step():
    fleet, groups, _ = fleet_with([[2], [2]], speed=EngineSpeed(1.0, 0.0, prefill_token_seconds=0.01), prompt=50)
    fleet.run()
    assert groups[1].ended == pytest.approx(2 * 50 * 0.01 + 2.0)


def test_a_request_that_comes_later_slows_those_that_run():
    fleet, groups, _ = fleet_with([[4]])
    fleet.run(until=2.2)
    late = Group.of(0, [1])
    fleet.submit([late])
    fleet.run()
    assert late.ended == pytest.approx(2.2 + 1.2)
    assert groups[0].ended == pytest.approx(2.2 + 1.2 + 1.1)


def test_time_passes_where_nothing_runs():
    fleet = Fleet(SPEED, 2)
    fleet.run(until=7.0)
    assert fleet.now == 7.0 and fleet.seconds().busy == 0.0


def test_a_run_ends_with_the_group_that_is_enough():
    fleet, _, finished = fleet_with([[2], [5], [9]])
    assert fleet.run(enough=lambda: len(finished) >= 2)
    # Three, two, one request: 2 steps of 1.3 s, 3 of 1.2 s.
    assert fleet.now == pytest.approx(2.6 + 3.6)
    assert [group.requests[0].tokens for group in finished] == [2, 5]


def test_a_group_is_finished_with_its_longest_answer():
    fleet, groups, finished = fleet_with([[1, 8], [4, 4]])
    fleet.run()
    assert finished == [groups[1], groups[0]]


def test_an_abort_keeps_whole_tokens_and_a_resume_writes_the_rest():
    fleet, groups, _ = fleet_with([[10]])
    fleet.run(until=4.0)
    fleet.abort()
    assert groups[0].written == 3  # of 4.0 / 1.1 = 3.6 steps
    fleet.version = 5
    fleet.submit(groups)
    fleet.run()
    assert fleet.now == pytest.approx(4.0 + 7 * 1.1)
    assert groups[0].written == 10
    assert groups[0].version == 0, "the oldest weights that wrote a token of it"


def test_an_abort_counts_prompts_only_as_far_as_they_were_read():
    fleet, groups, _ = fleet_with([[4]], speed=EngineSpeed(1.0, 0.0, prefill_token_seconds=0.1), prompt=50)
    fleet.run(until=1.5)
    assert (fleet.seconds().busy, fleet.seconds().read) == pytest.approx((1.5, 1.5))
    fleet.run(until=2.0)
    fleet.abort()
    assert (fleet.seconds().busy, fleet.seconds().read) == pytest.approx((2.0, 2.0))
    assert groups[0].written == 0


def test_answers_that_are_finished_are_not_written_again():
    fleet, groups, _ = fleet_with([[1, 6]])
    fleet.run(until=2.0)
    fleet.abort()
    assert [request.is_finished for request in groups[0].requests] == [True, False]
    fleet.submit(groups)
    assert fleet.running == 1


def test_a_group_that_starts_again_forgets_all():
    fleet, groups, _ = fleet_with([[1, 6]])
    fleet.run(until=2.0)
    fleet.abort()
    assert groups[0].start_again() == 2, "one token of each"
    fleet.submit(groups)
    fleet.run()
    assert groups[0].written == 7


def test_a_pause_halts_all_and_has_contexts_read_again():
    fleet, groups, _ = fleet_with([[4], [6]], speed=EngineSpeed(1.0, 0.0, prefill_token_seconds=0.5))
    fleet.run(until=2.0)
    fleet.pause(10.0)
    fleet.run()
    # Two tokens each were there: 2 · 2 · 0.5 s to read them again.
    assert [group.ended for group in groups] == pytest.approx([4 + 10 + 2, 6 + 10 + 2])
    seconds = fleet.seconds()
    assert seconds.paused == 10.0 and seconds.recomputed == pytest.approx(2.0)
    assert seconds.busy == pytest.approx(6 + 2)


def test_seconds_add_up():
    fleet, _, _ = fleet_with([[2], [5], [9]], engines=2)
    fleet.run(until=4.0)
    first = fleet.seconds()
    fleet.run(until=50.0)
    seconds = fleet.seconds()
    assert first.active == pytest.approx(8.0)
    # The first engine writes 2 and 9 tokens, the second one 5.
    assert seconds.busy == pytest.approx(2 * 1.2 + 7 * 1.1 + 5 * 1.1)
    assert seconds.active == pytest.approx(2 * (2 * 1.2 + 7 * 1.1)), "as long as one request runs anywhere"
    assert seconds.tokens == pytest.approx(16)
    assert (seconds - first).active == pytest.approx(seconds.active - 8.0)
