"""Two models behind routers of their own: the trainer's, and a frozen one beside it. Without processes, as `test_owner.py`."""

import threading

import pytest

from slime.scheduling.device_turns import Holds
from slime.scheduling.served_models import ModelServing, ServerGroup
from slime.serving import model_routers
from slime.serving.fleet import EngineName, EngineState
from slime.utils.errors import RunError
from tests.support.processes.owned_engines import KILLED, Process, RayTaskError, died, ready, states
from tests.support.processes.waiting import wait_until

ACTOR, JUDGE = EngineName(0), EngineName(1)


@pytest.fixture
def make_pair(make_owner):
    """An owner of one engine of `actor` and one of the frozen model `judge`."""

    def make(**flags):
        group = ServerGroup("regular", 1, 1, {})
        models = [ModelServing("actor", "/actor", True, (group,)), ModelServing("judge", "/judge", False, (group,))]
        return make_owner(sglang_config="serving.yaml", served_models=models, **flags)

    return make


def pushed(owner, version=1):
    _, names = owner.begin_push()
    owner.end_push(names, version, {})
    owner.events.clear()
    return names


def test_each_model_has_its_router_and_a_frozen_one_serves_at_once(make_pair):
    owner = ready(make_pair(process=Process()))
    assert list(owner.routers) == ["actor", "judge"]
    assert owner.events == [
        "router is ready", "router 1 is ready", ("only", ["http://0.0"]), ("add", ["http://0.0"]), ("only 1", ["http://1.0"]),
        ("add 1", ["http://1.0"]),
    ]  # fmt: skip
    assert states(owner) == [EngineState.STALE, EngineState.SERVING]
    assert owner.is_serving("judge") and not owner.is_serving("actor") and not owner.is_serving()
    owner.events.clear()
    owner.shutdown()
    assert owner.events == ["engines", "router", "router 1"]


def test_pushes_go_to_the_trained_model_alone(make_pair):
    owner = ready(make_pair())
    for version in (1, 2):
        assert pushed(owner, version) == [ACTOR]
        records = owner._fleet.records()
        assert [(record.state, record.weight_version) for record in records] == [
            (EngineState.SERVING, version), (EngineState.SERVING, None),
        ]  # fmt: skip
        assert owner.is_serving()


def test_s7_each_push_goes_to_all_models_that_are_trained(make_owner):
    group = ServerGroup("regular", 1, 1, {})
    models = [ModelServing(name, "/actor", name != "judge", (group,)) for name in ("actor", "judge", "twin")]
    owner = ready(make_owner(engines=3, sglang_config="serving.yaml", served_models=models))
    for version in (1, 2):
        assert pushed(owner, version) == [EngineName(0), EngineName(2)]
        assert [record.weight_version for record in owner._fleet.records()] == [version, None, version]
    assert all(owner.is_serving(name) for name in ("actor", "judge", "twin"))


def test_the_router_of_a_second_model_is_watched_too(make_pair):
    owner = ready(make_pair(process=Process()))
    owner.routers["judge"].process = process = Process()
    process.status = 3
    with pytest.raises(RunError, match="^the router died: exit code 3"):
        owner.ended.result(60)


def test_the_routers_of_all_models_come_back(make_pair):
    owner = make_pair(process=Process(), use_fault_tolerance=True)
    assert [router.comes_back for router in owner.start().values()] == [True, True]


