"""How ranks, manager and steps of a run begin and end, without processes."""

import argparse
import asyncio
import contextlib
from types import SimpleNamespace

import pytest
import ray

from slime.observability import waiting
from slime.ray import request_actors, rollout_manager, train_group
from slime.ray.driver import RunLength, RunProgress, StartedRun, StepReport
from slime.ray.rollout_manager import RolloutClient, RolloutManager
from slime.ray.train_group import TrainGroup
from slime.scheduling.device_turns import Holds, Sides
from slime.utils.errors import RunError
from slime.utils.run_values import with_run_values
from tests.support.models.args import parse


class Part:
    """Stands for an actor: notes what it is asked."""

    def __init__(self, told):
        self._told = told

    def __getattr__(self, method):
        return SimpleNamespace(remote=lambda *words: self._told.append((self, method, *words)) or (self, method))


@pytest.fixture
def told(monkeypatch):
    """What parts are asked, and what is done with them, in order. None of them answers."""
    events = []
    monkeypatch.setattr(ray, "wait", lambda refs, **options: events.append(("wait", *refs, options)) or ([], refs))
    monkeypatch.setattr(ray, "kill", lambda part, no_restart: events.append((part, "killed")))
    monkeypatch.setattr(waiting, "_asked", {})
    monkeypatch.setattr(waiting, "_names", {})
    return events


