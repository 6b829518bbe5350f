"""How the manager starts and ends, and what the driver's side of it waits for, and how long; without Ray."""

import asyncio
import contextlib
import gc
import math
import sys
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from slime.observability import waiting
from slime.ray import rollout_manager
from slime.ray.driver import RunLength
from slime.ray.rollout_manager import RolloutManager, RolloutTurns
from slime.ray.train_group import TrainGroup
from slime.serving.fleet import EngineName, EngineSnapshot, EngineState, FleetSnapshot
from slime.utils.async_utils import get_async_loop
from slime.utils.errors import RunError
from slime.utils.plugin_loader import EndingRaised
from slime.utils.run_values import with_run_values
from tests.support.models.args import parse

STARTING = "the manager's start"
DEATH = "the first death of something that serves"


@pytest.fixture(autouse=True)
def the_process_stays_as_it_is(monkeypatch):
    monkeypatch.setattr("slime.ray.rollout_manager.configure_logger", lambda level: None)
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)


def test_samples_are_not_looked_through_for_garbage_at_every_few_objects(tmp_path):
    gc.set_threshold(700, 10, 10)
    RolloutManager(parse(tmp_path))
    assert gc.get_threshold() == (50_000, 10, 10)


def test_the_manager_falls_silent_before_its_engines_end(tmp_path, monkeypatch):
    """Requests that lose their engines, and groups that are given up, are no news at the end of a run."""
    events = []
    monkeypatch.setattr("logging.disable", lambda level: events.append("silent"))
    manager = RolloutManager(parse(tmp_path))
    manager._serving = SimpleNamespace(
        leave_given_router=lambda: events.append("leave"), shutdown=lambda: events.append("end"), routers={}
    )
    manager._shutdown()
    assert events == ["leave", "end"]
    events.clear()
    asyncio.run(manager.shutdown())
    assert events == ["leave", "silent", "end"]


@pytest.mark.parametrize("error", [None, RunError("engine 0 died")])
def test_who_waits_for_a_death_hears_of_it_or_of_the_end(tmp_path, error):
    manager, ended = RolloutManager(parse(tmp_path)), Future()
    manager._serving = SimpleNamespace(ended=ended)

    async def wait():
        waiting = asyncio.create_task(manager.wait_for_death())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        ended.set_result(None) if error is None else ended.set_exception(error)
        return await asyncio.gather(waiting, return_exceptions=True)

    assert asyncio.run(wait()) == [error]


@pytest.mark.parametrize(
    ("answers", "working"),
    [
        # The engine that prefilled has died. What the other ones have from it, they finish.
        ({"decode": True, "new prefill": False}, True),
        ({"decode": False, "new prefill": False}, False),
        ({"decode": RunError("no answer within 10 s"), "new prefill": False}, True),
        # The engines that decode have died: what has been read nobody goes on with.
        ({"prefill": True, "new decode": False}, False),
        # A model without an engine, and one whose engine is checked because a request failed.
        ({"regular": True, "new regular": False}, True),
        ({"doubted regular": True, "new regular": False}, True),
    ],
)
def test_requests_that_engines_can_finish_are_work_where_others_find_no_engine(tmp_path, monkeypatch, answers, working):
    monkeypatch.setattr("slime.serving.engines.wait_for_each", lambda refs, name, limit: refs)

    def engine(number, kind, answer):
        state = {"new": EngineState.STALE, "doubted": EngineState.SUSPECT}.get(kind.split()[0], EngineState.SERVING)
        handle = SimpleNamespace(has_requests=SimpleNamespace(remote=lambda: answer))
        return EngineSnapshot(EngineName(number), state, 1, handle, 1, number, number, kind.split()[-1])

    engines = [engine(number, kind, answer) for number, (kind, answer) in enumerate(answers.items())]
    manager = RolloutManager(parse(tmp_path))
    assert not asyncio.run(manager.is_working())
    manager._serving = SimpleNamespace(
        is_serving=lambda: False, is_settled=lambda: True, engines=lambda: FleetSnapshot(1, tuple(engines))
    )
    assert asyncio.run(manager.is_working()) is working
    # Until a push would begin at once, more may be begun.
    manager._serving.is_settled = lambda: False
    assert asyncio.run(manager.is_working())
    # The run ends, and need not wait for that.
    manager.args.max_weight_staleness = 1
    assert asyncio.run(manager.is_working()) is working
    manager._serving.is_serving = lambda: True
    assert asyncio.run(manager.is_working())


