"""A router that somebody else has started: what is refused there, what is taken out of it, and what is left in it."""

import contextlib
from types import SimpleNamespace

import pytest
import requests

from slime.serving import model_routers
from slime.serving.model_routers import refuse_other_workers, start_router
from slime.serving.router import EnginesLacking, RouterHandle, Worker
from slime.utils.errors import UserError
from tests.support.processes.fake_generate_server import FakeGenerateServer

BEARER = {"Authorization": "Bearer s3cret"}


@pytest.fixture
def given(tmp_path):
    """The arguments of a run that is given a router which runs."""
    args = SimpleNamespace(router_policy="round_robin", router_api_key="s3cret", sglang_router_ip=None)
    running = start_router(args, tmp_path)
    try:
        running.wait_ready(60)
        args.sglang_router_ip, args.sglang_router_port = running.ip, running.port
        yield args
    finally:
        running.shutdown()


def test_a_given_router_that_serves_engines_of_others_is_refused():
    with FakeGenerateServer() as server:
        args = SimpleNamespace(sglang_router_ip="127.0.0.1", sglang_router_port=server.port, router_api_key=None)
        with pytest.raises(UserError, match=f"--sglang-router-port {server.port}: .*have other weights: {server.url}"):
            start_router(args, "unused")
        assert start_router(args, "unused", ours=None).wait_for_workers(10.0) == 1
        router = RouterHandle("127.0.0.1", server.port, None, None)
        refuse_other_workers(router, [server.url])
        with pytest.raises(UserError, match=f"DELETE {router.url}/workers/1"):
            refuse_other_workers(router, ["http://127.0.0.1:1"])


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("regular",)])
def test_a_given_router_asks_for_the_engines_of_the_run_or_is_refused(tmp_path, roles):
    """It was started for pairs or for single engines, and would answer requests by 503 where it got the other ones."""
    workers = {"prefill": ("prefill", 15002), "decode": ("decode",), "regular": ()}
    others, way = (("regular",), "without") if "prefill" in roles else (("prefill", "decode"), "with")
    given = SimpleNamespace(router_policy="round_robin", router_api_key="s3cret")
    with contextlib.ExitStack() as stack:
        running = start_router(given, tmp_path, roles=roles)
        stack.callback(running.shutdown)
        running.wait_ready(60)
        given.sglang_router_ip, given.sglang_router_port = running.ip, running.port
        with pytest.raises(
            UserError, match=f"--sglang-router-port {running.port}: .*; start it {way} --pd-disaggregation"
        ):
            start_router(given, tmp_path, roles=others)
        servers = {role: stack.enter_context(FakeGenerateServer()) for role in roles}
        router = start_router(given, tmp_path, roles=roles)
        router.add_workers([Worker(server.url, *workers[role]) for role, server in servers.items()], 60)
        request = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}}
        asked = requests.post(f"{router.url}/generate", json=request, headers=BEARER, timeout=30)
        assert asked.json()["text"] == "FGH" and all(len(server.requests) == 1 for server in servers.values())
        ours = [server.url for server in servers.values()]
        assert start_router(given, tmp_path, ours, roles=roles).found == set(ours), "engines that it has stay in it"
        router.remove_workers(ours)
        assert router.workers() == [] and running.process.poll() is None


def test_engines_that_a_killed_run_has_left_are_taken_out(given, caplog):
    with FakeGenerateServer() as living:
        with FakeGenerateServer() as dead:
            router = start_router(given, "unused")
            router.add_workers([Worker(dead.url), Worker(living.url)], 60)
        with pytest.raises(UserError, match=f"have other weights: .*{living.url}"):
            start_router(given, "unused")
        assert {worker["url"] for worker in router.workers()} == {dead.url, living.url}, "it is somebody's"
        assert start_router(given, "unused", [living.url]).found == {living.url}
        assert [worker["url"] for worker in router.workers()] == [living.url]
        assert f"nothing listens: {dead.url}; they are taken out" in caplog.text


@pytest.mark.parametrize(("of_router", "asked"), [("127.0.0.1", True), ("localhost", True), ("10.0.0.9", False)])
def test_a_loopback_address_of_another_machine_is_not_taken_for_ours(monkeypatch, of_router, asked):
    connected, removed, engine = [], [], "http://127.0.0.1:15000"
    monkeypatch.setattr(RouterHandle, "workers", lambda self: [{"url": engine, "id": "7"}])
    monkeypatch.setattr(RouterHandle, "remove_workers", lambda self, urls, timeout: removed.extend(urls))
    monkeypatch.setattr(model_routers, "refuses_connections", lambda url, timeout: connected.append(url) or True)
    with contextlib.nullcontext() if asked else pytest.raises(UserError, match="DELETE http://10.0.0.9:1/workers/7"):
        refuse_other_workers(RouterHandle(of_router, 1, None, None))
    assert connected == removed == ([engine] if asked else [])


@pytest.mark.parametrize("error", [EnginesLacking({"http://1.0": "refused"}), KeyboardInterrupt()])
def test_engines_leave_a_router_where_the_run_ends_while_it_is_told_of_them(make_owner, monkeypatch, error):
    owner = make_owner()
    owner.start()

    def fail(workers, timeout, key):
        raise error

    monkeypatch.setattr(owner.routers["default"], "add_workers", fail)
    with pytest.raises(type(error)):
        owner.wait_ready()
    owner.leave_given_router()
    assert owner.events[-1] == ("remove", ["http://0.0", "http://1.0"])
