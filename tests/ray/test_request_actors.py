"""Actors that send requests, of a real Ray, to a server in this process."""

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import ray
from aiohttp import web
from ray.cluster_utils import Cluster
from ray.exceptions import ActorDiedError, ActorUnavailableError, RaySystemError, RayTaskError

from slime.ray import request_actors
from slime.ray.request_actors import RequestActor, RequestActors, RequestClient
from slime.utils.engine_answers import decode_engine_answer
from slime.utils.http_carriers import CarrierLost, ExchangeFailed
from slime.utils.http_utils import (
    THREAD_FROM_BYTES,
    HttpError,
    close_http_client,
    init_http_client,
    post,
    post_generate,
    send_through,
    trust_engine_urls,
)
from tests.support.processes.http_server import forget_everything, make_args, serving
from tests.support.processes.local_ray import start_ray
from tests.support.processes.waiting import runs, until, wait_until

SECONDS = 200
SECRET = "a-key-that-may-stand-nowhere"


@pytest.fixture(autouse=True)
def new_client(monkeypatch):
    forget_everything(monkeypatch)


@pytest.fixture(scope="module")
def cluster():
    start_ray(num_cpus=1)
    yield
    ray.shutdown()


@contextlib.contextmanager
def started(on_each_node):
    """Actors that send for this process, and the processes that they are."""
    actors = RequestActors(on_each_node)
    try:
        send_through(actors.wait_ready())
        yield [pid_of(client) for client in actors._clients]
    finally:
        send_through(None)
        actors.end()


def pid_of(client):
    return ray.get(client.actor.__ray_call__.remote(lambda actor: os.getpid()), timeout=SECONDS)


def sender(request, pids):
    """Which of the processes a request came from, this one among them."""
    port = request.transport.get_extra_info("peername")[1]
    for pid in [*pids, os.getpid()]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(one.laddr.port == port and one.raddr for one in psutil.Process(pid).net_connections("tcp")):
                return pid
    return None


def test_requests_are_spread_over_actors_that_take_no_processor_and_fail_as_those_of_the_client(cluster):
    senders = Counter()
    with started(2) as pids:

        async def handler(request):
            senders[sender(request, pids)] += 1
            if request.path == "/bad":
                return web.Response(text="no such", status=404)
            return web.Response(text="text") if request.path == "/text" else web.json_response(await request.json())

        async def main():
            async with serving(handler) as url:
                # More than Ray keeps out of its store.
                big = {"ids": list(range(100_000))}
                assert await asyncio.gather(*[post(f"{url}/a", big) for _ in range(4)]) == [big] * 4
                assert await post(f"{url}/text", {}) == "text"
                with pytest.raises(HttpError, match="answered 404: no such"):
                    await post(f"{url}/bad", {})
            with pytest.raises(HttpError, match=r"failed: ClientConnectorError: .*\(2 attempts\)"):
                await post(f"{url}/a", {}, max_retries=2)
            with pytest.raises(Exception, match="a://b") as error:
                await post("a://b", {})
            assert "ray" not in type(error.value).__module__
            await close_http_client()

        asyncio.run(main())
        assert senders == {pids[0]: 3, pids[1]: 3}
        assert ray.available_resources()["CPU"] == 1
    wait_until(lambda: not any(map(runs, pids)), SECONDS)