class NotEnded:
    """Stands in for the end of the engines, which does not come: `look` is called in the place of each wait for it."""

    def __init__(self, look):
        self._look = look

    def result(self, timeout):
        self._look()
        raise TimeoutError


@pytest.mark.parametrize(
    ("words", "killed_at"),
    [
        (("--ci-test", "--use-fault-tolerance"), 2),
        (("--ci-test",), None),
        (("--use-fault-tolerance",), None),
        (("--ci-test", "--use-fault-tolerance", "--rollout-external-engine-addrs", "10.0.0.1:30000"), None),
    ],
)
def test_a_test_run_that_is_to_outlive_an_engine_kills_one_and_waits_for_the_next(
    tmp_path, monkeypatch, words, killed_at
):
    """Once, and never one that others started."""
    events, lives = [], iter([[1], [1], [], [2]])

    def engines():
        generation = next(lives, [2]) if ("killed", 0) in events else [1]
        crash = SimpleNamespace(remote=lambda: events.append(("killed", 0)))
        handle = SimpleNamespace(crash=crash)
        found = [EngineSnapshot(EngineName(0, life), EngineState.STALE, None, handle, 1, 0, 0) for life in generation]
        return FleetSnapshot(1, (*found, EngineSnapshot(EngineName(1, 7), EngineState.SERVING, 1, None, 1, 1, 1)))

    monkeypatch.setattr(rollout_manager, "wait_for", lambda ref, name, limit: ref)
    manager = RolloutManager(parse(tmp_path, *words))
    ended = NotEnded(lambda: events.append("looked in vain"))
    manager._serving = SimpleNamespace(engines=engines, generating=contextlib.nullcontext, ended=ended)
    manager._pipeline = SimpleNamespace(generate=lambda *told: events.append(told))
    for rollout_id in range(4):
        asyncio.run(manager.generate(rollout_id, trained_as=7))
    fault = [("killed", 0), *["looked in vain"] * 3]
    assert events == [event for number in range(4) for event in (*(fault if number == killed_at else ()), (number, 7))]


@pytest.mark.parametrize("ended", [True, False])
def test_a_test_run_ends_where_nothing_takes_the_place_of_the_engine_it_killed(tmp_path, monkeypatch, ended):
    now, victim = [0.0], EngineName(0)
    crash = SimpleNamespace(remote=lambda: None)
    snapshot = EngineSnapshot(victim, EngineState.SERVING, 1, SimpleNamespace(crash=crash), 1, 0, 0)
    monkeypatch.setattr(rollout_manager, "wait_for", lambda ref, name, limit: ref)
    monkeypatch.setattr(rollout_manager, "time", SimpleNamespace(monotonic=lambda: now[0]))
    manager = RolloutManager(parse(tmp_path, "--ci-test", "--use-fault-tolerance"))
    end = Future() if ended else NotEnded(lambda: now.append(now.pop() + 600.0))
    if ended:
        end.set_exception(RunError("engine 0 is given up"))
    manager._serving = SimpleNamespace(
        engines=lambda: FleetSnapshot(1, (snapshot,)), generating=contextlib.nullcontext, ended=end
    )
    with pytest.raises(
        RunError, match="given up" if ended else "^--ci-test: nothing took the place of engine 0 within"
    ):
        asyncio.run(manager.generate(5))


