"""Engines that sleep and wake, as their owner orders it; real ones: `test_engines.py`."""

import threading

import pytest

from slime.scheduling.device_turns import Holds
from slime.serving import owner as owner_module
from slime.serving.fleet import EngineName, EngineState
from slime.utils.errors import RunError
from tests.support.processes.owned_engines import died, let_the_watch_turn, ready, serving, states
from tests.support.processes.waiting import wait_until

LEFT, RIGHT = EngineName(0), EngineName(1)


def test_engines_sleep_and_get_weights_before_they_serve_again(make_owner):
    owner = serving(make_owner())
    owner.hold(Holds.NOTHING)
    assert states(owner) == [EngineState.ASLEEP] * 2 and not owner.is_serving()
    owner.hold(Holds.WEIGHTS)
    assert states(owner) == [EngineState.STALE] * 2
    _, names = owner.begin_push()
    owner.hold(Holds.ALL)
    owner.end_push(names, 2, {})
    assert states(owner) == [EngineState.SERVING] * 2
    assert owner.events == [("sleep", LEFT, RIGHT), ("wake_weights", LEFT, RIGHT), ("wake_caches", LEFT, RIGHT)]


def test_what_is_so_already_is_left_alone(make_owner):
    owner = serving(make_owner())
    for holds in (Holds.NOTHING, Holds.WEIGHTS):
        owner.hold(holds)
        owner.events.clear()
        owner.hold(holds)
        assert [name for _, *names in owner.events for name in names] == []
    assert states(owner) == [EngineState.STALE] * 2


def test_asleep_nothing_is_generated_and_nothing_pushed_and_while_generating_nobody_sleeps(make_owner):
    owner = serving(make_owner())
    with owner.generating(), pytest.raises(RunError, match="cannot sleep while samples are generated"):
        owner.hold(Holds.NOTHING)
    owner.hold(Holds.NOTHING)
    with pytest.raises(RunError, match="nothing can be generated before they wake"), owner.generating():
        pass
    with pytest.raises(RunError, match="the engines sleep, and have no room for weights"):
        owner.begin_push()
    owner.hold(Holds.WEIGHTS)
    with owner.generating():
        pass


def test_a_request_that_fails_while_engines_go_to_sleep_has_none_of_them_checked(make_owner, monkeypatch):
    """Asleep they answer nobody, and would be taken for dead."""
    owner = serving(make_owner(use_fault_tolerance=True))
    order, checked = owner._engines.order, []

    def order_while_a_request_fails(names, method):
        outcomes = order(names, method)
        owner.doubt_all("default", "POST failed")
        if method == "sleep":
            let_the_watch_turn(owner)
            checked.extend(name for what, name in owner._awaited if what == "check")
        return outcomes

    monkeypatch.setattr(owner._engines, "order", order_while_a_request_fails)
    owner.hold(Holds.NOTHING)
    assert states(owner) == [EngineState.ASLEEP] * 2 and checked == []
    owner.hold(Holds.WEIGHTS)
    assert owner.begin_push() == (1, [LEFT, RIGHT])


@pytest.mark.parametrize("began_before", [False, True])
def test_a_check_of_an_engine_that_goes_to_sleep_says_nothing(make_owner, monkeypatch, began_before):
    """The requests that it still has may take longer than a check, which then fails."""
    owner = serving(make_owner(use_fault_tolerance=True))
    order = owner._engines.order
    if began_before:
        with owner.generating():
            wait_until(lambda: ("check", LEFT) in owner._awaited)

    def order_while_a_request_fails(names, method):
        owner.doubt_all("default", "POST failed")
        owner.outcomes["check", LEFT] = died("no answer")
        seen = owner.turns
        wait_until(lambda: owner.turns >= seen + 10)
        return order(names, method)

    monkeypatch.setattr(owner._engines, "order", order_while_a_request_fails)
    owner.hold(Holds.NOTHING)
    assert states(owner) == [EngineState.ASLEEP] * 2 and owner.deaths("default") == 0


def test_engines_are_asleep_before_the_first_push_too(make_owner):
    owner = ready(make_owner())
    owner.hold(Holds.NOTHING)
    owner.hold(Holds.WEIGHTS)
    assert owner.begin_push() == (None, [LEFT, RIGHT])


def test_an_engine_that_failed_a_push_is_given_up_before_the_others_have_caches(make_owner):
    """One that hangs would keep them waiting until the limit of an order."""
    owner = serving(make_owner(use_fault_tolerance=True))
    owner.hold(Holds.NOTHING)
    owner.hold(Holds.WEIGHTS)
    owner.begin_push()
    owner.end_push([RIGHT], 2, {1: "engine 1 hangs"})
    assert states(owner)[0] is EngineState.STALE, "nobody asks it for samples before it has caches"
    owner.hold(Holds.ALL)
    owner.end_push([LEFT], 2, {})
    (woken,) = (event for event in owner.events if event[0] == "wake_caches")
    assert LEFT in woken and RIGHT not in woken and owner.deaths("default") == 1
    assert states(owner)[0] is EngineState.SERVING
    assert owner.begin_push() == (2, [LEFT, EngineName(1, 1)])


HALF_WAY = {"sleep": [Holds.NOTHING], "wake_weights": [Holds.NOTHING, Holds.WEIGHTS], "wake_caches": list(Holds)}


