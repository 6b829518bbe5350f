"""What the owner of router and engines does around them, without processes; with real ones: `test_engines.py`."""

import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import ray

from slime.serving import engines as engines_module
from slime.serving import model_routers
from slime.serving import owner as owner_module
from slime.serving.engines import Engines
from slime.serving.fleet import EngineName, EngineState
from slime.serving.router import EnginesLacking
from slime.utils.errors import RunError
from tests.support.processes.owned_engines import (
    KILLED,
    Process,
    RayTaskError,
    died,
    let_the_watch_turn,
    ready,
    serving,
    states,
)
from tests.support.processes.waiting import wait_until

# -- start and end -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [5.0, 8000.0])
def test_a_start_has_the_time_that_its_flag_gives_and_a_moment_more(make_owner, monkeypatch, limit):
    found = []
    monkeypatch.setattr(
        owner_module,
        "wait_for_all",
        lambda refs, name, limit, **options: found.append(limit) or ["http://0", "http://1"],
    )
    ready(make_owner(engine_start_timeout=limit))
    assert found == [limit + owner_module._ANSWER_SECONDS]


@pytest.mark.parametrize(("has_trainer", "state"), [(True, EngineState.STALE), (False, EngineState.SERVING)])
def test_engines_that_start_are_known_to_the_router_and_wait_for_the_weights_of_a_trainer(
    make_owner, has_trainer, state
):
    owner = ready(make_owner(has_trainer=has_trainer, process=Process()))
    urls = ["http://0.0", "http://1.0"]
    assert owner.events == ["router is ready", ("only", urls), ("add", urls)]
    assert states(owner) == [state] * 2


@pytest.mark.parametrize("has_trainer", [True, False])
def test_without_engines_of_its_own_a_run_waits_for_those_that_register(make_owner, has_trainer, caplog):
    owner = ready(make_owner(engines=0, has_trainer=has_trainer, process=Process()))
    assert owner.events == ["router is ready", ("engines of others", 600.0)], "whatever they are, and they stay there"
    assert ("no push reaches these engines" in caplog.text) == has_trainer
    with owner.generating():
        pass
    assert owner.begin_push() == (None, []) and not owner.lacks_weights()
    owner.events.clear()
    owner.leave_given_router()
    owner.shutdown()
    assert owner.events == ["engines", "router"]


@pytest.mark.parametrize("error", [None, RunError("the router is dead")])
def test_our_engines_leave_a_given_router_before_they_end(make_owner, error, caplog):
    owner = ready(make_owner(error=error))
    owner.events.clear()
    owner.leave_given_router()
    owner.shutdown()
    assert owner.events == [("remove", ["http://0.0", "http://1.0"]), "engines", "router"]
    assert ("our engines may still be registered" in caplog.text) == (error is not None)


def test_our_engines_leave_a_given_router_also_while_one_is_being_replaced(make_owner, monkeypatch):
    owner = ready(make_owner())
    model_of = owner.routers._model_of

    def meanwhile(name):
        # What the thread of a replacement does.
        owner._urls.pop(EngineName(1), None)
        return model_of(name)

    monkeypatch.setattr(owner.routers, "_model_of", meanwhile)
    owner.leave_given_router()
    assert owner.events[-1] == ("remove", ["http://0.0", "http://1.0"])


def test_our_own_router_just_ends(make_owner):
    owner = ready(make_owner(process=Process()))
    owner.events.clear()
    owner.leave_given_router()
    owner.shutdown()
    assert owner.events == ["engines", "router"]
    assert owner.ended.result(0) is None


@pytest.mark.parametrize(("given_ip", "given_key"), [(None, None), ("127.0.0.1", None), ("127.0.0.1", "mine")])
def test_engines_always_have_a_key_but_a_given_router_is_tried_with_its_own(
    make_owner, monkeypatch, given_ip, given_key
):
    asked = []
    owner = make_owner(sglang_router_ip=given_ip, router_api_key=given_key)
    start_router = model_routers.start_router
    monkeypatch.setattr(
        model_routers,
        "start_router",
        lambda args, log_dir, ours, number, roles: (
            asked.append(args.router_api_key) or start_router(args, log_dir, ours, number, roles)
        ),
    )
    owner.start()
    engine_key = owner._engines._args.router_api_key
    assert engine_key == owner.api_key and (engine_key == given_key or len(engine_key) >= 32)
    assert asked == [given_key if given_ip else engine_key]