def test_f3_a_frozen_engine_that_dies_is_replaced_at_its_own_router_and_keeps_no_push_waiting(make_pair):
    owner = ready(make_pair(use_fault_tolerance=True))
    pushed(owner)
    # Its successor does not start for a while.
    owner.outcomes["start", EngineName(1, 1)] = None
    del owner.outcomes["start", EngineName(1, 1)]
    start = owner._engines.start

    def hold_back(name):
        return ("start", name) if name.engine_id == 1 else start(name)

    owner._engines.start = hold_back
    owner.outcomes["end", JUDGE] = RayTaskError(RunError(KILLED))
    wait_until(lambda: states(owner)[1] is EngineState.STARTING)
    assert owner.deaths("judge") == 1 and owner.deaths("actor") == 0
    assert owner.is_serving("actor") and owner.is_serving() and not owner.is_serving("judge")
    assert not owner.lacks_weights() and pushed(owner, 2) == [ACTOR], "a push does not wait for it"
    owner.outcomes["start", EngineName(1, 1)] = "http://1.1"
    wait_until(lambda: owner.is_serving("judge"))
    assert owner.events == [("add 1", ["http://1.1"])]
    assert owner._fleet.record(1).weight_version is None and not owner.lacks_weights()
    assert owner.begin_push_to_stale() == (2, [])


def test_a_failed_request_has_the_engines_of_its_model_looked_after(make_pair):
    owner = ready(make_pair(use_fault_tolerance=True))
    pushed(owner)
    with owner.generating():
        owner.doubt_all("judge", "POST failed")
        assert not owner.is_decided("judge") and owner.is_decided("actor")
        owner.outcomes["check", JUDGE] = [True]
        wait_until(lambda: owner.is_decided("judge"))


def test_a_frozen_model_that_is_given_up_ends_the_run(make_pair):
    owner = ready(make_pair(use_fault_tolerance=True))
    for generation in range(1, 9):
        owner.outcomes["start", EngineName(1, generation)] = died("no room")
    owner.outcomes["end", JUDGE] = died()
    with pytest.raises(RunError, match="no other engine does its work"):
        owner.ended.result(60)


def colocated(make_pair, ranks, **flags):
    """Both engines have GPUs of the run from the first on, of which training ranks have the first `ranks`."""
    shared = {"colocate": True, "world_size": ranks, "has_engines": True, **flags}
    return ready(make_pair(**shared))


def test_a_frozen_engine_on_devices_of_the_trainer_sleeps_and_serves_again_without_a_push(make_pair):
    owner = colocated(make_pair, ranks=2)
    owner.hold(Holds.NOTHING)
    assert states(owner) == [EngineState.ASLEEP] * 2
    owner.hold(Holds.WEIGHTS)
    assert pushed(owner) == [ACTOR] and states(owner) == [EngineState.SERVING, EngineState.STALE]
    owner.hold(Holds.ALL)
    assert owner.events == [("wake_caches", ACTOR, JUDGE), ("continue_generation", JUDGE)]
    assert states(owner) == [EngineState.SERVING] * 2


def test_a_frozen_engine_beside_the_trainer_never_sleeps_and_its_successor_waits_for_nobody(make_pair):
    owner = colocated(make_pair, ranks=1, use_fault_tolerance=True)
    pushed(owner)
    owner.hold(Holds.NOTHING)
    assert states(owner) == [EngineState.ASLEEP, EngineState.SERVING] and owner.events == [("sleep", ACTOR)]
    owner.outcomes["end", JUDGE] = died()
    wait_until(lambda: owner._fleet.record(1).name == EngineName(1, 1) and owner.is_serving("judge"))
    assert owner._cleared == [] and states(owner)[0] is EngineState.ASLEEP
    owner.events.clear()
    for holds in (Holds.WEIGHTS, Holds.ALL):
        owner.hold(holds)
    assert owner.events == [("wake_weights", ACTOR), ("wake_caches", ACTOR)]


