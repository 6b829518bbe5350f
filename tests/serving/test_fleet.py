"""What may happen to an engine and what it is then: the whole table, without processes."""

import contextlib
import itertools
import random

import pytest

from slime.serving.fleet import (
    _ANSWER_SECONDS,
    EngineName,
    EngineState,
    Fleet,
    HealthChecks,
    IllegalTransition,
    why_no_router_follows,
)

FIRST, SECOND = EngineName(0), EngineName(0, 1)
EVENTS = {
    "ready": lambda fleet: fleet.ready(FIRST),
    "weights_change": lambda fleet: fleet.weights_change(FIRST),
    "weights_whole": lambda fleet: fleet.weights_whole(FIRST, 1),
    "sleep": lambda fleet: fleet.sleep(FIRST),
    "wake": lambda fleet: fleet.wake(FIRST),
    "doubt": lambda fleet: fleet.doubt(FIRST, "no answer"),
    "answer": lambda fleet: fleet.answer(FIRST),
    "die": lambda fleet: fleet.die(FIRST, "exit code 1", 0.0),
    "replace": lambda fleet: fleet.replace(0),
    "give_up": lambda fleet: fleet.give_up(0) is None,
}
# How a new engine comes into each state.
WAYS = {
    EngineState.STARTING: [],
    EngineState.STALE: ["ready"],
    EngineState.SERVING: ["ready", "weights_whole"],
    EngineState.ASLEEP: ["ready", "sleep"],
    EngineState.SUSPECT: ["ready", "weights_whole", "doubt"],
    EngineState.DEAD: ["die"],
    EngineState.GIVEN_UP: ["die", "give_up"],
}
FOLLOWS = {
    ("starting", "ready"): "stale",
    ("stale", "weights_change"): "stale",
    ("serving", "weights_change"): "stale",
    ("suspect", "weights_change"): "stale",
    ("stale", "weights_whole"): "serving",
    ("stale", "sleep"): "asleep",
    ("serving", "sleep"): "asleep",
    ("suspect", "sleep"): "asleep",
    ("asleep", "wake"): "stale",
    ("serving", "doubt"): "suspect",
    ("suspect", "doubt"): "suspect",
    ("serving", "answer"): "serving",
    ("suspect", "answer"): "serving",
    ("starting", "die"): "dead",
    ("stale", "die"): "dead",
    ("serving", "die"): "dead",
    ("asleep", "die"): "dead",
    ("suspect", "die"): "dead",
    ("dead", "replace"): "starting",
    ("dead", "give_up"): "given up",
}
START_LIMIT = 60.0


def fleet_of(*engine_ids: int) -> Fleet:
    return Fleet(dict.fromkeys(engine_ids, ("default", "regular")), START_LIMIT)


def fleet_in(state: EngineState) -> Fleet:
    fleet = fleet_of(0)
    for event in WAYS[state]:
        EVENTS[event](fleet)
    assert fleet.record(0).state is state
    return fleet


@pytest.mark.parametrize(("state", "event"), list(itertools.product(EngineState, EVENTS)))
def test_every_event_in_every_state(state, event):
    fleet = fleet_in(state)
    expected = FOLLOWS.get((state.value, event))
    if expected is not None:
        assert EVENTS[event](fleet)
        assert fleet.record(0).state.value == expected
    elif state in (EngineState.DEAD, EngineState.GIVEN_UP) and event == "die":
        before = fleet.record(0)
        assert EVENTS[event](fleet) is False, "the second witness of a death tells nothing new"
        assert fleet.record(0) == before
    else:
        with pytest.raises(IllegalTransition, match=f"^{event} of engine 0 .* which is {state.value} "):
            EVENTS[event](fleet)
        assert fleet.record(0).state is state