def test_an_engine_that_two_stop_at_once_is_stopped_once(monkeypatch, tmp_path):
    killed = []
    monkeypatch.setattr(ray, "wait", lambda refs, **options: (refs, []))
    monkeypatch.setattr(ray, "kill", lambda handle, **options: killed.append(handle))
    engines = Engines(SimpleNamespace(), None, None, tmp_path, {})
    handle = SimpleNamespace(shutdown=SimpleNamespace(remote=lambda: "its end"))
    engines._handles = {EngineName(0): handle}

    def names():
        yield EngineName(0)
        engines.stop()

    engines.stop(names())
    assert killed == [handle] and engines._handles == {}


def test_the_engine_with_most_memory_of_its_host_is_told(monkeypatch, tmp_path):
    """Of each node that it is on. What the run did not start is on hosts that it does not know."""
    monkeypatch.setattr(engines_module, "wait_for_each", lambda refs, name, limit: refs)
    engines, external = Engines(SimpleNamespace(), None, None, tmp_path, {}), SimpleNamespace(url="http://its.own")
    of_run = {engine_id: SimpleNamespace(external=external if engine_id == 2 else None) for engine_id in range(5)}
    engines.topology = SimpleNamespace(find=lambda engine_id: (None, None, of_run[engine_id]))

    def having(answer):
        return SimpleNamespace(host_memory_gib=SimpleNamespace(remote=lambda: answer))

    names = [EngineName(engine_id) for engine_id in range(5)]
    assert engines.host_memory_gib(names) is None
    engines._handles = dict(zip(names, map(having, (1.5, RunError("it died"), 99.0, None)), strict=False))
    assert engines.host_memory_gib(names) == 1.5
    engines._helpers = {names[0]: [having(2.5), having(0.5)]}
    assert engines.host_memory_gib(names) == 2.5
    assert engines.host_memory_gib(names[1:]) is None


def test_the_memory_of_an_engine_that_starts_or_is_doubted_is_not_waited_for(make_owner, monkeypatch):
    """Its process may answer when Ray has found a place for it: the step would wait, and all GPUs with it."""
    owner, asked = ready(make_owner(engines=4, use_fault_tolerance=True, has_trainer=False)), []
    monkeypatch.setattr(owner._engines, "host_memory_gib", lambda names: asked.append([*names]) or 1.5)
    names = [EngineName(engine_id) for engine_id in range(4)]
    owner._fleet.sleep(names[0])
    owner._fleet.doubt(names[1], "a request failed")
    owner._fleet.die(names[2], "it died", 0.0)
    owner._fleet.replace(2)
    assert owner.host_memory_gib() == 1.5 and asked == [[names[0], names[3]]]


# -- weights -------------------------------------------------------------------------------------------------------------


def test_an_engine_serves_what_a_push_gave_it_whole(make_owner):
    owner = ready(make_owner())
    for version in (1, 2):
        _, names = owner.begin_push()
        assert names == [EngineName(0), EngineName(1)] and states(owner) == [EngineState.STALE] * 2
        owner.end_push(names, version, {})
        assert states(owner) == [EngineState.SERVING] * 2 and owner.engines() == (version, names)
    owner.begin_push()
    owner.end_push(names, 3, {1: "it did not answer"})
    assert states(owner) == [EngineState.SERVING, EngineState.DEAD]
    assert owner.engines() == (3, [EngineName(0)]), "nobody gets a dead one"
    with pytest.raises(RunError, match="^it did not answer$"):
        owner.begin_push()


# -- deaths --------------------------------------------------------------------------------------------------------------