def test_a_long_answer_is_that_of_the_client_and_what_was_sent_stands_in_no_log(cluster):
    entries = [[-0.5 * number, number, None] for number in range(5_000)]
    answer = json.dumps({"text": "ä", "meta_info": {"output_token_logprobs": entries}}).encode()
    seen, known = [], set()

    async def handler(request):
        seen.append((await request.json(), dict(request.headers)))
        assert seen[-1][0]["rid"] in known
        return web.Response(body=answer, content_type="application/json")

    async def main():
        init_http_client(make_args(router_api_key=SECRET))
        async with serving(handler) as url:
            trust_engine_urls([url])
            headers = {"X-SMG-Routing-Key": f"{SECRET}-of-a-session"}
            return await post_generate(f"{url}/generate", {"input_ids": [1]}, headers, request_ids=known)

    with started(1):
        found = asyncio.run(main())
    local = decode_engine_answer(answer, json.loads)
    tables = [one["meta_info"].pop("output_token_logprobs") for one in (found, local)]
    assert found == local and not known
    for ours, theirs in zip(vars(tables[0]).values(), vars(tables[1]).values(), strict=True):
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs) and not ours.flags.writeable
        # Ray's store need not keep it.
        while isinstance(ours, np.ndarray):
            ours = ours.base
        assert isinstance(ours, bytes)
    assert seen[0][1]["Authorization"] == f"Bearer {SECRET}"
    logs = log_files()
    assert len(logs) > 3 and not [path for path in logs if SECRET.encode() in path.read_bytes()]


def test_what_is_long_and_no_failure_is_parsed_where_it_is_asked_for():
    long = [0] * THREAD_FROM_BYTES
    bodies = {"/long": (200, long), "/short": (200, [0]), "/bad": (500, long)}

    async def handler(request):
        status, body = bodies[request.path]
        return web.json_response(body, status=status)

    async def main():
        actor, found = RequestActor(), {}
        async with serving(handler) as url:
            for path, parse in (("/long", True), ("/long", False), ("/short", True), ("/bad", True)):
                found[path, parse] = await actor.exchange("POST", url + path, b"{}", {}, parse)
            await actor._exchanges._session.close()
        return found

    found = asyncio.run(main())
    status, content, is_pickle = found.pop(("/long", True))
    assert (status, pickle.loads(content), is_pickle) == (200, long, True)
    for (path, _), (status, content, is_pickle) in found.items():
        assert (status, json.loads(content), is_pickle) == (*bodies[path], False)


def log_files():
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    return [path for path in (session / "logs").rglob("*") if path.is_file()]


@pytest.mark.parametrize("answer", [b"nonsense\r\n\r\n", b"HTTP/1.1 302 Found\r\nLocation: a://b\r\n\r\n"])
def test_a_malformed_answer_is_the_same_error_with_a_carrier_and_its_request_is_not_sent_again(cluster, answer):
    asked = []

    async def serve(reader, writer):
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def main():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/once"

            async def error_of_a_post():
                with pytest.raises(HttpError) as error:
                    await post(url, {}, max_retries=1, headers={"Authorization": SECRET})
                return error.value

            alone = await error_of_a_post()
            with started(1):
                carried = await error_of_a_post()
            await close_http_client()
        assert type(carried) is type(alone) and str(carried) == str(alone) and len(asked) == 2

    asyncio.run(main())
    assert all(SECRET.encode() in request for request in asked)
    assert not [path for path in log_files() if SECRET.encode() in path.read_bytes()]


def test_an_error_that_ray_cannot_bring_is_an_attempt_that_failed():
    async def exchange():
        raise RayTaskError("exchange", "what the actor tells of it", ValueError("such an error"))

    actor = SimpleNamespace(exchange=SimpleNamespace(remote=lambda *request: exchange()))
    client = RequestClient(actor, "one", is_here=True)
    with pytest.raises(ExchangeFailed, match="what the actor tells of it"):
        asyncio.run(client.exchange("POST", "http://a", None, {}, False))
    assert client.ended_for is None


@pytest.fixture
def three_actors(monkeypatch):
    """Actors in name only, that are not reached; what was ended, and by name why one is not there."""
    killed, problems = [], {}
    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr(ray, "wait", lambda refs, **limits: (refs, []))

    def get(ref, timeout):
        if ref in problems:
            raise problems[ref]

    async def unreachable():
        raise ActorUnavailableError("out of reach", None)

    def client(name):
        asked = SimpleNamespace(remote=lambda: name)
        actor = SimpleNamespace(answer=asked, exchange=SimpleNamespace(remote=lambda *request: unreachable()))
        return RequestClient(actor, name, is_here=True)

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "nodes", lambda: [])
    actors = RequestActors(1)
    actors._clients = [client(name) for name in ("one", "other", "last")]
    return actors, killed, problems