def test_each_rank_lives_in_its_bundle_and_knows_the_device_there(told, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = []

    def options(num_cpus, num_gpus, scheduling_strategy, runtime_env):
        place = scheduling_strategy.placement_group_bundle_index

        def remote(inside, description):
            _, args, *of_rank = ray.cloudpickle.loads(description)
            made.append((place, args.role, *of_rank))
            return Part(told)

        return SimpleNamespace(remote=remote)

    monkeypatch.setattr(train_group.ray, "remote", lambda of: SimpleNamespace(options=options))
    args = argparse.Namespace(
        role="actor", actor_num_gpus_per_node=8, train_env_vars={}, deterministic_mode=False, has_trainer=True,
        has_engines=False, overlap_moe_expert_parallel_comm=False, train_backend="megatron",
    )  # fmt: skip
    group = TrainGroup(args, None, [(5, 3), (7, 1), (2, 6)])
    group.start(after="engines asleep")
    # (bundle, role, rank, number of ranks, device)
    assert made == [(5, "actor", 0, 3, 3), (7, "actor", 1, 3, 1), (2, "actor", 2, 3, 6)]
    ranks = group._actors
    address = (ranks[0], "call")
    assert told == [
        (ranks[0], "call", "rendezvous_address"),
        *((rank, "call_after", "engines asleep", "init", address) for rank in ranks),
    ]
    assert waiting._names == {rank: f"training rank {number}" for number, rank in enumerate(ranks)}


@pytest.mark.parametrize("ids", [[4, 4, 4], [4, 3, 4]])
def test_ranks_that_loaded_different_checkpoints_train_nothing(told, monkeypatch, ids):
    monkeypatch.setattr(train_group, "wait_for_all", lambda refs, *words, **options: ids)
    group = TrainGroup(argparse.Namespace(train_start_timeout=7.0), None, [(0, 0)] * 3)
    if len(set(ids)) == 1:
        assert group.wait_ready() == 4
        return
    with pytest.raises(RunError, match=r"^the training ranks loaded different iterations: \[4, 3, 4\]$"):
        group.wait_ready()


def test_ranks_that_hang_are_killed_when_they_have_had_their_time_to_leave(told):
    group, ranks = TrainGroup(argparse.Namespace(), None, []), [Part(told) for _ in range(2)]
    group._actors = list(ranks)
    waiting.watch_actors(ranks)
    waiting.name_actors({rank: "training rank" for rank in ranks})
    group.dispose()
    limit = {"num_returns": 2, "timeout": train_group._DISPOSE_DEADLINE_SECONDS}
    assert told == [
        *((rank, "leave") for rank in ranks), ("wait", *((rank, "leave") for rank in ranks), limit),
        *((rank, "killed") for rank in ranks),
    ]  # fmt: skip
    assert not group.lives and waiting._asked == waiting._names == {}, "their end is no death"
    told.clear()
    group.dispose()
    assert told == []


def test_a_manager_that_hangs_is_killed_when_it_has_had_its_time_to_end(told, monkeypatch):
    client = RolloutClient.__new__(RolloutClient)
    client._manager, client._death = Part(told), ["its first death"]
    monkeypatch.setattr(waiting, "_watched", ["its first death", "another"])
    waiting.watch_actors([client._manager], 600.0)
    client.dispose()
    assert told == [
        (client._manager, "shutdown"),
        ("wait", (client._manager, "shutdown"), {"timeout": rollout_manager._SHUTDOWN_DEADLINE_SECONDS}),
        (client._manager, "killed"),
    ]
    assert waiting._watched == ["another"] and not waiting._asked, "its end is no death"


@pytest.mark.parametrize(
    ("words", "asks"),
    [
        (("--use-fault-tolerance",), True),
        ((), False),
        (("--use-fault-tolerance", "--rollout-external-engine-addrs", "10.0.0.1:30000"), True),
        # Those engines register by themselves.
        (("--use-fault-tolerance", "--rollout-num-gpus", "0", "--router-api-key", "k"), False),
    ],
)
def test_requests_that_fail_ask_about_the_engines_of_their_own_model(tmp_path, monkeypatch, words, asks):
    routers = {
        name: SimpleNamespace(ip="127.0.0.1", port=port, url=f"http://{name}")
        for name, port in (("actor", 3000), ("judge", 3001))
    }
    owner = SimpleNamespace(
        start=lambda: routers,
        api_key="made up",
        routers=routers,
        leave_given_router=lambda: None,
        shutdown=lambda: None,
    )
    supplies = {}
    monkeypatch.setattr(rollout_manager, "ServingOwner", lambda *arguments: owner)
    monkeypatch.setattr(rollout_manager, "set_engine_supply", supplies.__setitem__)
    monkeypatch.setattr(rollout_manager, "configure_logger", lambda level: None)
    monkeypatch.setattr(rollout_manager, "collect_garbage_rarely", lambda: None)
    manager = RolloutManager(with_run_values(parse(tmp_path, *words), log_dir=str(tmp_path)))
    manager._start_serving("engines")
    found = {url: (supply.owner, supply.model) for url, supply in supplies.items()}
    assert found == ({"http://actor": (owner, "actor"), "http://judge": (owner, "judge")} if asks else {})
    manager._shutdown()
    assert supplies == dict.fromkeys(("http://actor", "http://judge")), "nobody waits for engines that end"


@pytest.fixture
def make_manager(monkeypatch, tmp_path):
    """A manager that has not started; `manager.events` will be what it asks of its two parts, which `failing` names fail."""
    monkeypatch.setattr(rollout_manager, "configure_logger", lambda level: None)
    monkeypatch.setattr(rollout_manager, "collect_garbage_rarely", lambda: None)

    def make(failing=(), *words):
        manager, events = RolloutManager(with_run_values(parse(tmp_path, *words), log_dir=str(tmp_path))), []

        def note(name, *arguments, **options):
            events.append((name, *arguments))
            if name in failing:
                raise RunError(f"{name} failed")

        @contextlib.contextmanager
        def generating():
            events.append("checked")
            try:
                yield
            finally:
                events.append("not checked")

        router = SimpleNamespace(ip="127.0.0.1", port=3000, url="http://127.0.0.1:3000")
        owner = SimpleNamespace(
            start=lambda: {"actor": router}, routers={"actor": router}, api_key="made up", generating=generating,
            wait_ready=lambda: note("engines"), hold=lambda holds: note("hold", holds), host_memory_gib=None,
            leave_given_router=lambda: note("leave"), shutdown=lambda: note("shutdown"),
        )  # fmt: skip
        pipeline = SimpleNamespace(
            length="the length",
            generate=lambda *words: note("generate", *words),
            evaluate=lambda *words, **of: note("evaluate"),
        )
        monkeypatch.setattr(rollout_manager, "ServingOwner", lambda *arguments: owner)
        monkeypatch.setattr("slime.ray.rollout_pipeline.RolloutPipeline", lambda args: note("data") or pipeline)
        manager.events = events
        return manager

    return make


def test_manager_and_actors_that_send_for_it_may_have_many_connections(make_manager, monkeypatch):
    asked = []
    for module in (rollout_manager, request_actors):
        monkeypatch.setattr(module, "allow_many_connections", lambda of=module: asked.append(of))
    make_manager()
    request_actors.RequestActor()
    assert asked == [rollout_manager, request_actors]


@pytest.mark.parametrize("sleep", [True, False])
def test_engines_that_share_devices_sleep_before_the_start_of_the_manager_is_over(make_manager, monkeypatch, sleep):
    """The training ranks wait for that, and take the memory then."""
    monkeypatch.setattr(rollout_manager, "sleeping_sides", lambda args: Sides(trainer=not sleep, engines=sleep))
    manager = make_manager()
    assert asyncio.run(manager.start("engines")) == "the length"
    assert manager.events == [("data",), ("engines",), *[("hold", Holds.NOTHING)] * sleep]


@pytest.mark.parametrize("failing", ["data", "engines"])
def test_a_start_that_fails_leaves_neither_engines_nor_routers(make_manager, failing):
    manager = make_manager([failing])
    with pytest.raises(RunError, match=f"^{failing} failed$"):
        asyncio.run(manager.start("engines"))
    assert manager.events[-3:] == [(failing,), ("leave",), ("shutdown",)]


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("call", ["generate", "evaluate"])
def test_engines_are_checked_while_a_rollout_or_an_evaluation_lasts_however_it_ends(
    make_manager, monkeypatch, call, fails
):
    monkeypatch.setattr(rollout_manager, "sleeping_sides", lambda args: Sides(trainer=False, engines=False))
    manager = make_manager([call] * fails)

    async def main():
        await manager.start("engines")
        manager.events.clear()
        with contextlib.suppress(RunError):
            await getattr(manager, call)(3)

    asyncio.run(main())
    assert [event if isinstance(event, str) else event[0] for event in manager.events] == [
        "checked",
        call,
        "not checked",
    ]


@pytest.fixture
def report(monkeypatch):
    monkeypatch.setattr("slime.ray.driver.forget_lost_steps", lambda *arguments, again: None)
    monkeypatch.setattr("slime.ray.driver.write_to_trackers", lambda logged: None)
    checked = {"ci_test": False, "ci_save_grad_norm": None, "ci_load_grad_norm": None}
    args = SimpleNamespace(loss_type="policy_loss", num_steps_per_rollout=1, log_interval=1, **checked)
    return lambda start, progress: StepReport(args, StartedRun(None, None, RunLength(8), start), progress)


def test_the_line_of_a_step_has_no_number_of_the_one_before(report, monkeypatch):
    lines = []
    monkeypatch.setattr("slime.ray.driver.rollout_line", lambda *told: lines.append(told) or "")
    steps = report(2, RunProgress())
    with steps.step(2):
        steps.add([({"rollout/raw_reward": 0.5, "rollout/step": 2}, "rollout/step")])
    with steps.step(3):
        pass
    (first, num_rollout, metrics), (second, _, of_second) = lines
    assert (first, second, num_rollout) == (2, 3, 8)
    assert metrics["rollout/raw_reward"] == 0.5 and "rollout/raw_reward" not in of_second


def test_a_start_after_another_goes_on_where_its_checkpoint_is_and_the_run_began_where_the_first_one_did(report):
    progress = RunProgress()
    with report(3, progress).step(3):
        pass
    assert (progress.start_rollout_id, progress.rollouts_done) == (3, 4)
    report(2, progress)
    assert (progress.start_rollout_id, progress.rollouts_done, progress.num_rollout) == (3, 2, 8)