def test_the_first_death_of_an_engine_ends_what_serves_with_its_words(make_owner):
    owner = ready(make_owner(process=Process()))
    owner.outcomes["end", EngineName(1)] = RayTaskError(RunError("engine 1 died: exit code 7"))
    with pytest.raises(RunError, match="^engine 1 died: exit code 7$"):
        owner.ended.result(60)
    owner.outcomes["end", EngineName(0)] = RayTaskError(RunError("engine 0 died: its connections are lost"))
    assert states(owner) == [EngineState.STALE, EngineState.DEAD]


def test_a_lost_actor_is_a_death_too(make_owner):
    owner = ready(make_owner())
    owner.outcomes["end", EngineName(0)] = ray.exceptions.ActorDiedError()
    with pytest.raises(RunError, match="^the process of engine 0 died: "):
        owner.ended.result(60)


def test_the_death_of_our_router_is_one_as_well(make_owner):
    owner = ready(make_owner(process=(process := Process())))
    assert not owner.ended.done()
    process.status = 3
    with pytest.raises(RunError, match="^the router died: exit code 3; log router.log ends with: out of sockets$"):
        owner.ended.result(60)


@pytest.mark.parametrize(
    ("flags", "comes_back"),
    [
        ({"use_fault_tolerance": True}, True), ({}, False), ({"use_fault_tolerance": True, "process": None}, False),
        ({"use_fault_tolerance": True, "engines": 0}, False),
    ],
    ids=["ours", "without the flag", "of others", "engines of others"],
)  # fmt: skip
def test_a_router_comes_back_that_the_run_started_and_told_of_its_engines(make_owner, flags, comes_back):
    owner = make_owner(**{"process": Process(), **flags})
    owner.start()
    assert owner.routers["default"].comes_back is comes_back


def test_a_router_that_comes_back_ends_nothing_until_it_is_given_up(make_owner):
    owner = serving(make_owner(process=(process := Process()), use_fault_tolerance=True))
    process.status = 3
    let_the_watch_turn(owner)
    assert not owner.ended.done()
    owner.routers["default"]._gave_up = "the router died\nno other router takes its place: it died 3 times"
    with pytest.raises(RunError, match="^the router died\nno other router takes its place: it died 3 times$"):
        owner.ended.result(60)


def test_engines_that_are_shut_down_did_not_die(make_owner):
    owner = ready(make_owner())
    owner.outcomes.update({("end", EngineName(0)): None, ("end", EngineName(1)): None})
    owner.shutdown()
    assert owner.ended.result(60) is None


# -- replacements --------------------------------------------------------------------------------------------------------

FIRST, SECOND = EngineName(0), EngineName(0, 1)


def test_a_dead_engine_leaves_the_router_before_a_new_server_starts_and_gets_weights_before_requests(
    make_owner, caplog
):
    owner = serving(make_owner(use_fault_tolerance=True))
    owner.outcomes["end", FIRST] = died()
    wait_until(owner.lacks_weights)
    remove = ("remove", ["http://0.0"])
    assert owner.events == [remove, ("stop", FIRST), remove], "at the end it is sure that the router has forgotten it"
    assert KILLED in caplog.text and "a new server starts in its place" in caplog.text
    assert owner.begin_push_to_stale() == (1, [SECOND]), "the other one goes on"
    assert states(owner) == [EngineState.STALE, EngineState.SERVING] and owner.deaths("default") == 1
    owner.end_push([SECOND], 1, {})
    assert owner.events[3:] == [("add", ["http://0.1"])]
    assert states(owner) == [EngineState.SERVING] * 2 and not owner.lacks_weights()
    _, names = owner.begin_push()
    owner.end_push(names, 2, {})
    assert names == [SECOND, EngineName(1)] and states(owner) == [EngineState.SERVING] * 2, "the second life as well"
    # It is watched as the first was.
    owner.outcomes["end", SECOND] = died()
    wait_until(owner.lacks_weights)
    assert owner.begin_push_to_stale() == (2, [EngineName(0, 2)]) and not owner.ended.done()