def test_user_functions_find_address_and_key_of_the_router(tmp_path, monkeypatch):
    routers = {name: SimpleNamespace(ip="::1", port=port) for name, port in (("actor", 3000), ("judge", 3001))}
    owner = SimpleNamespace(start=lambda: routers, api_key="made up")
    monkeypatch.setattr("slime.ray.rollout_manager.ServingOwner", lambda *arguments: owner)
    parsed = with_run_values(parse(tmp_path), log_dir=str(tmp_path))
    manager = RolloutManager(parsed)
    manager._start_serving(None)
    args = manager.args
    assert args.sglang_model_routers == {"actor": ("[::1]", 3000), "judge": ("[::1]", 3001)}
    assert parsed.sglang_router_ip is None, "what was parsed stays"
    assert (args.sglang_router_ip, args.sglang_router_port, args.router_api_key) == ("[::1]", 3000, "made up")


@pytest.mark.parametrize("words", [("--use-distributed-post", "--num-gpus-per-node", "3"), ()])
def test_client_processes_send_from_when_engines_are_there_until_the_manager_ends(tmp_path, monkeypatch, words):
    events, sends = [], []

    class Actors:
        def __init__(self, on_each_node):
            events.append(f"start {on_each_node} on each node")

        def wait_ready(self):
            events.append("clients are ready")
            return "carriers"

        def end(self):
            events.append("end clients")

    routers = {"actor": SimpleNamespace(ip="127.0.0.1", port=3000, url="http://127.0.0.1:3000")}
    owner = SimpleNamespace(
        start=lambda: routers, api_key="made up", routers=routers, wait_ready=lambda: events.append("engines are ready"),
        leave_given_router=lambda: None, shutdown=lambda: events.append("end engines"), host_memory_gib=lambda: 1.5,
    )  # fmt: skip
    monkeypatch.setattr(rollout_manager, "ServingOwner", lambda *arguments: owner)
    monkeypatch.setattr(rollout_manager, "RequestActors", Actors)
    monkeypatch.setattr(
        rollout_manager, "send_through", lambda carriers: (events.append(carriers), sends.append(carriers))
    )
    monkeypatch.setattr("slime.ray.rollout_pipeline.RolloutPipeline", lambda args: SimpleNamespace(length=None))
    manager = RolloutManager(with_run_values(parse(tmp_path, *words), log_dir=str(tmp_path)))
    manager._start("engines")
    assert sends == (["carriers"] if words else [])
    assert manager._pipeline.engine_memory() == 1.5
    manager._shutdown()
    if words:
        assert events[0] == "start 3 on each node" and events[1:3] == ["engines are ready", "clients are ready"]
        # What is under way goes on with the engines, which end last.
        assert events[3:] == ["carriers", None, "end clients", "end engines"]
    else:
        assert events == ["engines are ready", "end engines"]


def test_a_manager_without_engines_generates_saves_and_goes_on(tmp_path, monkeypatch):
    """Its methods as the driver calls them: data are loaded at the start, a state is there after a rollout."""
    (tmp_path / "mine.py").write_text(
        "from slime.rollout.draws import draw_groups\n"
        "def generate_rollout(args, rollout_id, data_source, evaluation=False):\n"
        "    groups = draw_groups(args, data_source, args.rollout_batch_size, rollout_id)\n"
        "    for sample in sum(groups, []):\n"
        "        sample.tokens, sample.response_length, sample.reward = [1, 2], 1, 1.0\n"
        "    return groups\n"
    )
    directories = ["--save", str(tmp_path / "out"), "--load", str(tmp_path / "out"), "--save-interval", "1"]
    path = str(tmp_path / "mine.py")
    args = parse(tmp_path, "--debug-train-only", "--rollout-function-path", path, *directories)
    monkeypatch.setattr("ray.put", lambda value: value)

    async def main():
        first, second = RolloutManager(args), RolloutManager(args)
        started = await first.start(None)
        rollout = await first.generate(0)
        assert await first.progress("generation of rollout 0") is None
        await first.save(0)
        await second.start(None)
        await second.load(0)
        return started, rollout, await second.generate(1), await first.generate(1)

    started, rollout, resumed, following = asyncio.run(main())
    assert started.rollouts_per_epoch == 2 and started.num_rollout == args.num_rollout
    assert [metrics["rollout/step"] for metrics, _ in rollout.logged] == [0]
    indices = [result.shards[0].inner["sample_indices"].tolist() for result in (rollout, resumed, following)]
    assert indices == [list(range(8)), list(range(8, 16)), list(range(8, 16))]