def test_a_frozen_engine_that_comes_back_while_the_others_wake_is_admitted_once(make_pair, monkeypatch):
    """By the watch: whoever wakes the others meanwhile leaves it alone, and undoes nothing."""
    owner = colocated(make_pair, ranks=2, use_fault_tolerance=True)
    pushed(owner)
    owner.hold(Holds.NOTHING)
    owner.outcomes["end", JUDGE] = died()
    wait_until(lambda: owner._cleared == [JUDGE])
    owner.events.clear()
    asked, told, go_on = [], threading.Event(), threading.Event()

    def add_workers(workers, timeout, key):
        asked.extend(worker.url for worker in workers)
        told.set()
        assert go_on.wait(60)

    monkeypatch.setattr(owner.routers["judge"], "add_workers", add_workers)
    owner.hold(Holds.WEIGHTS)
    assert told.wait(60) and pushed(owner, 2) == [ACTOR]
    owner.hold(Holds.ALL)
    assert states(owner) == [EngineState.SERVING, EngineState.STALE]
    go_on.set()
    wait_until(lambda: owner.is_serving("judge"))
    assert asked == ["http://1.1"] and states(owner) == [EngineState.SERVING] * 2
    assert [event for event in owner.events if event[0] == "remove 1"] == [] and owner.deaths("judge") == 1


def test_a_push_between_two_others_waits_until_nobody_has_to_be_waited_for(make_owner):
    """Two models that get weights: what the first one's engine does goes on while the second one's are replaced."""
    group = ServerGroup("regular", 1, 1, {})
    pair = ServerGroup("regular", 2, 1, {})
    models = [ModelServing("actor", "/actor", True, (group,)), ModelServing("twin", "/actor", True, (pair,))]
    owner = make_owner(engines=3, sglang_config="serving.yaml", served_models=models, use_fault_tolerance=True)
    pushed(ready(owner))
    assert owner.is_settled()
    start = owner._engines.start
    owner._engines.start = lambda name: ("start", name) if name == EngineName(2, 1) else start(name)
    owner.outcomes.update({("end", EngineName(1)): died(), ("end", EngineName(2)): died()})
    wait_until(owner.lacks_weights)
    wait_until(lambda: states(owner)[2] is EngineState.STARTING)
    assert owner.is_serving("actor") and not owner.is_serving() and not owner.is_settled()
    owner.outcomes["start", EngineName(2, 1)] = "http://2.1"
    wait_until(owner.is_settled)
    assert states(owner)[1:] == [EngineState.STALE] * 2


def test_the_trainer_waits_for_no_engine_beside_it_before_the_others_sleep(make_pair):
    owner = colocated(make_pair, ranks=1, use_fault_tolerance=True)
    pushed(owner)
    owner._engines.start = lambda name: ("no place", name)
    owner.outcomes["end", JUDGE] = died()
    wait_until(lambda: states(owner)[1] is EngineState.STARTING)
    sleep = threading.Thread(target=owner.hold, args=(Holds.NOTHING,), daemon=True)
    sleep.start()
    sleep.join(60)
    assert not sleep.is_alive() and states(owner) == [EngineState.ASLEEP, EngineState.STARTING]


def test_the_router_of_a_second_model_has_the_key_of_the_engines_where_the_first_ones_is_given(make_pair, monkeypatch):
    """Without a key it would let in whoever finds its address."""
    owner, keys = make_pair(sglang_router_ip="127.0.0.1", router_api_key=None), []
    start_router = model_routers.start_router
    monkeypatch.setattr(
        model_routers, "start_router", lambda args, *rest: keys.append(args.router_api_key) or start_router(args, *rest)
    )
    owner.start()
    assert keys == [None, owner.api_key] and len(owner.api_key) >= 32


def test_a_start_that_fails_ends_the_engines_that_did_start(make_pair):
    owner = make_pair()
    owner.outcomes["start", JUDGE] = died("engine 1 failed to start: exit code 1")
    with pytest.raises(RayTaskError):
        ready(owner)
    assert owner.events[-1] == "engines"


def test_f8_a_router_that_does_not_let_an_engine_go_keeps_no_engine_of_another_model_in_its_own(make_pair):
    """Nobody takes those out later that fail while they are registered: their router would go on asking them."""
    owner = ready(make_pair(error=RunError("workers not removed after 10 s")))
    owner.events.clear()
    with pytest.raises(RunError, match="^workers not removed after 10 s$"):
        owner.routers.remove({ACTOR: "http://0.0", JUDGE: "http://1.0"})
    assert owner.events == [("remove", ["http://0.0"]), ("remove 1", ["http://1.0"])]