def test_without_the_last_engine_requests_find_none_until_its_successor_has_the_weights(make_owner):
    owner = serving(make_owner(engines=1, use_fault_tolerance=True))
    assert owner.is_serving()
    owner.outcomes["end", FIRST] = died()
    wait_until(owner.lacks_weights)
    assert not owner.is_serving()
    owner.begin_push_to_stale()
    owner.end_push([SECOND], 1, {})
    assert owner.is_serving()


def test_where_nobody_pushes_a_successor_serves_what_it_loaded(make_owner):
    owner = ready(make_owner(has_trainer=False, use_fault_tolerance=True))
    owner.events.clear()
    owner.outcomes["end", FIRST] = died()
    wait_until(lambda: ("add", ["http://0.1"]) in owner.events)
    wait_until(lambda: states(owner) == [EngineState.SERVING] * 2)
    assert not owner.lacks_weights()


def test_a_router_that_hangs_while_it_is_told_of_a_successor_keeps_nobody_from_seeing_the_next_death(
    make_owner, monkeypatch
):
    owner = ready(make_owner(engines=3, has_trainer=False, use_fault_tolerance=True))
    told, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(
        owner.routers["default"], "add_workers", lambda workers, timeout, key: told.set() or go_on.wait(60)
    )
    try:
        owner.outcomes["end", FIRST] = died()
        assert told.wait(60)
        owner.outcomes["end", EngineName(1)] = died("engine 1 died")
        wait_until(lambda: owner.deaths("default") == 2)
    finally:
        go_on.set()
    wait_until(lambda: states(owner) == [EngineState.SERVING] * 3)


def test_an_error_of_what_is_done_beside_the_watch_ends_the_run(make_owner, monkeypatch):
    owner = ready(make_owner(has_trainer=False, use_fault_tolerance=True))
    monkeypatch.setattr(owner._engines, "workers", lambda urls: 1 / 0)
    owner.outcomes["end", FIRST] = died()
    with pytest.raises(RunError, match="^admission of engine 0 failed: division by zero$"):
        owner.ended.result(60)


def failed_start(generation):
    return died(f"engine 0 failed to start: exit code {generation}")


def test_successors_that_do_not_start_end_the_run_where_the_engine_was_the_only_one(make_owner):
    owner = serving(make_owner(engines=1, use_fault_tolerance=True))
    for generation in (1, 2, 3):
        owner.outcomes["start", EngineName(0, generation)] = failed_start(generation)
    owner.outcomes["end", FIRST] = died()
    gave_up = (
        r"^engine 0 is given up: it died 4 times within 6600 s, and no other engine does its work; the last time: engine 0 "
        "failed to start: exit code 3$"
    )
    with pytest.raises(RunError, match=gave_up):
        owner.ended.result(60)
    with pytest.raises(RunError, match=gave_up):
        owner.begin_push()


def test_a_successor_that_does_not_start_is_tried_again(make_owner):
    owner = serving(make_owner(engines=1, use_fault_tolerance=True))
    owner.outcomes["start", SECOND] = failed_start(1)
    owner.outcomes["end", FIRST] = died()
    wait_until(owner.lacks_weights)
    assert owner.begin_push_to_stale() == (1, [EngineName(0, 2)]) and owner.deaths("default") == 2
    assert ("stop", SECOND) in owner.events, "what it left is ended"