@pytest.mark.parametrize("method, arguments", [("load", [3]), ("save", [3]), ("generate", [3]), ("evaluate", [3])])
def test_a_call_that_wants_to_end_the_process_is_one_that_fails(tmp_path, method, arguments):
    """The event loop of its group, which has other calls, goes on."""
    manager, leave = RolloutManager(parse(tmp_path)), lambda *arguments, **keywords: sys.exit("x")
    manager._pipeline = SimpleNamespace(
        states=SimpleNamespace(load=leave, save=leave), generate=leave, evaluate=leave, progress=lambda name: name
    )

    async def main():
        with pytest.raises(EndingRaised, match=r"SystemExit\('x'\)"):
            await getattr(manager, method)(*arguments)
        return await manager.progress("goes on")

    assert asyncio.run(main()) == "goes on"


def test_a_rollout_that_sleeps_is_no_manager_that_hangs(tmp_path, monkeypatch):
    """The manager says how far a call is while `sleep` waits for ever, and does not while something blocks the event loop in
    which all others generate."""
    ended, blocked = threading.Event(), threading.Event()
    monkeypatch.setattr("slime.rollout.sglang_rollout.router_urls", lambda args: ended.is_set() and 1 / 0 or {})
    monkeypatch.setattr("slime.rollout.sglang_rollout.time.sleep", lambda seconds: ended.wait(60))
    manager = RolloutManager(parse(tmp_path, "--rollout-function-path", "slime.rollout.sleep_rollout.sleep"))

    async def main():
        await manager.start(None)
        sleeping = asyncio.create_task(manager.generate(0))
        try:
            await asyncio.wait_for(manager.progress("generation of rollout 0"), 60)
            get_async_loop().call_soon_threadsafe(blocked.wait, 60)
            question = asyncio.create_task(manager.progress("generation of rollout 0"))
            done, _ = await asyncio.wait([question], timeout=0.2)
            assert not done
            blocked.set()
            assert await asyncio.wait_for(question, 60) is None and not sleeping.done()
        finally:
            blocked.set()
            ended.set()
        with pytest.raises(ZeroDivisionError):
            await sleeping

    asyncio.run(main())


