import argparse
import asyncio
import contextlib
import dataclasses
import http.server
import json
import os
import signal
import stat
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import ClassVar

import psutil
import pytest
import requests
from sglang_router.router_args import RouterArgs

from slime.arguments.surface import FlagSpec, add_flag, load_surface
from slime.serving import router as router_module
from slime.serving.model_routers import start_router
from slime.serving.router import EnginesLacking, RouterHandle, Worker
from slime.serving.router_process import OUR_DEFAULTS, compute_router_fields
from slime.utils.errors import RunError, UserError
from slime.utils.filesystem import make_scratch_directory
from slime.utils.http_utils import close_http_client, init_http_client, post
from slime.utils.ports import reserve_port
from tests.support.processes.fake_generate_server import FakeGenerateServer
from tests.support.processes.http_server import forget_everything, make_args
from tests.support.processes.waiting import wait_until

BEARER = {"Authorization": "Bearer s3cret"}


def compute(**flags):
    return compute_router_fields(SimpleNamespace(**flags), "127.0.0.1", 3000, 3001)


def test_defaults():
    fields = compute(router_policy=None)
    assert fields["disable_circuit_breaker"] and fields["disable_health_check"]
    assert fields["request_timeout_secs"] == 14400
    assert (fields["balance_abs_threshold"], fields["balance_rel_threshold"]) == (10, 1.2)
    assert fields["log_level"] == "warn"
    assert (fields["host"], fields["port"]) == ("127.0.0.1", 3000)
    assert (fields["prometheus_host"], fields["prometheus_port"]) == ("127.0.0.1", 3001)
    assert "policy" not in fields


def test_given_flags_win_but_not_over_the_address():
    fields = compute(
        router_policy="consistent_hashing",
        router_log_level="info",
        router_api_key="key",
        router_host="0.0.0.0",
        sglang_router_request_timeout_secs=60,
        router_prometheus_port=9000,
    )
    assert (fields["policy"], fields["log_level"], fields["api_key"]) == ("consistent_hashing", "info", "key")
    assert (fields["host"], fields["port"], fields["prometheus_port"]) == ("127.0.0.1", 3000, 9000)
    assert fields["request_timeout_secs"] == 60


def test_an_unknown_router_flag_is_named():
    with pytest.raises(UserError, match="--router-no-such-thing"):
        compute(router_no_such_thing=1)


def test_ipv6_address_in_the_url():
    assert RouterHandle("::1", 80, None, None).url == "http://[::1]:80"


def test_an_address_of_ipv6_is_given_to_a_router_as_it_reads_it():
    fields = compute_router_fields(SimpleNamespace(), "::1", 3000, 3001)
    assert (fields["host"], fields["prometheus_host"]) == ("[::1]", "::1")