def test_an_engine_that_dies_again_and_again_is_given_up_and_the_others_go_on(make_owner, caplog):
    owner = serving(make_owner(use_fault_tolerance=True))
    for generation in range(3):
        name, successor = EngineName(0, generation), EngineName(0, generation + 1)
        owner.outcomes["end", name] = died()
        wait_until(owner.lacks_weights)
        assert owner.begin_push_to_stale() == (1, [successor])
        owner.end_push([successor], 1, {})
    owner.events.clear()
    owner.outcomes["end", successor] = died()
    remove = ("remove", ["http://0.3"])
    wait_until(lambda: owner.events == [remove, ("stop", successor), remove])
    wait_until(lambda: successor not in owner._registered)
    assert (
        "engine 0 is given up: it died 4 times within 6600 s. The run goes on without it; the last time: " + KILLED
        in (caplog.text)
    )
    assert states(owner) == [EngineState.GIVEN_UP, EngineState.SERVING]
    assert owner.is_serving() and owner.is_decided("default") and not owner.lacks_weights()
    assert owner.begin_push() == (1, [EngineName(1)]), "nobody waits for it"
    owner.end_push([EngineName(1)], 2, {})
    assert owner.engines() == (2, [EngineName(1)]) and not owner.ended.done()
    # Then the other one is the last.
    for generation in range(4):
        owner.outcomes["end", EngineName(1, generation)] = died("engine 1 died: ended by SIGKILL")
    with pytest.raises(RunError, match="^engine 1 is given up: .* no other engine does its work"):
        owner.ended.result(60)


def test_nobody_starts_an_engine_again_that_the_run_did_not_start(make_owner, caplog):
    infos = [SimpleNamespace(num_gpus=1, url=f"http://{i}.0", worker_type="regular") for i in range(2)]
    flags = {"rollout_external": True, "rollout_external_engine_infos": infos}
    owner = serving(make_owner(use_fault_tolerance=True, **flags))
    owner.outcomes["end", FIRST] = died("engine 0 died: nobody listens")
    wait_until(lambda: ("stop", FIRST) in owner.events and FIRST not in owner._registered)
    told = "engine 0 is given up: this run did not start http://0.0, and starts none in its place. The run goes on without it"
    assert told in caplog.text and ("remove", ["http://0.0"]) in owner.events
    assert states(owner) == [EngineState.GIVEN_UP, EngineState.SERVING]
    assert owner.begin_push() == (1, [EngineName(1)])
    owner.end_push([EngineName(1)], 2, {})
    owner.outcomes["end", EngineName(1)] = died("engine 1 died: nobody listens")
    with pytest.raises(
        RunError, match="^engine 1 is given up: this run did not start .* no other engine does its work"
    ):
        owner.ended.result(60)


def test_a_router_that_had_engines_before_the_run_keeps_them(make_owner):
    owner = make_owner()
    ready(owner)
    owner.routers["default"].found = frozenset({"http://0.0"})
    owner.leave_given_router()
    assert owner.events[-1] == ("remove", ["http://1.0"])


def test_a_successor_without_a_place_is_given_up_in_time(make_owner, monkeypatch):
    monkeypatch.setattr(owner_module, "_ANSWER_SECONDS", 0.0)
    owner = make_owner(use_fault_tolerance=True, engine_start_timeout=0.5)
    serving(owner)
    monkeypatch.setattr(owner._engines, "start", lambda name: ("place", name))
    owner.outcomes["end", FIRST] = died()
    wait_until(lambda: states(owner)[0] is EngineState.GIVEN_UP)
    (cause,) = [record.cause for record in owner._fleet.records(EngineState.GIVEN_UP)]
    assert cause.startswith("engine 0 has no new server after 0 s (--engine-start-timeout): Ray has found no place")
    wait_until(lambda: ("stop", SECOND) in owner.events)
    # What answers after its time is ended, and nobody listens.
    owner.outcomes["place", SECOND] = "http://late"
    let_the_watch_turn(owner)
    assert states(owner) == [EngineState.GIVEN_UP, EngineState.SERVING] and not owner.ended.done()
    assert owner.begin_push() == (1, [EngineName(1)])