async def settled():
    """Every task has done what it can do without others."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_rollouts_take_turns_in_their_order_and_none_begins_in_a_pause():
    async def main():
        turns, begun, ends = RolloutTurns(), [], {number: asyncio.Event() for number in range(3, 7)}

        async def rollout(number, after):
            async with turns.of(number, after):
                begun.append(number)
                await ends[number].wait()

        # They arrive in another order than they were asked for.
        tasks = [asyncio.create_task(rollout(number, after)) for number, after in ((5, 4), (4, 3), (3, None), (6, 5))]
        await settled()
        assert begun == [3]
        pause = asyncio.create_task(turns.pause())
        await settled()
        assert not pause.done()
        ends[3].set()
        await pause
        await settled()
        assert begun == [3], "between two rollouts nothing begins"
        await turns.go_on()
        ends[4].set()
        await settled()
        assert begun == [3, 4, 5]
        tasks[0].cancel()
        await settled()
        assert begun == [3, 4, 5, 6], "one that fails gives its turn on"
        ends[6].set()
        await asyncio.gather(*tasks, return_exceptions=True)
        await turns.pause()

    asyncio.run(main())


@pytest.fixture
def make_client(monkeypatch):
    """A client whose manager is no process: its start is a reference that never has a result."""
    events = []
    manager = type("Manager", (SimpleNamespace,), {"__hash__": object.__hash__})(
        start=SimpleNamespace(remote=lambda engines: events.append(("manager", engines)) or STARTING),
        wait_for_death=SimpleNamespace(remote=lambda: DEATH),
    )
    asked = {}
    actor_class = SimpleNamespace(
        options=lambda **options: asked.update(options) or SimpleNamespace(remote=lambda args: manager)
    )
    monkeypatch.setattr(
        rollout_manager.ray, "remote", lambda **options: lambda of: asked.update(options) or actor_class
    )
    monkeypatch.setattr(waiting.ray, "wait", lambda refs, **options: ([], refs))
    engines = SimpleNamespace(start_all=lambda: events.append("engines"))
    monkeypatch.setattr(
        rollout_manager, "engines_of_run", lambda *arguments: asked.update(of_engines=arguments) or engines
    )

    def make(places=(), **flags):
        values = {
            "async_buffer_size": 1, "engine_start_timeout": 600.0, "http_request_timeout": 60.0, "has_trainer": True,
            "has_engines": True, "train_env_vars": {}, "rollout_external_engine_infos": None, "rollout_external": False,
            "log_dir": "/logs", "rollout_data_transport": "object-store",
        }  # fmt: skip
        args = SimpleNamespace(**{**values, **flags})
        client = rollout_manager.RolloutClient(args, None, places)
        client.options, client.events = asked, events
        return client

    return make


def test_manager_and_engines_get_what_the_training_ranks_get(make_client, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    client = make_client()
    of_manager = client.options["runtime_env"]["env_vars"]
    flags = {
        "actor_num_gpus_per_node": 1, "deterministic_mode": False, "overlap_moe_expert_parallel_comm": False,
        "train_backend": "megatron",
    }  # fmt: skip
    of_ranks, _ = TrainGroup(SimpleNamespace(**vars(client._args), **flags), None, [(0, 0)])._environments()
    names = {name for name in of_manager if name.startswith(("NCCL_", "SLIME_", "RAY_"))}
    assert {name: of_manager[name] for name in names} == {name: of_ranks.get(name) for name in names}
    assert names >= {"NCCL_SOCKET_IFNAME", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE", "RAY_USE_UVLOOP"}


@pytest.mark.parametrize("transport, beside", [("object-store", set()), ("nixl", {"_ray_system"})])
def test_memory_of_the_manager_is_freed_while_it_generates(make_client, transport, beside):
    """Ray calls the manager for that, in a concurrency group of that name: without it nothing is ever freed."""
    client = make_client(rollout_data_transport=transport)
    assert client.options["concurrency_groups"].keys() - {"generate", "evaluate", "control"} == beside
    # The rollout under way, those ahead of it, and the order to go on after a pause, for which they may all be waiting.
    assert client.options["concurrency_groups"]["generate"] >= client._args.async_buffer_size + 2


@pytest.mark.parametrize(
    "flags, starts", [({}, ["engines"]), ({"rollout_external": True}, []), ({"has_engines": False}, None)]
)
def test_engines_of_the_run_start_before_the_manager_does(make_client, flags, starts):
    """And with its environment; those of others are asked by it, and a run without engines has none."""
    client = make_client([(0, 0)], **flags)
    *before, (_, engines) = client.events
    assert (before, engines is None) == (starts or [], starts is None)
    if engines is not None:
        assert client.options["of_engines"][1:] == (
            None, [(0, 0)], "/logs", client.options["runtime_env"]["env_vars"],
        )  # fmt: skip


def test_a_start_that_takes_too_long_ends_the_wait(make_client, monkeypatch):
    """Engines have the time that their flag gives them, and data theirs."""
    now = [1000.0]

    def quarter_of_a_minute(refs, **options):
        now[0] += 15.0
        return [], refs

    monkeypatch.setattr(waiting.ray, "wait", quarter_of_a_minute)
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    client = make_client(engine_start_timeout=300.0)
    limit = 300.0 + rollout_manager._DATA_SECONDS
    with pytest.raises(RunError, match=f"^start of engines, router and data: no answer within {limit:.0f} s "):
        client.wait_ready()
    assert limit < now[0] - 1000.0 <= limit + 15.0
    assert client._length is None and client.start_deadline == limit


@pytest.mark.parametrize(("devices", "places", "others"), [(1, 1, None), (4, 4, None), (3, 0, ("info",) * 3)])
def test_a_push_waits_for_all_that_may_become_of_engines_and_not_for_ever(
    make_client, monkeypatch, devices, places, others
):
    """Each may be doubted for the time of a start, die, and have three successors that take theirs; one after another."""
    places = [(device, device) for device in range(places)]
    client = make_client(places=places, engine_start_timeout=3600.0, rollout_external_engine_infos=others)
    client._manager.begin_push = SimpleNamespace(remote=lambda: "engines")
    now, answers_at = [0.0], [devices * 4 * (3600.0 + 60.0)]

    def five_minutes(refs, **options):
        now[0] += 300.0
        return (["engines"] if now[0] >= answers_at[0] else []), refs

    monkeypatch.setattr(waiting.ray, "wait", five_minutes)
    monkeypatch.setattr(waiting.ray, "get", lambda ref, timeout: "the living")
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    assert client.begin_push() == "the living" and now[0] >= answers_at[0]
    now[0], answers_at[0] = 0.0, float("inf")
    with pytest.raises(RunError, match="^the engines for a push: no answer within "):
        client.begin_push()


def test_what_is_ready_is_awaited_once(make_client, monkeypatch):
    asked, watched = [], []
    length = RunLength(6, 3)
    monkeypatch.setattr(rollout_manager, "wait_for", lambda *arguments: asked.append(arguments) or length)
    monkeypatch.setattr(rollout_manager, "watch", watched.extend)
    monkeypatch.setattr(waiting, "_names", {})
    monkeypatch.setattr(rollout_manager, "watch_actors", lambda actors, silence_s: watched.append((*actors, silence_s)))
    client = make_client()
    assert client.wait_ready() is client.wait_ready() is length
    assert asked == [(STARTING, "start of engines, router and data", client.start_deadline)]
    assert watched == [DEATH, (client._manager, rollout_manager._CONTROL_DEADLINE_SECONDS)]


def test_calls_that_are_under_way_are_awaited_one_by_one_and_ask_for_their_own_progress(make_client, monkeypatch):
    client, asked = make_client(has_engines=True, use_fault_tolerance=False), []

    def method(name):
        return SimpleNamespace(
            remote=lambda *arguments, **options: asked.append((name, *arguments)) or f"{name} result"
        )

    client._manager.generate, client._manager.evaluate = method("generate"), method("evaluate")
    client._manager.progress = method("progress")

    def wait_for(ref, name, deadline, on_poll):
        on_poll()
        asked.append((ref, name, deadline))
        return [ref]

    monkeypatch.setattr(rollout_manager, "wait_for", wait_for)
    rollout, evaluation = client.generate(4), client.evaluate(3)
    assert asked == [("generate", 4, None, None), ("evaluate", 3)], "nobody waits yet"
    asked.clear()
    assert evaluation.result() == ["evaluate result"] and rollout.result() == ["generate result"]
    assert asked == [
        ("progress", "evaluation after rollout 3"), ("evaluate result", "evaluation after rollout 3", math.inf),
        ("progress", "generation of rollout 4"), ("generate result", "generation of rollout 4", math.inf),
    ]  # fmt: skip


@pytest.mark.parametrize("last", [None, ("rollout 4", 3, 8)])
def test_a_call_goes_on_as_long_as_the_manager_says_how_far_it_is_and_ends_with_the_flag_where_it_does_not(
    make_client, monkeypatch, last
):
    """How long the call itself takes does not count."""
    client = make_client(has_engines=True, use_fault_tolerance=False, http_request_timeout=60.0)
    limit = 4 * 60.0 + 600.0
    now, answered_until, is_done, questions = [0.0], [10 * limit], [False], []
    client._manager.generate = SimpleNamespace(remote=lambda *arguments: "generate")
    client._manager.progress = SimpleNamespace(remote=lambda name: questions.append(name) or "progress")

    def wait(refs, **options):
        now[0] += 0.25 if refs == ["generate"] else 0.0
        answered = {"progress": now[0] <= answered_until[0], "generate": is_done[0]}
        return [ref for ref in refs if answered[ref]], refs

    monkeypatch.setattr(waiting.ray, "wait", wait)
    monkeypatch.setattr(waiting.ray, "get", lambda ref, timeout: {"progress": last, "generate": "samples"}[ref])
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    with pytest.raises(
        RunError, match=r"^generation of rollout 4: .* for 840 s .*raise --http-request-timeout$"
    ) as late:
        client.generate(4).result()
    assert ("3 of 8 samples" in str(late.value)) is (last is not None)
    assert answered_until[0] + limit < now[0] < answered_until[0] + limit + 1.0
    assert len(questions) > 100, "one is asked when the one before is answered"
    answered_until[0], is_done[0] = math.inf, True
    assert client.generate(5).result() == "samples"


@pytest.mark.parametrize("tolerant", [False, True])
def test_engines_that_lack_weights_get_them_while_a_call_is_awaited(make_client, monkeypatch, tolerant):
    """They are asked for, several times a second, one question at a time; nobody else could bring them meanwhile."""
    client, events = make_client(has_engines=True, use_fault_tolerance=tolerant), []
    answers = {"first": False, "second": True}
    questions = iter(answers)
    method = lambda result: SimpleNamespace(remote=lambda *arguments, **options: result())  # noqa: E731
    client._manager.generate, client._manager.progress = method(lambda: "samples"), method(lambda: "progress")
    client._manager.lacks_weights = method(lambda: events.append("asked") or next(questions))
    client.bring_weights_by(lambda: events.append("brought"))
    monkeypatch.setattr(rollout_manager.ray, "wait", lambda refs, timeout: (list(refs), []))
    monkeypatch.setattr(rollout_manager.ray, "get", lambda ref, timeout: answers.get(ref))

    def wait_for(ref, name, deadline, on_poll):
        on_poll()
        on_poll()

    monkeypatch.setattr(rollout_manager, "wait_for", wait_for)
    client.generate(0).result()
    assert events == (["asked", "asked", "brought"] if tolerant else [])


@pytest.mark.parametrize("asks", ["progress", "lacks_weights"])
def test_a_manager_that_dies_is_told_by_the_wait_for_it_and_not_by_a_question_beside_it(make_client, monkeypatch, asks):
    """The question is heard of first: the call that is awaited ends a moment later."""
    client = make_client(has_engines=True, use_fault_tolerance=asks == "lacks_weights")
    client.bring_weights_by(lambda: None)
    for method in ("generate", "progress", "lacks_weights"):
        setattr(client._manager, method, SimpleNamespace(remote=lambda *arguments, name=method: name))
    turns = []

    def wait(refs, **options):
        if "generate" not in refs:
            return ([asks] if refs == [asks] else []), refs
        turns.append(refs)
        return (["generate"] if len(turns) > 1 else []), refs

    def get(ref, timeout):
        raise RayActorError(None, "The actor died: killed")

    monkeypatch.setattr(waiting.ray, "wait", wait)
    monkeypatch.setattr(waiting.ray, "get", get)
    with pytest.raises(RunError, match=r"^generation of rollout 4: a process of the run died\."):
        client.generate(4).result()
    assert len(turns) == 2


@pytest.mark.parametrize("fails", [False, True])
def test_between_rollouts_one_that_is_under_way_is_awaited_and_the_next_goes_on_afterwards(
    make_client, monkeypatch, fails
):
    client, events = make_client(has_engines=True, use_fault_tolerance=False), []
    for method in ("generate", "end_push", "pause_between_rollouts", "go_on_with_rollouts", "progress"):
        remote = lambda *arguments, name=method: events.append((name, *arguments)) or name  # noqa: E731
        setattr(client._manager, method, SimpleNamespace(remote=remote))
    monkeypatch.setattr(
        rollout_manager, "wait_for", lambda ref, *rest, on_poll=None: on_poll and events.append((ref, "is there"))
    )
    client.end_push([], 7, {})
    client.generate(3)
    client.generate(4, pushes_ahead=2)
    events.remove(("end_push", [], 7, {}))
    with contextlib.suppress(RunError), client.between_rollouts():
        events.append("push")
        if fails:
            raise RunError("the push failed")
    assert events == [
        ("generate", 3, None, 7), ("generate", 4, 3, 9), ("pause_between_rollouts",), ("pause_between_rollouts", "is there"),
        "push", ("go_on_with_rollouts",),
    ]  # fmt: skip
