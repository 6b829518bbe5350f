"""Routers that are killed or hang, as real processes in front of engines that are none: others take their place."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import threading
from types import SimpleNamespace

import pytest
import requests

from slime.ray.rollout_manager import _EnginesOfModel
from slime.serving import router as router_module
from slime.serving.model_routers import start_router
from slime.serving.router import RouterHandle, Worker
from slime.utils import child_process, http_utils
from slime.utils.errors import RunError
from slime.utils.http_utils import close_http_client, get, init_http_client, post
from slime.utils.ports import reserve_port
from tests.support.processes import http_server
from tests.support.processes.fake_generate_server import FakeGenerateServer
from tests.support.processes.waiting import until, wait_until

KEY = "s3cret"
BEARER = {"Authorization": f"Bearer {KEY}"}
REQUEST = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}}


@contextlib.contextmanager
def running_router(directory, roles=("regular",), **flags):
    """A router that comes back, when it answers; it is gone afterwards."""
    given = {"router_policy": "round_robin", "router_log_level": "warn", "router_api_key": KEY, **flags}
    router = start_router(SimpleNamespace(**given), directory, roles=roles)
    router.comes_back = True
    try:
        router.wait_ready(60)
        yield router
    finally:
        router.shutdown()
        if router._guard is not None:
            router._guard.join(30)
            assert not router._guard.is_alive()
        assert router.process.pid is None or router.process.poll() is not None
        assert not router._scratch.exists()


def kill(router):
    """Kill the process and return it; it has ended."""
    process = router.process
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    return process


def generated(router):
    return requests.post(f"{router.url}/generate", json=REQUEST, headers=BEARER, timeout=30).json()["text"]


def urls(router):
    return {worker["url"] for worker in router.workers() if worker["is_healthy"]}


def test_another_router_has_the_address_the_key_and_the_engines_of_the_one_that_was_killed(tmp_path, caplog):
    caplog.set_level("INFO")
    with FakeGenerateServer() as first, FakeGenerateServer() as second, running_router(tmp_path) as router:
        router.add_workers([Worker(first.url), Worker(second.url)], 60, "key of engines")
        port, killed = router.port, kill(router)
        assert not router.serves(), "from its end on, and not from when somebody looks"
        wait_until(router.serves)
        assert router.process.pid != killed.pid and (router.port, router.deaths) == (port, 1)
        assert router.trouble() is None and urls(router) == {first.url, second.url}
        assert [generated(router) for _ in range(4)] == ["FGH"] * 4
        assert len(first.requests) == len(second.requests) == 2
        assert {told["Authorization"] for told in first.headers + second.headers} == {"Bearer key of engines"}
        assert requests.get(f"{router.url}/workers", timeout=30).status_code == 401
    assert "the router died: ended by SIGKILL" in caplog.text and KEY not in caplog.text
    assert f"there is a router at {router.url} again, with 2 engines" in caplog.text


def test_engines_with_roles_have_them_again(tmp_path):
    roles = ("prefill", "decode")
    with FakeGenerateServer() as prefill, FakeGenerateServer(lambda payload: [75, 76]) as decode:
        with running_router(tmp_path, roles) as router:
            router.add_workers([Worker(prefill.url, "prefill", 15002), Worker(decode.url, "decode")], 60, KEY)
            kill(router)
            wait_until(router.serves)
            listed = {
                worker["url"]: (worker["worker_type"], worker.get("bootstrap_port")) for worker in router.workers()
            }
            assert listed == {prefill.url: ("prefill", 15002), decode.url: ("decode", None)}
            assert generated(router) == "KL"
            assert prefill.requests[-1]["bootstrap_port"] == 15002


def test_engines_that_come_and_go_while_there_is_no_router_are_told_to_the_next_one(tmp_path):
    with FakeGenerateServer() as first, FakeGenerateServer() as second, running_router(tmp_path) as router:
        router.add_workers([Worker(first.url)], 60, KEY)
        kill(router)
        router.remove_workers([first.url], 60)
        assert router.workers() == [] and router.deaths == 1
        kill(router)
        router.add_workers([Worker(second.url)], 60, KEY)
        assert urls(router) == {second.url} and router.deaths == 2, "what left once is not told of again"


def test_an_engine_that_is_gone_keeps_the_others_from_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(router_module, "_START_SECONDS", 3.0)
    with FakeGenerateServer() as living, running_router(tmp_path) as router:
        with FakeGenerateServer() as gone:
            router.add_workers([Worker(gone.url), Worker(living.url)], 60, KEY)
        kill(router)
        wait_until(router.serves)
        assert urls(router) == {living.url} and generated(router) == "FGH" and router.deaths == 1
        assert (
            f"the router lacks engines: router {router.url}: workers not healthy after 3 s: {gone.url}" in caplog.text
        )


class BusyServer(FakeGenerateServer):
    """An engine that says nothing about itself while it computes something long."""

    busy = False

    async def _about(self, request):
        while self.busy and request.path == "/server_info":
            await asyncio.sleep(0.05)
        return await super()._about(request)


@pytest.mark.parametrize("others", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_engine_that_was_busy_is_told_of_again(tmp_path, monkeypatch, others, caplog):
    """Without it the router would have one engine less for the rest of the run, or none."""
    monkeypatch.setattr(router_module, "_START_SECONDS", 3.0)
    monkeypatch.setattr(router_module, "_WATCH_SECONDS", 1.0)
    caplog.set_level("INFO")
    with BusyServer() as busy, FakeGenerateServer() as other, running_router(tmp_path) as router:
        router.add_workers([Worker(busy.url), *[Worker(other.url)] * others], 60, KEY)
        busy.busy = True
        kill(router)
        wait_until(lambda: router._missing)
        assert router._missing == {busy.url} and urls(router) == {other.url for _ in range(others)}
        wait_until(lambda: router._is_back.is_set())
        assert router.serves() is bool(others), "requests wait for an engine"
        busy.busy = False
        wait_until(lambda: not router._missing, 120)
        assert router.serves() and busy.url in urls(router) and router.deaths == 1
        assert generated(router) == "FGH"
    assert f"there is a router at {router.url} again, with {others} engines" in caplog.text
    assert f"the router {router.url} has the engine {busy.url} again" in caplog.text


@pytest.mark.parametrize(
    ("missing", "serves"),
    [
        ("", True),
        ("prefill one", True),
        ("prefill one, prefill two", False),
        ("decode", False),
        ("prefill one, gone", True),
        ("gone", True),
    ],
)
def test_requests_wait_for_a_router_that_has_engines_of_each_role(missing, serves):
    """Without one that prefills it answers each with an error, until all attempts are used up."""
    router = RouterHandle("127.0.0.1", 1, KEY, SimpleNamespace(poll=lambda: None), comes_back=True)
    router._is_back.set()
    router._told = {name: Worker(name, name.split()[0]) for name in ("prefill one", "prefill two", "decode")}
    router._missing = frozenset(filter(None, missing.split(", ")))
    assert router.serves() is serves
    router._told = {name: Worker(name) for name in ("one", "two")}
    router._missing = frozenset({"one"})
    assert router.serves()
    router._missing = frozenset({"one", "two"})
    assert not router.serves()


def test_a_pair_whose_one_half_was_busy_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(router_module, "_START_SECONDS", 3.0)
    monkeypatch.setattr(router_module, "_WATCH_SECONDS", 1.0)
    roles = ("prefill", "decode")
    with BusyServer() as prefill, FakeGenerateServer() as decode, running_router(tmp_path, roles) as router:
        router.add_workers([Worker(prefill.url, "prefill", 15002), Worker(decode.url, "decode")], 60, KEY)
        prefill.busy = True
        kill(router)
        wait_until(lambda: router._missing)
        wait_until(lambda: router._is_back.is_set())
        assert router._missing == {prefill.url} and not router.serves()
        prefill.busy = False
        wait_until(router.serves, 120)
        assert generated(router) == "FGH" and router.deaths == 1


def test_an_engine_that_leaves_while_a_router_is_told_of_it_is_not_waited_for(tmp_path, monkeypatch, caplog):
    with BusyServer() as busy, FakeGenerateServer() as other, running_router(tmp_path) as router:
        router.add_workers([Worker(busy.url), Worker(other.url)], 60, KEY)
        busy.busy = True
        started = threading.Event()
        register = router._register
        monkeypatch.setattr(router, "_register", lambda *given: started.set() or register(*given))
        kill(router)
        assert started.wait(60)
        router.remove_workers([busy.url], 30)
        assert router.serves() and urls(router) == {other.url} and "lacks engines" not in caplog.text
        busy.busy = False


def test_one_whose_watch_fails_ends_the_run(tmp_path, monkeypatch):
    def describe_end():
        raise OSError(24, "Too many open files")

    with running_router(tmp_path) as router:
        monkeypatch.setattr(router.process, "describe_end", describe_end)
        kill(router)
        told = wait_until(router.trouble)
        assert told == f"the watch over the router {router.url} failed: OSError: [Errno 24] Too many open files"
        with pytest.raises(RunError, match="the watch over the router"):
            router.add_workers([], 60)


def test_one_that_hangs_is_ended_and_another_one_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(router_module, "_WATCH_SECONDS", 0.01)
    monkeypatch.setattr(router_module, "_WATCH_TIMEOUT_SECONDS", 0.5)
    with FakeGenerateServer() as engine, running_router(tmp_path) as router:
        router.add_workers([Worker(engine.url)], 60, KEY)
        hanging = router.process
        os.kill(hanging.pid, signal.SIGSTOP)
        wait_until(lambda: router.deaths == 1)
        # The next one is asked late: it is judged by its own answers.
        monkeypatch.setattr(router_module, "_WATCH_SECONDS", 600.0)
        wait_until(router.serves)
        assert router._fault() is None and router.deaths == 1
        assert hanging.poll() == -signal.SIGKILL and generated(router) == "FGH"


def test_one_that_dies_again_and_again_does_not_come_back_and_says_why(tmp_path):
    with FakeGenerateServer() as engine, running_router(tmp_path) as router:
        router.add_workers([Worker(engine.url)], 60, KEY)
        for _ in range(2):
            kill(router)
            wait_until(router.serves)
            assert router.trouble() is None
        kill(router)
        told = wait_until(router.trouble)
        assert told.startswith("the router died: ended by SIGKILL")
        assert told.endswith("\nno other router takes its place: it died 3 times within 600 s")
        for ask in (router.add_workers, router.remove_workers):
            with pytest.raises(RunError, match="no other router takes its place"):
                ask([], 60)
        assert not router.serves()


def test_nobody_else_that_reserves_ports_gets_that_of_a_router_that_died(tmp_path, monkeypatch):
    monkeypatch.setattr(router_module, "_LOOK_SECONDS", 600.0)
    with running_router(tmp_path) as router:
        kill(router)
        with pytest.raises(RunError, match="no free port"):
            reserve_port(router.ip, router.port, attempts=1)


def killed_and_replaced_by_another_server(router):
    """Somebody else's server, which listens at the address of the router from before its end is seen."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with router.process._collecting:
        kill(router)
        listener.bind((router.ip, router.port))
        listener.listen()
    return listener