def lines_run(call):
    """How many lines of Python `call` runs."""
    lines, tracer = 0, sys.gettrace()

    def count(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return count

    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(tracer)
    return lines


@pytest.mark.parametrize("ask", ["is_serving", "is_decided"])
def test_what_each_request_asks_takes_no_longer_where_there_are_more_engines(make_owner, ask):
    few, many = (serving(make_owner(engines=engines)) for engines in (2, 512))
    assert 0 < lines_run(lambda: getattr(many, ask)("default")) <= lines_run(lambda: getattr(few, ask)("default"))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_a_model_serves_once_it_has_engines_of_each_role(make_owner, order):
    """Engine 0 prefills, the others decode."""
    owner = ready(make_owner(engines=3, prefill_num_servers=1))
    for position, engine_id in enumerate(order):
        owner.end_push([EngineName(engine_id)], 1, {})
        served = {0, 1} <= set(order[: position + 1]) or {0, 2} <= set(order[: position + 1])
        assert owner.is_serving() == owner.is_serving("default") == served


def test_engines_of_another_role_do_not_stand_in_for_one_that_is_given_up(make_owner):
    """Two engines, one that reads prompts and one that goes on from there."""
    owner = serving(make_owner(use_fault_tolerance=True, prefill_num_servers=1))
    for generation in range(4):
        owner.outcomes["end", EngineName(0, generation)] = died()
    with pytest.raises(RunError, match="^engine 0 is given up: .* no other engine does its work"):
        owner.ended.result(60)


def test_the_next_push_waits_for_the_successor(make_owner, monkeypatch, caplog):
    caplog.set_level("INFO")
    owner = serving(make_owner(use_fault_tolerance=True))
    monkeypatch.setattr(owner._engines, "start", lambda name: ("start", name))
    owner.outcomes["end", FIRST] = died()
    wait_until(lambda: states(owner)[0] is not EngineState.SERVING)
    with ThreadPoolExecutor(1) as pool:
        push = pool.submit(owner.begin_push)
        wait_until(lambda: re.search("weight push waits: engine 0 is (dead|starting)\n", caplog.text))
        owner.outcomes["start", SECOND] = "http://late"
        assert push.result(30) == (1, [SECOND, EngineName(1)])
    owner.end_push([SECOND, EngineName(1)], 2, {})
    assert states(owner) == [EngineState.SERVING] * 2 and ("add", ["http://late"]) in owner.events


def test_an_engine_that_failed_a_push_is_replaced(make_owner):
    owner = serving(make_owner(use_fault_tolerance=True))
    _, names = owner.begin_push()
    owner.end_push(names, 2, {1: "engine 1 did not answer"})
    wait_until(owner.lacks_weights)
    assert owner.begin_push_to_stale() == (2, [EngineName(1, 1)]) and owner.deaths("default") == 1


@pytest.mark.parametrize("error", [None, RunError("workers not healthy after 60 s: http://0.1")])
def test_a_successor_that_is_lost_while_it_is_registered_does_not_stay_in_the_router(make_owner, monkeypatch, error):
    owner = serving(make_owner(use_fault_tolerance=True))
    owner.outcomes["end", FIRST] = died()
    wait_until(owner.lacks_weights)
    owner.begin_push_to_stale()
    owner.events.clear()
    third = EngineName(0, 2)

    def add_workers(urls, timeout, key):
        owner.events.append(("add", urls))
        if error is not None:
            raise error
        owner.outcomes["end", SECOND] = died()
        wait_until(lambda: owner._fleet.record(0).name == third)

    monkeypatch.setattr(owner.routers["default"], "add_workers", add_workers)
    owner.end_push([SECOND], 1, {})
    wait_until(owner.lacks_weights)
    assert ("remove", ["http://0.1"]) in owner.events[1:] and SECOND not in owner._registered
    assert owner.deaths("default") == 2 and not owner.ended.done()
    assert owner.begin_push_to_stale() == (1, [third])


def test_successors_are_registered_together_and_one_that_is_refused_keeps_no_other_from_serving(
    make_owner, monkeypatch
):
    """One after the other would take minutes where a router is slow and has hundreds of them."""
    owner = serving(make_owner(engines=6, use_fault_tolerance=True))
    lost = [EngineName(number) for number in range(4)]
    owner.outcomes |= {("end", name): died(f"{name} died") for name in lost}
    wait_until(lambda: states(owner) == [EngineState.STALE] * 4 + [EngineState.SERVING] * 2)
    _, names = owner.begin_push()
    told, serving_meanwhile = [], []

    def add_workers(workers, timeout, key):
        told.append([worker.url for worker in workers])
        serving_meanwhile.extend(states(owner))
        raise EnginesLacking({"http://1.1": "the router answered 400"})

    owner.events.clear()
    with monkeypatch.context() as refusing:
        refusing.setattr(owner.routers["default"], "add_workers", add_workers)
        owner.end_push(names, 2, {5: "engine 5 hangs"})
    assert told == [["http://0.1", "http://1.1", "http://2.1", "http://3.1"]]
    assert serving_meanwhile[4] is EngineState.SERVING, "one that the router has serves at once"
    wait_until(owner.lacks_weights)
    wait_until(lambda: [record.name.generation for record in owner._fleet.records()] == [1, 2, 1, 1, 0, 1])
    assert [state is EngineState.SERVING for state in states(owner)] == [True, False, True, True, True, False]
    assert ("remove", ["http://1.1"]) in owner.events and owner.deaths("default") == 6


def test_an_engine_whose_process_is_gone_when_routers_ask_for_its_port_keeps_no_other_from_serving(
    make_owner, monkeypatch
):
    owner = serving(make_owner(engines=4, prefill_num_servers=2, use_fault_tolerance=True))
    for number in range(2):
        owner.outcomes["end", EngineName(number)] = died(f"engine {number} died")
    wait_until(lambda: states(owner)[:2] == [EngineState.STALE] * 2)
    workers = owner._engines.workers
    with monkeypatch.context() as lost:
        gone = {EngineName(0, 1): RunError("engine 0 was ended")}
        lost.setattr(owner._engines, "workers", lambda urls: workers(urls) | gone)
        owner.begin_push_to_stale()
        owner.end_push([EngineName(0, 1), EngineName(1, 1)], 1, {})
    assert states(owner)[1] is EngineState.SERVING and ("add", ["http://1.1"]) in owner.events
    wait_until(lambda: owner._fleet.record(0).name == EngineName(0, 2))
    assert owner.deaths("default") == 3


def test_a_run_does_not_begin_without_one_of_its_engines(make_owner, monkeypatch):
    owner = make_owner(prefill_num_servers=1, process=Process())
    owner.start()
    monkeypatch.setattr(owner._engines, "workers", lambda urls: dict.fromkeys(urls, RunError("engine 0 was ended")))
    with pytest.raises(RunError, match="^engine 0 was ended$"):
        owner.wait_ready()
    assert not any(event[0] == "add" for event in owner.events)


def test_a_router_has_more_time_for_more_engines_that_start(make_owner, monkeypatch):
    """It asks each what it is; with a minute for hundreds on a busy machine, those that come last would count as dead."""
    limits = []
    for engines in (1, 512):
        owner = make_owner(engines=engines)
        owner.start()
        monkeypatch.setattr(
            owner.routers["default"], "add_workers", lambda workers, timeout, key: limits.append(timeout)
        )
        owner.wait_ready()
    assert limits == [60.25, 188.0]


def test_a_router_has_a_moment_to_forget_an_engine_that_still_runs_and_a_minute_when_it_is_ended(
    make_owner, monkeypatch
):
    """It may wait for requests that the engine has, which end with the engine."""
    owner, limits = serving(make_owner(use_fault_tolerance=True)), []
    monkeypatch.setattr(owner.routers["default"], "remove_workers", lambda urls, timeout: limits.append(timeout))
    owner.outcomes["end", FIRST] = died()
    wait_until(owner.lacks_weights)
    assert limits == [10.0, 60.0]


def test_what_a_push_says_of_a_life_that_ended_meanwhile_is_late(make_owner):
    owner = serving(make_owner(use_fault_tolerance=True))
    _, names = owner.begin_push()
    owner.outcomes["end", FIRST] = died()
    wait_until(owner.lacks_weights)
    owner.end_push(names, 2, {0: "its connections are lost"})
    assert owner.begin_push_to_stale() == (2, [SECOND]) and owner.deaths("default") == 1
