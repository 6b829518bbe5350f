"""When the owner checks engines, and what it makes of the answers; when a check is due: `test_fleet.py`."""

import re
import threading
from types import SimpleNamespace

import pytest

from slime.serving import fleet as fleet_module
from slime.serving import owner as owner_module
from slime.serving.fleet import EngineName, EngineState
from tests.support.processes.owned_engines import died, let_the_watch_turn, ready, serving, states
from tests.support.processes.waiting import wait_until

FIRST, SECOND = EngineName(0), EngineName(0, 1)


def test_f1_engines_are_checked_while_samples_are_generated_and_one_that_hangs_is_replaced(make_owner):
    owner = serving(make_owner(use_fault_tolerance=True))
    owner.outcomes["check", FIRST] = died("engine 0 hangs")
    let_the_watch_turn(owner)
    assert states(owner) == [EngineState.SERVING] * 2, "nothing is generated"
    with owner.generating():
        wait_until(owner.lacks_weights)
    assert owner.begin_push_to_stale() == (1, [SECOND])


@pytest.mark.parametrize(
    "function",
    ["slime.rollout.fully_async_rollout.generate_rollout_fully_async", "slime_plugins.rollout_buffer.rollout.f"],
)
def test_between_rollouts_they_are_checked_where_requests_go_on(make_owner, function):
    owner = serving(make_owner(use_fault_tolerance=True, rollout_function_path=function))
    owner.outcomes["check", FIRST] = died("engine 0 hangs")
    wait_until(owner.lacks_weights)
    assert owner.begin_push_to_stale() == (1, [SECOND])


def test_engines_that_take_weights_under_running_requests_take_others_meanwhile(make_owner):
    """They generate until files are written, which may take minutes."""
    owner = ready(make_owner(use_fault_tolerance=True))
    _, names = owner.begin_push()
    assert not owner.is_serving(), "they have no weights yet"
    owner.end_push(names, 1, {})
    _, names = owner.begin_push()
    assert owner.is_serving() and owner.is_serving("default")
    owner.end_push(names, 2, {})
    assert owner.is_serving()


def test_engines_that_failed_a_push_leave_the_router_before_others_come_to_it(make_owner, monkeypatch):
    owner = serving(make_owner(use_fault_tolerance=True))
    _, names = owner.begin_push()
    seen, admit = [], owner._admit
    monkeypatch.setattr(owner, "_admit", lambda *given: (seen.append(states(owner)), admit(*given)))
    owner.end_push(names, 2, {0: "it broke"})
    assert seen[0][0] is not EngineState.STALE and owner.deaths("default") == 1


def test_one_that_computes_without_an_answer_is_doubted_and_not_killed(make_owner):
    owner = serving(make_owner(use_fault_tolerance=True))
    owner.outcomes["check", FIRST] = False
    with owner.generating():
        wait_until(lambda: states(owner)[0] is EngineState.SUSPECT)
        assert owner.is_serving() and not owner.is_decided("default")
        owner.outcomes["check", FIRST] = True
        wait_until(lambda: owner.is_decided("default"))
    assert owner.deaths("default") == 0
    assert states(owner) == [EngineState.SERVING] * 2


def test_one_that_computes_for_longer_than_a_start_may_take_is_replaced(make_owner, caplog):
    owner = serving(make_owner(use_fault_tolerance=True, engine_start_timeout=0.2))
    owner.outcomes["check", FIRST] = False
    with owner.generating():
        wait_until(lambda: owner.deaths("default") == 1)
    assert re.search(r"engine 0 computes, and has not answered for \d+ s \(--engine-start-timeout\)", caplog.text)


def test_a_failed_request_has_all_engines_checked_also_when_none_is_due(make_owner):
    owner = serving(make_owner(use_fault_tolerance=True, rollout_health_check_first_wait=300.0))
    with owner.generating():
        owner.doubt_all("default", "POST failed")
        assert states(owner) == [EngineState.SUSPECT] * 2
        assert owner.engines() == (1, [FIRST, EngineName(1)]) and owner.is_serving(), "they have their requests still"
        owner.outcomes["check", EngineName(1)] = True
        wait_until(lambda: states(owner)[1] is EngineState.SERVING)
        assert not owner.is_decided("default"), "one is doubted still"
    # It is decided after the generation, too: a push waits for that.
    owner.outcomes["check", FIRST] = True
    assert owner.begin_push()[1] == [FIRST, EngineName(1)]