def test_a_port_that_somebody_has_taken_is_waited_for(tmp_path):
    with FakeGenerateServer() as engine, running_router(tmp_path) as router:
        router.add_workers([Worker(engine.url)], 60, KEY)
        with killed_and_replaced_by_another_server(router):
            wait_until(lambda: router.deaths)
            assert not router.serves()
        wait_until(router.serves)
        assert generated(router) == "FGH" and router.deaths == 1


def test_a_port_that_stays_taken_is_told_of_and_is_no_death_of_a_router(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(router_module, "_OBSTACLE_SECONDS", 0.0)
    with running_router(tmp_path) as router:
        with killed_and_replaced_by_another_server(router):
            told = wait_until(router.trouble)
        taken = f"another process has taken its port, {router.port} (`ss -ltnp` names it); end that process"
        assert told.startswith("the router died: ended by SIGKILL")
        assert told.endswith(f"\nno other router takes its place: for 0 s, {taken}") and router.deaths == 1
    assert f"the router cannot start: {taken}" in caplog.messages, "while there is time to end it"


def test_a_port_that_a_dead_router_keeps_is_told_of(tmp_path, monkeypatch):
    """The kernel lets a process go that waits for a disk, say, when it can."""
    monkeypatch.setattr(router_module, "_OBSTACLE_SECONDS", 0.0)
    monkeypatch.setattr(router_module, "_WATCH_SECONDS", 0.01)
    monkeypatch.setattr(router_module, "_WATCH_TIMEOUT_SECONDS", 0.2)
    with running_router(tmp_path) as router, monkeypatch.context() as held:
        held.setattr(child_process, "_KILLED_SECONDS", 0.05)
        held.setattr(router.process, "_signal_group", lambda signal_number: None)
        os.kill(router.process.pid, signal.SIGSTOP)
        told = wait_until(router.trouble)
    assert told.endswith(f"the dead one, which the kernel does not let go, has its port, {router.port}")
    assert "\nno other router takes its place: for 0 s, " in told and router.deaths == 1


FULL = OSError(errno.ENOSPC, "No space left on device", "/disk/router.log")


@pytest.mark.parametrize(
    ("where", "lasts"),
    [
        ("_new_process", True),
        ("_launch", False),
        pytest.param("_new_process", False, marks=pytest.mark.slow),
        pytest.param("_launch", True, marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_is_waited_for_and_is_no_death_of_a_router(tmp_path, monkeypatch, caplog, where, lasts):
    """More often than a router may die somebody looks for space, and the requests meanwhile are suspected of nothing."""
    monkeypatch.setattr(router_module, "_OBSTACLE_SECONDS", 0.0 if lasts else 60.0)
    monkeypatch.setattr(router_module, "_OBSTACLE_POLL_SECONDS", 0.01)
    owner_of_it = router_module if where == "_new_process" else RouterHandle
    start, attempts = getattr(owner_of_it, where), []

    def full_at_first(*arguments):
        attempts.append(arguments)
        if lasts or len(attempts) <= 5:
            raise FULL
        return start(*arguments)

    with FakeGenerateServer() as engine, running_router(tmp_path) as router:
        router.add_workers([Worker(engine.url)], 60, KEY)
        monkeypatch.setattr(owner_of_it, where, full_at_first)
        kill(router)
        full = "No space left on device (/disk/router.log); free space there"
        if lasts:
            assert wait_until(router.trouble).endswith(f"\nno other router takes its place: for 0 s, {full}")
        else:
            wait_until(router.serves)
            assert generated(router) == "FGH" and len(attempts) == 6
        assert router.deaths == 1 and caplog.messages.count(f"the router cannot start: {full}") == 1


def test_a_first_start_on_a_full_disk_says_where_to_free_space(tmp_path, monkeypatch):
    def fail(*_):
        raise FULL

    monkeypatch.setattr(RouterHandle, "_launch", fail)
    with pytest.raises(RunError, match=r"\(/disk/router.log\); free space there"):
        with running_router(tmp_path) as router:
            router.add_workers([Worker("http://127.0.0.1:1")], 60, KEY)


def test_no_router_starts_once_the_run_ends(tmp_path, monkeypatch):
    new_process, begun, go_on = router_module._new_process, threading.Event(), threading.Event()

    def held(*arguments):
        begun.set()
        assert go_on.wait(60)
        return new_process(*arguments)

    with running_router(tmp_path) as router:
        monkeypatch.setattr(router_module, "_new_process", held)
        kill(router)
        assert begun.wait(60)
        router.shutdown()
        go_on.set()
        router._guard.join(60)
        assert not router._guard.is_alive() and router.process.pid is None


def test_without_the_wish_a_router_stays_dead(tmp_path):
    with running_router(tmp_path) as router:
        router.comes_back = False
        kill(router)
        assert router.trouble().startswith("the router died: ended by SIGKILL") and router.serves()
        with pytest.raises(RunError, match="the router is dead"):
            router.add_workers([Worker("http://127.0.0.1:9")], 5)
        assert router.deaths == 0


def test_requests_in_flight_are_made_again_without_a_loss_of_attempts(tmp_path, monkeypatch):
    http_server.forget_everything(monkeypatch)

    async def main(router, engine):
        init_http_client(
            http_server.make_args(router_api_key=KEY, sglang_router_ip=router.ip, sglang_router_port=router.port)
        )
        # Engines that live, and are not doubted for long.
        owner = SimpleNamespace(
            routers={"default": router}, is_serving=lambda model: True, is_decided=lambda model: True,
            deaths=lambda model: 0, doubt_all=lambda model, cause: None,
        )  # fmt: skip
        http_utils.set_engine_supply(router.url, _EnginesOfModel(owner, "default"))
        try:
            asked = [asyncio.create_task(post(f"{router.url}/generate", REQUEST, max_retries=1)) for _ in range(8)]
            await until(lambda: len(engine.requests) == 8)
            kill(router)
            listed = asyncio.create_task(get(f"{router.url}/workers", max_retries=1))
            engine.release()
            answers = await asyncio.wait_for(asyncio.gather(*asked), 60)
            assert [answer["text"] for answer in answers] == ["FGH"] * 8
            assert [worker["url"] for worker in (await listed)["workers"]] == [engine.url]
        finally:
            await close_http_client()

    with FakeGenerateServer(hold=lambda payload: True) as engine, running_router(tmp_path) as router:
        router.add_workers([Worker(engine.url)], 60, KEY)
        asyncio.run(main(router, engine))
        assert router.deaths == 1


def test_r17_a_proxy_of_the_system_gets_no_question_to_a_router(tmp_path, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with FakeGenerateServer() as engine, running_router(tmp_path) as router:
        router.add_workers([Worker(engine.url)], 60, KEY)
        assert urls(router) == {engine.url}, "which it has asked itself, without the proxy"
        router.remove_workers([engine.url], 60)
        assert urls(router) == set()
