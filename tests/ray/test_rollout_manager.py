"""How the manager starts and ends, without Ray: what it tells of its end, and what user functions find."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from slime.ray.rollout_manager import RolloutManager
from slime.utils.errors import RunError
from slime.utils.run_values import with_run_values
from tests.support.models.args import parse


@pytest.fixture(autouse=True)
def logs_stay_with_the_test(monkeypatch):
    monkeypatch.setattr("slime.ray.rollout_manager.configure_logger", lambda level: None)


def test_the_manager_falls_silent_before_its_engines_end(tmp_path, monkeypatch):
    """Requests that lose their engines, and groups that are given up, are no news at the end of a run."""
    events = []
    monkeypatch.setattr("logging.disable", lambda level: events.append("silent"))
    manager = RolloutManager(parse(tmp_path))
    manager._serving = SimpleNamespace(
        leave_given_router=lambda: events.append("leave"), shutdown=lambda: events.append("end")
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


def test_user_functions_find_address_and_key_of_the_router(tmp_path, monkeypatch):
    router = SimpleNamespace(ip="::1", port=3000)
    owner = SimpleNamespace(start=lambda: router, api_key="made up")
    monkeypatch.setattr("slime.ray.rollout_manager.ServingOwner", lambda *arguments: owner)
    parsed = with_run_values(parse(tmp_path), log_dir=str(tmp_path))
    manager = RolloutManager(parsed)
    manager._start_serving(None, [])
    args = manager.args
    assert args.sglang_model_routers == {"default": ("[::1]", 3000)}
    assert parsed.sglang_router_ip is None, "what was parsed stays"
    assert (args.sglang_router_ip, args.sglang_router_port, args.router_api_key) == ("[::1]", 3000, "made up")


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
        started = await first.start(None, [])
        rollout = await first.generate(0)
        assert await first.progress("generation of rollout 0") is None
        await first.save(0)
        await second.start(None, [])
        await second.load(0)
        return started, rollout, await second.generate(1), await first.generate(1)

    started, rollout, resumed, following = asyncio.run(main())
    assert started.rollouts_per_epoch == 2 and started.num_rollout == args.num_rollout
    assert [metrics["rollout/step"] for metrics, _ in rollout.logged] == [0]
    indices = [result.shards[0].inner["sample_indices"].tolist() for result in (rollout, resumed, following)]
    assert indices == [list(range(8)), list(range(8, 16)), list(range(8, 16))]