@pytest.fixture
def joining(three_actors, monkeypatch):
    """(actors, nodes of the cluster, names of what has answered, clock): each node that joins gets an actor that bears its
    name."""
    actors, killed, problems = three_actors
    nodes, answered, clock = [], set(), [0.0]

    def started_on(scheduling_strategy):
        [name] = [node["NodeManagerAddress"] for node in nodes if node["NodeID"] == scheduling_strategy.node_id]
        made = SimpleNamespace(answer=SimpleNamespace(remote=lambda: name), exchange=None, name=name)
        return SimpleNamespace(remote=lambda: made)

    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    monkeypatch.setattr(ray, "remote", lambda **options: lambda cls: SimpleNamespace(options=started_on))
    monkeypatch.setattr(ray, "wait", lambda refs, **limits: ([ref for ref in refs if ref in answered], []))
    monkeypatch.setattr(request_actors, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return actors, nodes, answered, clock


def a_node(number, name):
    return {"NodeID": f"{number:056x}", "Alive": name != "dead", "NodeManagerAddress": name}


def test_a_node_that_joins_later_sends_as_soon_as_its_actors_have_started(joining, three_actors, caplog):
    actors, nodes, answered, clock = joining
    _, killed, problems = three_actors
    nodes += [a_node(number, name) for number, name in enumerate(("new", "dead", "slow", "ill"), start=1)]
    problems["ill"] = ActorDiedError()
    answered.add("ill")
    actors._welcome()
    assert len(actors._clients) == 3 and [actor.name for actor in killed] == ["ill"]
    answered.add("new")
    actors._welcome()
    assert [client.actor.name for client in actors._clients[3:]] == ["new"] and not actors._clients[3].is_here
    turns = [turn.carrier for turn in actors._carriers._turns]
    assert turns == actors._clients[3:]
    clock[0] += 1000.0
    actors._welcome()
    actors._welcome()
    assert len(actors._clients) == 4 and [actor.name for actor in killed] == ["ill", "slow"]
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [line.split(" did not start")[0].split()[-1] for line in told] == ["ill", "slow"]
    nodes.append(a_node(5, "late"))
    actors._welcome()
    actors.end()
    assert killed[-1].name == "late", "what has not answered yet ends with the others"


def test_actors_whose_calls_fail_and_those_that_are_not_there_are_ended(three_actors):
    """A call may also fail while its actor lives and sends, where a network breaks for a while."""
    actors, killed, problems = three_actors
    one, other, last = actors._clients
    assert actors._ask(1.0) == ([one, other, last], []) and not killed
    with pytest.raises(CarrierLost, match="out of reach"):
        asyncio.run(one.exchange("POST", "http://a", None, {}, False))
    assert actors._ask(1.0) == ([other, last], [one]) and killed == [one.actor]
    problems["other"] = ActorDiedError()
    assert actors._ask(1.0) == ([last], [other]) and killed == [one.actor, other.actor]
    assert "out of reach" in one.ended_for and "died" in other.ended_for


def test_where_ray_cannot_end_one_it_is_tried_again_and_the_others_are_ended(three_actors, monkeypatch):
    actors, killed, problems = three_actors
    one, other, last = (client.actor for client in actors._clients)
    failures = [RaySystemError("no head"), RaySystemError("no head")]

    def kill(actor):
        if failures and actor is one:
            raise failures.pop()
        killed.append(actor)

    monkeypatch.setattr(ray, "kill", kill)
    monkeypatch.setattr(request_actors, "_ASK_EVERY_SECONDS", 0.0)
    actors.end()
    assert killed == [other, last]
    killed.clear()
    actors._ended.clear()
    problems.update(dict.fromkeys(("one", "other", "last"), ActorDiedError()))
    actors._watch()
    assert killed == [one, other, last] and not failures


def test_the_limit_stays_exact_when_calls_are_cancelled(cluster):
    most, connections = 0, set()

    async def main():
        nonlocal most
        begun, go_on = asyncio.Queue(), asyncio.Event()

        async def handler(request):
            nonlocal most
            connection = request.transport
            # What was cancelled has left: else it would count still.
            connections.difference_update([one for one in connections if one.is_closing()])
            connections.add(connection)
            most = max(most, len(connections))
            begun.put_nowait((await request.json())["n"])
            await until(lambda: connection.is_closing() or go_on.is_set(), SECONDS)
            connections.discard(connection)
            return web.json_response({})

        init_http_client(make_args(sglang_server_concurrency=3, rollout_num_engines=1))
        async with serving(handler) as url:
            asking = [asyncio.create_task(post(url, {"n": n})) for n in range(9)]
            await until(lambda: len(connections) == 3, SECONDS)
            for _ in range(3):
                task = asking[await asyncio.wait_for(begun.get(), SECONDS)]
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await until(lambda: begun.qsize() == 3, SECONDS)
            go_on.set()
            outcomes = await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), SECONDS)
            assert outcomes.count({}) == 6

    with started(2):
        asyncio.run(main())
    assert most == 3