def test_a_push_decides_which_version_an_engine_holds_and_which_is_current():
    fleet = fleet_of(0, 1)
    for name in (EngineName(0), EngineName(1)):
        fleet.ready(name)
        assert fleet.record(name.engine_id).weight_version is None
        fleet.weights_whole(name, 4)
    assert fleet.version == 4
    fleet.weights_change(EngineName(0))
    assert (fleet.record(0).weight_version, fleet.version) == (None, 4), "half a push is no version"
    fleet.weights_whole(EngineName(0), 5)
    assert [record.weight_version for record in fleet.records()] == [5, 4] and fleet.version == 5
    fleet.weights_change(EngineName(1))
    with pytest.raises(IllegalTransition, match="version 4, but 5 is pushed already"):
        fleet.weights_whole(EngineName(1), 4)


def test_weights_of_no_push_leave_the_version_alone():
    fleet = fleet_in(EngineState.STALE)
    fleet.weights_whole(FIRST, None)
    assert fleet.record(0).state is EngineState.SERVING and fleet.version is None


@pytest.mark.parametrize("event", ["sleep", "die"])
def test_an_engine_that_loses_its_memory_loses_its_version(event):
    fleet = fleet_in(EngineState.SERVING)
    EVENTS[event](fleet)
    assert fleet.record(0).weight_version is None and fleet.version == 1


@pytest.mark.parametrize("event", sorted(set(EVENTS) - {"replace", "give_up"}))
def test_news_of_an_earlier_life_is_late_and_changes_nothing(event):
    fleet = fleet_in(EngineState.SERVING)
    fleet.die(FIRST, "exit code 1", 0.0)
    assert fleet.replace(0) == SECOND
    for life in ([], [fleet.ready], [lambda name: fleet.weights_whole(name, 1)]):
        for step in life:
            step(SECOND)
        before = fleet.record(0)
        assert EVENTS[event](fleet) is False and fleet.weights_whole(FIRST, 7) is False
        assert fleet.record(0) == before and fleet.version == 1, "nor is a version current that none has whole"
    assert fleet.is_current(SECOND) and not fleet.is_current(FIRST)


def test_news_of_a_life_to_come_is_wrong():
    with pytest.raises(IllegalTransition):
        fleet_of(0).ready(SECOND)


def test_why_an_engine_is_doubted_or_dead_is_kept_until_it_is_something_else():
    fleet = fleet_in(EngineState.SUSPECT)
    assert fleet.record(0).cause == "no answer"
    fleet.answer(FIRST)
    assert fleet.record(0).cause == ""
    fleet.die(FIRST, "exit code 1", 0.0)
    fleet.die(FIRST, "its connections are lost", 1.0)
    assert fleet.record(0).cause == "exit code 1", "the first cause is the cause"
    fleet.replace(0)
    assert fleet.record(0).cause == ""


def test_what_a_part_has_is_what_the_records_say_whatever_happened_before():
    """One draws by lot what happens next: many get to any state, in any order."""
    part_of = {number: ("actor" if number < 4 else "judge", ("prefill", "decode")[number % 2]) for number in range(6)}
    fleet, lots, seen = Fleet(part_of, START_LIMIT), random.Random(0), set()
    assert fleet.parts == (("actor", "prefill"), ("actor", "decode"), ("judge", "prefill"), ("judge", "decode"))
    for _ in range(20_000):
        name = fleet.record(lots.randrange(6)).name
        event = lots.choice(
            ["ready", "weights_change", "weights_whole", "sleep", "wake", "doubt", "answer", "die", "replace"]
        )
        arguments = {"weights_whole": (None,), "doubt": ("no answer",), "die": ("exit code 1", 0.0)}.get(event, ())
        with contextlib.suppress(IllegalTransition):
            getattr(fleet, event)(name.engine_id if event == "replace" else name, *arguments)
        found = {(part_of[record.name.engine_id], record.state) for record in fleet.records()}
        assert found == {(part, state) for part in fleet.parts for state in EngineState if fleet.has(part, state)}
        seen |= found
    assert len(seen) == len(fleet.parts) * (len(EngineState) - 1), "none is given up here"
    for engine_id in (0, 2):
        fleet.die(fleet.record(engine_id).name, "exit code 1", 0.0)
        assert fleet.has(("actor", "prefill"), *(set(EngineState) - {EngineState.GIVEN_UP}))
        fleet.give_up(engine_id)
    assert not fleet.has(("actor", "prefill"), *(set(EngineState) - {EngineState.GIVEN_UP}))