@pytest.mark.parametrize("method", HALF_WAY)
@pytest.mark.parametrize("tolerant", [False, True])
def test_an_engine_that_fails_to_sleep_or_to_wake_is_dead(make_owner, method, tolerant):
    owner = serving(make_owner(use_fault_tolerance=tolerant))
    owner.outcomes[method, RIGHT] = RunError("engine 1 answered 500")
    *before, last = HALF_WAY[method]
    for holds in before:
        owner.hold(holds)
    if not tolerant:
        with pytest.raises(RunError, match="engine 1 answered 500"):
            owner.hold(last)
        return
    owner.hold(last)
    if method == "sleep":
        owner.hold(Holds.WEIGHTS)
    assert owner.begin_push() == (1, [LEFT, EngineName(1, 1)])


def test_the_devices_of_one_that_fails_to_sleep_are_free_before_the_trainer_takes_them(make_owner, monkeypatch):
    owner = serving(make_owner(use_fault_tolerance=True))
    may_end, stop = threading.Event(), owner._engines.stop
    monkeypatch.setattr(owner._engines, "stop", lambda names=None: (may_end.wait(60), stop(names)))
    owner.outcomes["sleep", RIGHT] = RunError("engine 1 hangs")
    turn = threading.Thread(target=owner.hold, args=(Holds.NOTHING,), daemon=True)
    turn.start()
    wait_until(lambda: states(owner) == [EngineState.ASLEEP, EngineState.DEAD])
    let_the_watch_turn(owner)
    assert turn.is_alive() and ("stop", RIGHT) not in owner.events
    may_end.set()
    turn.join(60)
    assert not turn.is_alive() and ("stop", RIGHT) in owner.events


def test_one_that_dies_asleep_is_replaced_when_the_others_wake_and_its_time_counts_from_then(make_owner, monkeypatch):
    monkeypatch.setattr(owner_module, "_ANSWER_SECONDS", 0.0)
    owner = serving(make_owner(use_fault_tolerance=True))
    owner.hold(Holds.NOTHING)
    owner.outcomes["end", RIGHT] = died("exit code -9")
    wait_until(lambda: owner._cleared == [RIGHT])
    assert ("stop", RIGHT) in owner.events and states(owner) == [EngineState.ASLEEP, EngineState.DEAD]
    # As if the trainer had worked for longer than a start may take; and the new server is not there at once.
    owner._fleet._down_since[1] -= 1000.0
    owner.outcomes["start", EngineName(1, 1)] = died("no place yet")
    owner.hold(Holds.WEIGHTS)
    wait_until(lambda: owner.deaths("default") == 2)
    assert owner.begin_push() == (1, [LEFT, EngineName(1, 2)])
    assert owner._cleared == []


def test_one_that_dies_asleep_ends_a_run_that_replaces_none(make_owner):
    owner = serving(make_owner())
    owner.hold(Holds.NOTHING)
    owner.outcomes["end", RIGHT] = died("exit code -9")
    with pytest.raises(RunError, match="exit code -9"):
        owner.ended.result(60)
    with pytest.raises(RunError, match="exit code -9"):
        owner.hold(Holds.WEIGHTS)


def test_engines_sleep_when_the_successor_of_one_is_there(make_owner):
    owner = serving(make_owner(use_fault_tolerance=True))
    owner.outcomes["end", RIGHT] = died("exit code -9")
    wait_until(lambda: owner.deaths("default") == 1)
    owner.hold(Holds.NOTHING)
    assert owner.events[-1] == ("sleep", LEFT, EngineName(1, 1))
    assert states(owner) == [EngineState.ASLEEP] * 2


def test_who_lacks_weights_is_no_engine_that_is_just_getting_some_or_that_no_push_has_reached(make_owner):
    owner = ready(make_owner(use_fault_tolerance=True))
    assert states(owner) == [EngineState.STALE] * 2 and not owner.lacks_weights(), "the first push is to come"
    _, names = owner.begin_push()
    owner.end_push(names, 1, {})
    owner.begin_push()
    assert states(owner) == [EngineState.STALE] * 2 and not owner.lacks_weights()
    owner.end_push(names, 2, {})
    owner.hold(Holds.NOTHING)
    assert not owner.lacks_weights()
    owner.hold(Holds.WEIGHTS)
    assert owner.lacks_weights(), "they lost them asleep"


@pytest.mark.parametrize("ends", [True, False])
def test_who_waits_for_a_successor_hears_at_once_that_the_run_ends(make_owner, ends, caplog):
    caplog.set_level("INFO")
    owner, heard = serving(make_owner(use_fault_tolerance=True)), []
    owner._engines.start = lambda name: ("no place", name)
    owner.outcomes["end", RIGHT] = died("exit code -9")
    wait_until(lambda: owner.deaths("default") == 1)

    def sleep():
        try:
            owner.hold(Holds.NOTHING)
        except RunError as error:
            heard.append(str(error))

    waiting = threading.Thread(target=sleep, daemon=True)
    waiting.start()
    wait_until(lambda: "sleep of the engines waits: engine 1" in caplog.text)
    if ends:
        owner.shutdown()
    else:
        owner.routers["default"]._gave_up = "the router died again"
    waiting.join(60)
    assert not waiting.is_alive() and heard == ([] if ends else ["the router died again"])