class Sent:
    """In the place of a reference to the answer of an actor, which may be awaited again."""

    def __init__(self):
        self.ended = asyncio.Event()

    def __await__(self):
        return self.ended.wait().__await__()


@pytest.mark.parametrize("answers", [True, False])
def test_a_call_that_is_cancelled_ends_when_its_actor_has_left_the_connection_or_takes_too_long(monkeypatch, answers):
    cancelled = []
    monkeypatch.setattr(ray, "cancel", cancelled.append)
    if not answers:
        monkeypatch.setattr(request_actors, "_CLOSING_SECONDS", 0.01)

    async def main():
        sent = Sent()
        actor = SimpleNamespace(exchange=SimpleNamespace(remote=lambda *request: sent))
        client = request_actors.RequestClient(actor, "one", is_here=True)
        asking = asyncio.create_task(client.exchange("POST", "http://a", None, {}, False))
        await asyncio.sleep(0)
        asking.cancel()
        done, _ = await asyncio.wait([asking], timeout=0.2 if answers else 10)
        assert cancelled == [sent] and bool(done) is not answers
        sent.ended.set()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(main())


def test_requests_of_an_actor_that_is_killed_go_out_from_here(cluster, caplog):
    senders: dict[int, list[int]] = {}

    async def main(pids):
        dead = asyncio.Event()

        async def handler(request):
            number, pid = (await request.json())["n"], sender(request, pids)
            senders.setdefault(number, []).append(pid)
            if pid == pids[0]:
                await until(lambda: request.transport is None or request.transport.is_closing(), SECONDS)
            await asyncio.wait_for(dead.wait(), SECONDS)
            return web.json_response({"n": number})

        # It is no further attempt.
        init_http_client(make_args(http_max_retries=1, http_request_timeout=SECONDS))
        async with serving(handler) as url:
            trust_engine_urls([url])
            asking = [asyncio.create_task(post(url, {"n": number})) for number in range(6)]
            await until(lambda: len(senders) == 6, SECONDS)
            os.kill(pids[0], signal.SIGKILL)
            dead.set()
            assert await asyncio.gather(*asking) == [{"n": number} for number in range(6)]
            assert await post(url, {"n": 6}) == {"n": 6}

    with started(2) as pids:
        asyncio.run(main(pids))
    assert Counter(map(tuple, senders.values())) == {(pids[0], os.getpid()): 3, (pids[1],): 4}
    [told] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "its 3 requests in flight go out again" in told and told.startswith("client 0 of --use-distributed-post on")