def test_engines_are_told_apart_and_listed_by_id():
    fleet = fleet_of(2, 0, 1)
    fleet.ready(EngineName(1))
    assert [record.name.engine_id for record in fleet.records()] == [0, 1, 2]
    assert [record.name for record in fleet.records(EngineState.STALE)] == [EngineName(1)]
    with pytest.raises(KeyError):
        fleet.ready(EngineName(3))


# -- when an engine is given up -----------------------------------------------------------------------------------------


def lives(fleet: Fleet, deaths: list[float]) -> list[str]:
    """Engine 0 dies at these times, and in between its next server answers; what is said of it each time."""
    said = []
    for died in deaths:
        name = fleet.record(0).name
        fleet.ready(name)
        fleet.die(name, "exit code 1", died)
        said.append(fleet.why_give_up(0))
        fleet.replace(0)
    return said


def test_an_engine_that_dies_again_and_again_is_given_up():
    assert lives(fleet_of(0), [0.0, 10.0, 20.0, 30.0]) == ["", "", "", "it died 4 times within 600 s"]


def test_deaths_of_long_ago_do_not_count():
    assert lives(fleet_of(0), [0.0, 300.0, 500.0, 601.0, 901.0]) == [""] * 5
    assert lives(fleet_of(0), [0.0, 300.0, 500.0, 600.0])[-1] != ""


def test_an_engine_is_judged_by_its_own_deaths():
    fleet = fleet_of(0, 1)
    lives(fleet, [0.0, 10.0, 20.0])
    fleet.die(EngineName(1), "exit code 1", 30.0)
    assert fleet.why_give_up(1) == ""


def test_the_servers_that_do_not_start_have_the_time_of_one_together():
    fleet = fleet_in(EngineState.SERVING)
    fleet.die(FIRST, "exit code 1", 100.0)
    for generation, died in enumerate((130.0, 160.0), 1):
        assert fleet.why_give_up(0) == ""
        fleet.replace(0)
        fleet.die(EngineName(0, generation), "it does not start", died)
    assert fleet.why_give_up(0) == ""
    name = fleet.replace(0)
    assert fleet.late(160.0) == [] and fleet.late(160.1) == [name]
    fleet.die(name, "it is late", 160.1)
    assert fleet.why_give_up(0) == "it died 4 times within 600 s"


def test_a_server_that_hangs_while_it_starts_is_late_and_no_other_is_worth_its_start():
    fleet = fleet_in(EngineState.SERVING)
    assert fleet.late(1e9) == []
    fleet.die(FIRST, "exit code 1", 100.0)
    assert fleet.late(1e9) == [], "it is not starting yet"
    fleet.replace(0)
    assert fleet.late(160.0) == [] and fleet.late(161.0) == [SECOND]
    fleet.die(SECOND, "it is late", 161.0)
    assert fleet.why_give_up(0) == "no server answered in its place for 60 s"


def test_a_server_that_answers_ends_the_time_of_its_start():
    fleet = fleet_in(EngineState.SERVING)
    fleet.die(FIRST, "exit code 1", 100.0)
    fleet.replace(0)
    fleet.ready(SECOND)
    assert fleet.late(1e9) == []
    fleet.die(SECOND, "exit code 1", 300.0)
    assert fleet.why_give_up(0) == "" and fleet.replace(0) and fleet.late(360.0) == []


