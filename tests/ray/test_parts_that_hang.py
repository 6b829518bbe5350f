"""How long the driver waits for ranks and for the manager that hang where no collective tells of it."""

import argparse
import asyncio
import os
import signal
from types import SimpleNamespace

import pytest
import ray

from slime.observability import waiting
from slime.ray import rollout_manager, train_group
from slime.ray.driver import RunLength
from slime.ray.train_group import EndingTrainGroup, TrainGroup
from slime.scheduling.device_turns import Holds
from slime.utils.errors import RunError
from tests.support.processes.local_ray import start_ray
from tests.support.processes.waiting import runs, wait_until


def test_a_start_a_publication_and_what_ranks_do_alone_have_the_time_that_their_flags_give(monkeypatch):
    limits = []
    monkeypatch.setattr(
        train_group, "wait_for_all", lambda refs, name, limit, flag, **options: limits.append((flag, limit)) or [0]
    )
    monkeypatch.setattr(train_group, "wait_for", lambda ref, name, limit, flag: limits.append((flag, limit)))
    args = argparse.Namespace(train_start_timeout=7.0, checkpoint_publish_timeout=9.0, distributed_timeout_minutes=1)
    group = TrainGroup(args, None, [(0, 0)])
    group._actors = [SimpleNamespace(call=SimpleNamespace(remote=lambda *words: words))]
    monkeypatch.setattr(train_group, "watch_actors", lambda actors: None)
    group.wait_ready()
    group.publish(3)
    assert limits == [("--train-start-timeout", 7.0), ("--checkpoint-publish-timeout", 9.0)]
    limits.clear()
    # A collective, of which these have none, would end by its own limit.
    group.hold(Holds.WEIGHTS)
    group.weights_pushed(1)
    EndingTrainGroup.weights_pushed(group, 2)
    group.weights_settled()
    assert limits == [("--train-start-timeout", 67.0)] * 4
    limits.clear()
    group.save(3)
    assert limits == [(None, train_group.CALL_DEADLINE_SECONDS)]


def manager_class() -> type:
    """Of a manager whose process knows no test."""

    class Manager:
        def __init__(self, args):
            pass

        async def start(self, engines):
            return RunLength(4, 2)

        @ray.method(concurrency_group="control")
        async def wait_for_death(self):
            await asyncio.Event().wait()

        @ray.method(concurrency_group="control")
        async def begin_push(self):
            return os.getpid()

        @ray.method(concurrency_group="control")
        async def shutdown(self):
            pass

    return Manager


def test_a_manager_whose_process_stands_still_ends_the_wait_for_it(monkeypatch):
    """The wait for engines to be replaced before a push is one of hours."""
    monkeypatch.setattr(rollout_manager, "RolloutManager", manager_class())
    monkeypatch.setattr(rollout_manager, "_CONTROL_DEADLINE_SECONDS", 3.0)
    monkeypatch.setattr(rollout_manager, "_SHUTDOWN_DEADLINE_SECONDS", 0.5)
    args = argparse.Namespace(
        async_buffer_size=1, engine_start_timeout=600.0, has_trainer=True, has_engines=False, train_env_vars={},
        rollout_external_engine_infos=None, rollout_external=False, rollout_data_transport="object-store",
    )  # fmt: skip
    start_ray(num_cpus=1)
    try:
        client = rollout_manager.RolloutClient(args, None, [(0, 0)])
        assert client._push_deadline > 600.0
        client.wait_ready()
        pid = client.begin_push()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RunError, match="^the engines for a push: the rollout manager has answered nothing for 3 s"):
            client.begin_push()
        client.dispose()
        assert not waiting._asked and not waiting._names
        wait_until(lambda: not runs(pid), 60)
    finally:
        ray.shutdown()