def all_threads_are_stopped(pid):
    threads = psutil.Process(pid).threads()
    return all(psutil.Process(thread.id).status() == psutil.STATUS_STOPPED for thread in threads)


def test_an_actor_that_hangs_is_ended_and_its_requests_go_out_from_here(cluster, caplog, monkeypatch):
    monkeypatch.setattr(request_actors, "_ASK_EVERY_SECONDS", 0.2)
    monkeypatch.setattr(request_actors, "_SILENT_SECONDS", 4.0)
    senders = []

    async def main(pids):
        async def handler(request):
            senders.append(sender(request, pids))
            if senders[-1] == pids[0]:
                os.kill(pids[0], signal.SIGSTOP)
                # The signal reaches threads one by one, and one of them could still pass the answer on.
                await until(lambda: all_threads_are_stopped(pids[0]))
            return web.json_response({})

        init_http_client(make_args(http_max_retries=1, http_request_timeout=SECONDS))
        async with serving(handler) as url:
            trust_engine_urls([url])
            assert await post(url, {}) == {}

    with started(1) as pids:
        asyncio.run(main(pids))
        assert senders == [pids[0], os.getpid()]
        [told] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert "is lost (it did not answer for 4 s): its 1 requests in flight" in told
        # Its connections end with it, and so does what an engine computes for it.
        wait_until(lambda: not runs(pids[0]), SECONDS)


class Owner:
    """In the place of the manager."""

    def __init__(self):
        self._actors = RequestActors(1)
        self._actors.wait_ready()

    def pids(self):
        return [os.getpid(), *map(pid_of, self._actors._clients)]


def test_they_end_with_their_manager_that_is_killed(cluster):
    owner = ray.remote(num_cpus=0)(Owner).remote()
    pids = ray.get(owner.pids.remote(), timeout=SECONDS)
    assert len(pids) == 2
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: not any(map(runs, pids)), SECONDS)


@pytest.mark.slow
def test_the_actors_of_a_node_that_dies_are_lost_and_the_others_go_on(caplog):
    """Two nodes on this machine."""
    ray.shutdown()
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    senders: dict[int, list[int]] = {}
    actors = None

    async def main(pids):
        async def handler(request):
            number, pid = (await request.json())["n"], sender(request, pids.values())
            senders.setdefault(number, []).append(pid)
            if pid == pids[False]:
                await until(lambda: request.transport is None or request.transport.is_closing(), SECONDS)
            return web.json_response({"n": number})

        init_http_client(make_args(http_max_retries=1, http_request_timeout=SECONDS))
        async with serving(handler) as url:
            trust_engine_urls([url])
            asking = [asyncio.create_task(post(url, {"n": number})) for number in range(4)]
            await until(lambda: len(senders) == 4, SECONDS)
            await asyncio.to_thread(nodes.remove_node, other, allow_graceful=False)
            assert await asyncio.gather(*asking) == [{"n": number} for number in range(4)]

    try:
        ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
        other = nodes.add_node(num_cpus=1)
        wait_until(lambda: len(ray.nodes()) == 2, SECONDS)
        actors = RequestActors(1)
        carriers = actors.wait_ready()
        places = {client.is_here: client for client in actors._clients}
        pids = {is_here: pid_of(client) for is_here, client in places.items()}
        # `localhost` is the same for both of these nodes.
        places[False].is_here = True
        send_through(carriers)
        asyncio.run(main(pids))
    finally:
        send_through(None)
        if actors is not None:
            actors.end()
        ray.shutdown()
        nodes.shutdown()
    assert Counter(map(tuple, senders.values())) == {(pids[False], os.getpid()): 2, (pids[True],): 2}
    [told] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "its 2 requests in flight go out again" in told