def test_what_a_check_found_of_an_engine_that_got_other_weights_meanwhile_counts_for_nothing(make_owner):
    owner = serving(make_owner(use_fault_tolerance=True, rollout_health_check_interval=60.0))
    with owner.generating():
        wait_until(lambda: any(what == "check" for what, _ in list(owner._awaited)))
        _, names = owner.begin_push()
        owner.end_push(names, 2, {})
        owner.outcomes["check", FIRST] = [died("engine 0 hangs")]
        wait_until(lambda: ("check", FIRST) not in owner.outcomes)
        let_the_watch_turn(owner)
        assert states(owner) == [EngineState.SERVING] * 2
        assert ("check", FIRST) in owner._awaited, "it is checked anew, and the old check is not waited for"


def test_an_answer_that_is_there_counts_although_the_watch_comes_late(make_owner, monkeypatch):
    owner = serving(make_owner(use_fault_tolerance=True, rollout_health_check_interval=1e9))
    now = [0.0]
    monkeypatch.setattr(owner_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def keep_the_watch_busy(name, reference):
        # Meanwhile both checks end, and with their answers untaken their time passes.
        owner.outcomes.update({("check", EngineName(1)): True, ("check", FIRST): True})
        now[0] += 600.0 + fleet_module._ANSWER_SECONDS + 1.0

    monkeypatch.setattr(owner, "_awaited", {"end of something": (keep_the_watch_busy, FIRST)})
    with owner.generating():
        wait_until(lambda: {("check", FIRST), ("check", EngineName(1))} <= owner._awaited.keys())
        owner.outcomes["end of something"] = None
        wait_until(lambda: ("check", FIRST) not in owner._awaited and ("check", EngineName(1)) not in owner._awaited)
    assert states(owner) == [EngineState.SERVING] * 2 and owner.deaths("default") == 0


def test_requests_go_on_while_a_check_is_handed_to_the_process_of_an_engine(make_owner, monkeypatch):
    owner = serving(make_owner(use_fault_tolerance=True))
    handing, handed = threading.Event(), threading.Event()

    def check(name, timeout):
        handing.set()
        assert handed.wait(120)
        return ("check", name)

    monkeypatch.setattr(owner._engines, "check", check)
    request = threading.Thread(target=owner.is_serving, daemon=True)
    with owner.generating():
        assert handing.wait(60)
        request.start()
        request.join(60)
        went_on = not request.is_alive()
        handed.set()
    assert went_on


def test_one_that_ends_before_it_is_asked_is_not_waited_for(make_owner, monkeypatch):
    owner = serving(make_owner(use_fault_tolerance=True))
    asked = []
    monkeypatch.setattr(owner._engines, "check", lambda name, timeout: asked.append(name))
    with owner.generating():
        wait_until(lambda: len(asked) == 2)
        let_the_watch_turn(owner)
    assert not any(what == "check" for what, _ in owner._awaited) and not owner.ended.done()


def test_without_the_flag_nothing_is_checked(make_owner):
    owner = serving(make_owner())
    owner.outcomes["check", FIRST] = died("engine 0 hangs")
    with owner.generating():
        let_the_watch_turn(owner)
    assert states(owner) == [EngineState.SERVING] * 2 and not owner.ended.done()


def test_f1_an_engine_whose_process_says_nothing_of_a_check_is_replaced_and_the_other_one_is_checked_meanwhile(
    make_owner, monkeypatch, caplog
):
    monkeypatch.setattr(fleet_module, "_ANSWER_SECONDS", 0.0)
    owner = serving(make_owner(use_fault_tolerance=True, rollout_health_check_timeout=0.2))
    owner.outcomes["check", EngineName(1)] = True
    with owner.generating():
        wait_until(owner.lacks_weights)
    assert owner.begin_push_to_stale() == (1, [SECOND]) and owner.deaths("default") == 1
    assert "the process of engine 0 did not answer a check for 0.2 s" in caplog.text and ("stop", FIRST) in owner.events


def test_generations_that_overlap_have_one_grace_before_the_first_check(make_owner, monkeypatch):
    """Otherwise an engine that hangs would never be checked where a rollout begins before the last one ends."""
    owner, resumed = serving(make_owner(use_fault_tolerance=True)), []
    monkeypatch.setattr(owner._health, "resume", resumed.append)
    with owner.generating():
        with owner.generating():
            pass
        with owner.generating():
            pass
    assert len(resumed) == 1
    with owner.generating():
        assert len(resumed) == 2, "after a pause the next one has it again"