def test_a_router_listens_on_an_address_of_ipv6(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIME_HOST_IP", "::1")
    try:
        reserve_port("::1", 21000).release()
    except OSError:
        pytest.skip("this machine has no IPv6")
    router = start_router(SimpleNamespace(router_log_level="warn", router_api_key="k"), tmp_path)
    try:
        router.wait_ready(60)
        listening = {
            tuple(c.laddr) for c in psutil.Process(router.process.pid).net_connections("tcp") if c.status == "LISTEN"
        }
        assert listening == {("::1", router.port), ("::1", router._fields["prometheus_port"])}
        assert router.workers() == []
    finally:
        router.shutdown()


def test_a_router_whose_parent_may_open_few_files_may_open_as_many_as_the_system_lets_it(tmp_path, monkeypatch):
    """It takes two for each request, and a shell's limit is often 1024."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -Sn 256\nulimit -Hn 4096\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    router = start_router(SimpleNamespace(), tmp_path)
    try:
        router.wait_ready(120)
        assert psutil.Process(router.process.pid).rlimit(psutil.RLIMIT_NOFILE) == (4096, 4096)
    finally:
        router.shutdown()


def test_f6_a_router_that_cannot_start_shows_its_last_log_lines(tmp_path):
    args = SimpleNamespace(router_policy="no_such_policy")
    router = start_router(args, tmp_path)
    with pytest.raises(
        RunError, match="the router failed to start: exit code 1; log .*router.log(.|\n)*no_such_policy"
    ):
        router.wait_ready(120)
    router.shutdown()
    assert router._scratch.name.startswith("slime-router-") and not router._scratch.exists()


def test_f4_a_router_is_awaited_by_polling_and_ends_with_shutdown(tmp_path):
    args = SimpleNamespace(router_api_key="s3cret", router_log_level="debug")
    router = start_router(args, tmp_path)
    try:
        router.wait_ready(120)
        assert router.workers() == []
    finally:
        router.shutdown()
    log = (tmp_path / "router.log").read_text()
    assert "Starting router" in log and "s3cret" not in log
    assert router.process.poll() is not None
    with pytest.raises(RunError, match="the router is dead"):
        router.workers()


def test_a_router_that_hangs_is_told_of_until_it_answers_again(tmp_path, monkeypatch):
    monkeypatch.setattr(router_module, "_WATCH_SECONDS", 0.01)
    monkeypatch.setattr(router_module, "_WATCH_TIMEOUT_SECONDS", 0.5)
    router = start_router(SimpleNamespace(), tmp_path)
    try:
        router.wait_ready(120)
        assert router.trouble() is None
        os.kill(router.process.pid, signal.SIGSTOP)
        wait_until(router.trouble, 60)
        assert (
            f"the router {router.url} lives and did not answer 4 times in a row, with up to 0.5 s for each; log "
            in (router.trouble())
        )
        os.kill(router.process.pid, signal.SIGCONT)
        wait_until(lambda: router.trouble() is None, 60)
    finally:
        router.shutdown()
    assert router.trouble().startswith("the router died: ")


def test_a_router_of_engines_with_roles_asks_one_of_each(tmp_path):
    """They are told of each other: those that decode fetch the caches of a prompt at the port of the one that prefills it."""
    args = SimpleNamespace(router_policy="round_robin", router_api_key="s3cret", router_log_level="warn")
    with FakeGenerateServer() as prefill, FakeGenerateServer(lambda payload: [75, 76]) as decode:
        router = start_router(args, tmp_path, roles=("prefill", "decode"))
        try:
            router.wait_ready(60)
            router.add_workers([Worker(prefill.url, "prefill", 15002), Worker(decode.url, "decode")], 60, "s3cret")
            listed = {worker["url"]: worker for worker in router.workers()}
            assert {url: worker["worker_type"] for url, worker in listed.items()} == {
                prefill.url: "prefill",
                decode.url: "decode",
            }
            assert listed[prefill.url]["bootstrap_port"] == 15002 and "bootstrap_port" not in listed[decode.url]
            request = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}}
            answer = requests.post(f"{router.url}/generate", json=request, headers=BEARER, timeout=30)
            assert answer.json()["text"] == "KL", "what the engine that decodes says"
            (given,), (also_given,) = prefill.requests, decode.requests
            told = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
            assert [given[name] for name in told] == [also_given[name] for name in told]
            assert (given["bootstrap_host"], given["bootstrap_port"]) == ("127.0.0.1", 15002)
        finally:
            router.shutdown()


def test_a_router_that_hashes_spreads_what_belongs_to_no_session(tmp_path, monkeypatch):
    """All requests of a run bear the same token, which it hashes for lack of a key."""
    forget_everything(monkeypatch)
    request = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}}
    args = SimpleNamespace(router_policy="consistent_hashing", router_api_key="s3cret", router_log_level="warn")

    async def ask(url, keys):
        for key in keys:
            await post(f"{url}/generate", request, headers=key and {"X-SMG-Routing-Key": key})
        await close_http_client()

    with FakeGenerateServer() as first, FakeGenerateServer() as second:
        router = start_router(args, tmp_path)
        try:
            router.wait_ready(60)
            router.add_workers([Worker(first.url), Worker(second.url)], 60)
            address = {"sglang_router_ip": router.ip, "sglang_router_port": router.port}
            init_http_client(make_args(router_api_key="s3cret", **address))
            asyncio.run(ask(router.url, [None] * 40))
            assert len(first.requests) > 0 < len(second.requests)
            first.requests.clear(), second.requests.clear()
            asyncio.run(ask(router.url, ["session"] * 5))
            assert sorted(len(server.requests) for server in (first, second)) == [0, 5]
        finally:
            router.shutdown()


def test_a_router_that_is_told_to_start_holds_its_ports_and_leaves_nothing(tmp_path):
    router = start_router(SimpleNamespace(router_policy="round_robin"), tmp_path)
    try:
        with pytest.raises(RunError, match="no free port"):
            reserve_port(router.ip, router.port, attempts=1)
    finally:
        router.shutdown()
    assert not router._scratch.exists()
    reserve_port(router.ip, router.port, attempts=1).release()


def test_shutdown_removes_arguments_that_were_never_read():
    scratch = make_scratch_directory("test")
    (scratch / "arguments.json").write_text("{}")
    RouterHandle("127.0.0.1", 1, None, None, _scratch=scratch).shutdown()
    assert not scratch.exists()


def test_the_key_of_the_router_is_for_its_owner_only(tmp_path, monkeypatch):
    monkeypatch.setattr("slime.serving.router.ChildProcess.start", lambda process: None)
    router = start_router(SimpleNamespace(router_api_key="s3cret"), tmp_path)
    try:
        (arguments,) = router._scratch.glob("*.json")
        assert "s3cret" in arguments.read_text() and stat.S_IMODE(arguments.stat().st_mode) == 0o600
        assert "s3cret" not in repr(router)
    finally:
        router.shutdown()


@pytest.mark.parametrize(
    ("own", "worker", "shown"), [(None, "w", "w"), ("r", "w", "w"), ("r", None, "r"), (None, None, None)]
)
def test_the_router_is_told_the_key_of_the_engines(monkeypatch, own, worker, shown):
    sent = []
    answer = SimpleNamespace(json=dict)
    monkeypatch.setattr(RouterHandle, "_call", lambda self, *request: (sent.append(request), answer)[1])
    listed = [[], [{"url": "http://a", "is_healthy": True}]]
    monkeypatch.setattr(RouterHandle, "workers", lambda self, deadline: listed.pop(0))
    RouterHandle("127.0.0.1", 1, own, None).add_workers([Worker("http://a")], worker_api_key=worker)
    ((method, path, payload, _),) = sent
    assert (method, path, payload.get("api_key")) == ("POST", "/workers", shown)


class SlowRouter:
    """In the place of a session: every answer takes `answer_s` seconds of a clock that stands still otherwise. It answers side
    by side what threads ask at the same time."""

    def __init__(self, answer_s, workers):
        self.answer_s, self.workers, self.now = answer_s, workers, 0.0
        # When each thread looked at the clock last, just before it asks.
        self._looked = threading.local()

    def monotonic(self):
        self._looked.at = self.now
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def get(self, url, timeout):
        return self.request("GET", url, timeout=timeout)

    def request(self, method, url, json=None, timeout=None):
        self.now = max(self.now, getattr(self._looked, "at", self.now) + min(timeout, self.answer_s))
        if timeout < self.answer_s:
            raise requests.ReadTimeout("too slow")
        return SimpleNamespace(ok=not url.endswith("/health"), json=lambda: {"workers": self.workers})


@pytest.mark.parametrize("answer_s", [0.5, 4.0, 1000.0])
@pytest.mark.parametrize(
    "call",
    [
        lambda router, urls, timeout: router.wait_ready(timeout),
        lambda router, urls, timeout: router.add_workers([Worker(url) for url in urls], timeout),
        lambda router, urls, timeout: router.remove_workers(urls, timeout),
        lambda router, urls, timeout: router.wait_for_workers(timeout),
    ],
    ids=["wait_ready", "add_workers", "remove_workers", "wait_for_workers"],
)
def test_a_slow_or_silent_router_does_not_stretch_a_time_limit(monkeypatch, call, answer_s):
    urls = [f"http://10.0.0.1:{port}" for port in range(40)]
    slow = SlowRouter(answer_s, [{"url": url, "id": url, "is_healthy": False} for url in urls])
    monkeypatch.setattr(router_module, "time", slow)
    monkeypatch.setattr(router_module, "session_with", lambda api_key: slow)
    with pytest.raises(RunError):
        call(RouterHandle("10.0.0.9", 80, None, None), urls, 11.0)
    # A last look after a last pause.
    assert slow.now <= 11.0 + 3 * router_module._POLL_SECONDS


class HalfRouter:
    """In the place of a session: a router that is told of engines, of which it finds the `healthy` ones and refuses others."""

    def __init__(self, healthy, refused=()):
        self.healthy, self.refused, self.posts, self.now = healthy, refused, [], 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def request(self, method, url, json=None, timeout=None):
        if method == "POST":
            self.posts.append(json["url"])
            ok = json["url"] not in self.refused
            return SimpleNamespace(ok=ok, status_code=400, content=b"refused", json=dict)
        listed = [{"url": url, "id": url, "is_healthy": True} for url in self.healthy if url in self.posts]
        return SimpleNamespace(ok=True, json=lambda: {"workers": listed})


@pytest.mark.parametrize("refused", [(), ("http://e:0",)])
def test_engines_that_answer_are_told_of_again_beside_any_number_that_do_not(monkeypatch, caplog, refused):
    """One after the other they would wait for each of those, and nobody would see meanwhile that the router hangs."""
    caplog.set_level("INFO")
    urls = [f"http://e:{number}" for number in range(512)]
    half = HalfRouter(urls[500:], refused)
    monkeypatch.setattr(router_module, "time", half)
    monkeypatch.setattr(router_module, "session_with", lambda api_key: half)
    process = SimpleNamespace(poll=lambda: None)
    router = RouterHandle("10.0.0.9", 80, None, process, _told={url: Worker(url) for url in urls})
    router._missing = frozenset(urls)
    router._tell_again()
    assert router._missing == frozenset(urls[:500]) and sorted(half.posts) == sorted(urls)
    assert half.now <= router_module._WATCH_SECONDS + 3 * router_module._POLL_SECONDS
    assert [record.getMessage().split()[-2] for record in caplog.records] == urls[500:]


class Crowd(HalfRouter):
    """A router that answers a registration when as many are under way as may be."""

    def __init__(self, healthy, refused=()):
        super().__init__(healthy, refused)
        # A moment in which more would come, if they might.
        self.together = threading.Barrier(router_module._TOLD_AT_A_TIME, lambda: time.sleep(0.3))
        self.under_way, self.most = set(), 0

    def request(self, method, url, json=None, timeout=None):
        if method == "POST":
            self.under_way.add(json["url"])
            self.most = max(self.most, len(self.under_way))
            self.together.wait(60)
            self.under_way.discard(json["url"])
        return super().request(method, url, json, timeout)


def test_a_router_that_is_slow_is_told_of_many_engines_at_a_time_and_not_of_all(monkeypatch):
    urls = [f"http://e:{number}" for number in range(4 * router_module._TOLD_AT_A_TIME)]
    crowd = Crowd(urls[2:], refused=urls[:1])
    monkeypatch.setattr(router_module, "session_with", lambda api_key: crowd)
    router = RouterHandle("10.0.0.9", 80, None, None)
    with pytest.raises(EnginesLacking) as raised:
        router.add_workers([Worker(url) for url in urls], 2.0)
    assert sorted(crowd.posts) == sorted(urls) and crowd.most == router_module._TOLD_AT_A_TIME
    assert raised.value.reasons == {
        urls[0]: "the router answered 400 to POST /workers: refused",
        urls[1]: "router http://10.0.0.9:80: workers not healthy after 2 s",
    }, "the others are waited for although one is refused"
    assert str(raised.value.of(urls[1])) == f"router http://10.0.0.9:80: workers not healthy after 2 s: {urls[1]}"


class CountedTurn:
    """A lock that counts who has come for it."""

    def __init__(self):
        self.lock, self.came = threading.Lock(), []
        self.release = self.lock.release

    def acquire(self, timeout):
        self.came.append(timeout)
        return self.lock.acquire(timeout=timeout)


def test_one_question_is_for_all_threads_that_take_engines_out(monkeypatch):
    """When a node dies, each of its engines is taken out by a thread of its own."""
    urls, asked, turn = [f"http://e:{number}" for number in range(48)], [], CountedTurn()
    listed = dict.fromkeys(urls)

    class Router:
        def request(self, method, url, json=None, timeout=None):
            if method == "DELETE":
                listed.pop(url.removeprefix("http://10.0.0.9:80/workers/"))
            else:
                asked.append(url)
                # By the first answer all others have come.
                wait_until(lambda: len(turn.came) >= len(urls))
            workers = [{"url": url, "id": url, "is_healthy": True} for url in listed.copy()]
            return SimpleNamespace(ok=True, json=lambda: {"workers": workers})

    monkeypatch.setattr(router_module, "session_with", lambda api_key: Router())
    router = RouterHandle("10.0.0.9", 80, None, None)
    router._listing._turn = turn
    with ThreadPoolExecutor(len(urls)) as threads:
        list(threads.map(lambda url: router.remove_workers([url], 60.0), urls))
    assert listed == {}
    # The first one for itself, one for the others, and a look of each whether its engine is gone, at most.
    assert len(asked) <= 2 + len(urls)


@pytest.mark.parametrize(
    "answer", [b"<html>Bad gateway</html>", b'{"error": "no"}', b"[1]", b'{"workers": [{"a": 1}]}']
)
def test_the_page_of_a_proxy_before_a_router_is_an_error_of_the_run(monkeypatch, answer):
    response = requests.Response()
    response.status_code, response.url, response._content = 200, "http://10.0.0.9:80/workers", answer
    monkeypatch.setattr(RouterHandle, "_call", lambda self, *request: response)
    router = RouterHandle("10.0.0.9", 80, None, None)
    with pytest.raises(RunError, match="^no router answers at http://10.0.0.9:80/workers: ") as raised:
        router.remove_workers(["http://a"])
    assert str(raised.value).endswith(answer.decode())


def test_who_asks_a_router_that_comes_back_does_not_wait_for_ever(monkeypatch):
    """It answers its watch, which is more patient, and so is not ended."""
    slow = SlowRouter(20.0, [])
    monkeypatch.setattr(router_module, "time", slow)
    monkeypatch.setattr(router_module, "session_with", lambda api_key: slow)
    monkeypatch.setattr(router_module, "_LOOK_SECONDS", 0.001)
    router = RouterHandle("10.0.0.9", 80, None, None, comes_back=True, _guard=threading.current_thread())
    router._is_back.set()
    with pytest.raises(RunError, match="did not answer /workers"):
        router.add_workers([Worker("http://10.0.0.1:1")], 11.0)
    assert 160 <= slow.now < 200


# -- flags ---------------------------------------------------------------------------------------------------------------

SPECS = load_surface("router")


@pytest.fixture(scope="module")
def parser():
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    group = parser.add_argument_group("router")
    for spec in SPECS:
        add_flag(group, spec)
    return parser


def test_every_field_has_a_flag_of_its_name():
    assert [(spec.dest, spec.flags) for spec in SPECS] == [
        (f"router_{field.name}", (f"--router-{field.name.replace('_', '-')}",))
        for field in dataclasses.fields(RouterArgs)
    ]


def test_defaults_are_ours_or_none(parser):
    given = {name: value for name, value in vars(parser.parse_args([])).items() if value is not None}
    assert given == {f"router_{name}": value for name, value in OUR_DEFAULTS.items()}
    assert (given["router_log_level"], given["router_balance_abs_threshold"]) == ("warn", 10)
    assert given["router_balance_rel_threshold"] == 1.2


def test_types_follow_the_annotations_of_the_dataclass(parser):
    words = (
        "--router-cache-threshold 0.5 --router-max-tree-size 7 --no-router-disable-circuit-breaker "
        "--router-prometheus-duration-buckets 1 2.5 --router-request-id-headers a b --router-selector {} "
        '--router-jwt-role-mapping {"a":"admin"} --router-control-plane-api-keys [["i","n","k","admin"]] '
        "--router-prometheus-port 9 --router-policy consistent_hashing"
    )
    args = parser.parse_args(words.split())
    assert (args.router_cache_threshold, args.router_max_tree_size) == (0.5, 7)
    assert args.router_disable_circuit_breaker is False
    assert args.router_prometheus_duration_buckets == [1.0, 2.5]
    assert args.router_request_id_headers == ["a", "b"]
    assert (args.router_selector, args.router_jwt_role_mapping) == ({}, {"a": "admin"})
    assert args.router_control_plane_api_keys == [["i", "n", "k", "admin"]]
    assert (args.router_prometheus_port, args.router_policy) == (9, "consistent_hashing")


def test_help_tells_the_default_of_the_router():
    (spec,) = [spec for spec in SPECS if spec.dest == "router_cache_threshold"]
    assert isinstance(spec, FlagSpec) and spec.help.endswith("[router default: 0.3]")


class RecordingWorker(http.server.BaseHTTPRequestHandler):
    """What the router asks of a worker, answered as well as it needs; bodies for `/generate` are kept."""

    protocol_version = "HTTP/1.1"
    facts: ClassVar[dict] = {}
    bodies: ClassVar[list[dict]] = []

    def do_GET(self):
        self._answer({"model_path": "m", "served_model_name": "m", "tp_size": 1, "dp_size": 1})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/generate":
            self.bodies.append(json.loads(body))
        self._answer({"text": "", "meta_info": {}})

    def log_message(self, *args):
        pass

    def _answer(self, value):
        value = {**value, **self.facts} if self.path == "/server_info" else value
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextlib.contextmanager
def recording_worker(router, facts):
    """The URL of a worker with these `facts`, which has got no request, and the list of what it gets; the router is ready."""
    handler = type("Worker", (RecordingWorker,), {"facts": facts, "bodies": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        router.wait_ready(120)
        yield f"http://127.0.0.1:{server.server_port}", handler.bodies
    finally:
        router.shutdown()
        server.shutdown()
        server.server_close()
        serving.join(30)


def test_images_of_a_request_pass_the_router(tmp_path):
    router = start_router(SimpleNamespace(router_log_level="warn"), tmp_path)
    with recording_worker(router, {}) as (url, bodies):
        requests.post(
            f"{router.url}/workers", json={"url": url, "worker_type": "regular"}, timeout=30
        ).raise_for_status()
        assert router.wait_for_workers(60.0) == 1
        images = ["data:image/png;base64,AAAA", "data:image/png;base64,BBBB"]
        asked = {"input_ids": [1, 2, 3], "image_data": images, "sampling_params": {"max_new_tokens": 4}}
        requests.post(f"{router.url}/generate", json=asked, timeout=30).raise_for_status()
        (body,) = bodies
        assert {name: body[name] for name in asked} == asked


def test_a_router_that_chooses_among_groups_has_one_worker_of_them(tmp_path):
    flags = {"router_log_level": "warn", "router_dp_aware": True, "router_policy": "round_robin"}
    router = start_router(SimpleNamespace(**flags), tmp_path)
    with recording_worker(router, {"dp_size": 3}) as (url, bodies):
        for _ in range(2):
            router.add_workers([Worker(url)])
            assert [(worker["url"], worker["is_healthy"]) for worker in router.workers()] == [(url, True)]
            listed = requests.get(f"{router.url}/workers", timeout=30).json()["workers"]
            assert sorted(worker["url"] for worker in listed) == [f"{url}@{group}" for group in range(3)]
            for _ in range(6):
                requests.post(f"{router.url}/generate", json={"input_ids": [1]}, timeout=30).raise_for_status()
            assert sorted(body["data_parallel_rank"] for body in bodies) == [0, 0, 1, 1, 2, 2]
            bodies.clear()
            router.remove_workers([url])
            assert router.workers() == []


def test_an_engine_is_healthy_when_all_of_its_groups_are(monkeypatch):
    groups = [{"id": str(group), "url": f"http://a:1@{group}", "is_healthy": group != 1} for group in range(3)]
    answer = SimpleNamespace(json=lambda: {"workers": [*groups, {"id": "b", "url": "http://b:1", "is_healthy": True}]})
    monkeypatch.setattr(RouterHandle, "_call", lambda self, *request: answer)
    router = RouterHandle("127.0.0.1", 1, None, None)
    assert {worker["url"]: worker["is_healthy"] for worker in router.workers()} == {
        "http://a:1": False, "http://b:1": True,
    }  # fmt: skip