def test_the_first_start_is_judged_by_whoever_waits_for_it():
    assert fleet_of(0).late(1e9) == []


def test_why_an_engine_died_last_stays_when_it_is_given_up():
    fleet = fleet_in(EngineState.GIVEN_UP)
    assert fleet.record(0).cause == "exit code 1" and fleet.record(0).weight_version is None


# -- checks, by a clock of the test's own -------------------------------------------------------------------------------

A, B = EngineName(0), EngineName(1)


def checks() -> HealthChecks:
    health = HealthChecks(interval=30.0, timeout=10.0, first_wait=5.0, work_limit=100.0)
    health.resume(0.0)
    return health


def test_the_first_check_has_a_grace_in_every_generation():
    health = checks()
    assert health.begin(4.9, [A]) == [] and health.begin(5.0, [A]) == [A]
    health.answered(A, 6.0)
    health.resume(200.0)
    assert health.begin(204.9, [A]) == [] and health.begin(205.0, [A]) == [A]


def test_an_engine_that_answers_is_checked_again_after_the_interval():
    health = checks()
    assert health.begin(5.0, [A, B]) == [A, B]
    assert health.begin(6.0, [A, B]) == [], "one check of an engine at a time"
    health.answered(A, 7.0)
    assert health.begin(36.9, [A, B]) == [] and health.begin(37.0, [A, B]) == [A], (
        "the other's check is still under way"
    )


def test_one_that_computes_is_given_the_time_of_a_start():
    """It may compile or load. It is looked at without a pause meanwhile."""
    health = checks()
    for began in range(5, 105, 10):
        assert health.begin(began, [A]) == [A]
        assert health.computed(A, began + 10.0) is None
    assert health.begin(105.0, [A]) == [A]
    assert health.computed(A, 115.0) == 110.0


def test_an_answer_ends_the_silence():
    health = checks()
    for began in (5.0, 95.0):
        health.begin(began, [A])
        health.computed(A, began + 10.0)
    health.begin(105.0, [A])
    health.answered(A, 106.0)
    health.begin(136.0, [A])
    assert health.computed(A, 146.0) is None


def test_a_failed_request_brings_the_checks_forward():
    health = checks()
    health.begin(5.0, [A, B])
    health.answered(A, 6.0)
    health.hurry(8.0)
    assert health.begin(8.0, [A, B]) == [A]
    health = checks()
    health.hurry(1.0)
    assert health.begin(1.0, [A, B]) == [A, B], "within the grace too"


def test_f1_an_actor_that_says_nothing_does_not_hold_up_the_others():
    health = checks()
    health.begin(5.0, [A, B])
    health.answered(B, 6.0)
    assert health.overdue(15.0 + _ANSWER_SECONDS) == []
    assert health.begin(36.0, [A, B]) == [B]
    assert health.overdue(15.1 + _ANSWER_SECONDS) == [A]
    health.forget(A)
    assert health.overdue(99.0) == [B]


def test_a_new_life_begins_anew():
    health = checks()
    health.begin(5.0, [A])
    health.computed(A, 15.0)
    health.forget(A)
    assert health.begin(50.0, [EngineName(0, 1)]) == [EngineName(0, 1)]


@pytest.mark.parametrize(
    ("deaths", "recent"),
    [
        ([0.0], 0), ([0.0, 0.1], 0), ([0.0, 0.1, 0.2], 3), ([0.0, 300.0, 600.0], 3), ([0.0, 300.0, 600.1], 0),
        ([0.0, 1.0, 700.0], 0), ([0.0, 700.0, 701.0], 0), ([0.0, 700.0, 701.0, 702.0], 3), ([0.0, 1.0, 2.0, 3.0], 4),
    ],
)  # fmt: skip
def test_a_router_comes_back_unless_it_died_three_times_within_ten_minutes(deaths, recent):
    assert why_no_router_follows(deaths) == (f"it died {recent} times within 600 s" if recent else "")
