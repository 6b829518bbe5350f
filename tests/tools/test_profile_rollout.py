"""Engines behind a router are told to profile, each by a request of its own; who was not reached is named."""

import contextlib
import http.server
import json
import socket
import threading

import pytest

from slime.utils.errors import RunError, UserError
from tools.profile_rollout import main

KEY = "s3cret"


class Server(http.server.ThreadingHTTPServer):
    """Notes every request, and answers GET /workers with `workers`, POST with `status`."""

    def __init__(self, key=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.key, self.workers, self.status, self.requests = key, [], 200, []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self._answer(200, json.dumps({"workers": [{"id": "1", "url": url} for url in self.server.workers]}))

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, json.loads(body)))
        self._answer(self.server.status, "told")

    def _answer(self, status, text):
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            status = 401
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments):
        pass


@pytest.fixture
def servers():
    """A router and two engines."""
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(Server(KEY)) for _ in range(3)]
        for server in started:
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            stack.callback(thread.join, 60)
            stack.callback(server.shutdown)
        started[0].workers = [server.url for server in started[1:]]
        yield started


@pytest.fixture
def words(servers, tmp_path, monkeypatch):
    (tmp_path / "key").write_text(f"{KEY}\n")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    return ["--router-url", f"{servers[0].url}/", "--api-key-file", str(tmp_path / "key"), "--timeout", "30"]


def test_all_engines_start_and_stop_to_profile(servers, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    router, *engines = servers
    assert main([*words, "--output-dir", "profiles", "--num-steps", "5", "--activities", "GPU", "--with-stack"]) == 0
    assert (
        f"2 of 2 engines have begun a profile, and write into {tmp_path}/profiles after 5 steps"
        in capsys.readouterr().out
    )
    settings = {
        "output_dir": f"{tmp_path}/profiles", "num_steps": 5, "activities": ["GPU"], "profile_by_stage": False,
        "with_stack": True, "record_shapes": False,
    }  # fmt: skip
    assert main([*words, "--action", "stop"]) == 0
    for engine in engines:
        assert engine.requests == [("/start_profile", settings), ("/stop_profile", {})]
    assert router.requests == [], "a router would tell one of them alone"
    engines[0].requests.clear()
    assert main([*words, "--num-steps", "5"]) == 0
    assert engines[0].requests[0][1]["output_dir"] is None, "engines have a default of their own"
    assert "write into the directory of SGLANG_TORCH_PROFILER_DIR or /tmp" in capsys.readouterr().out


def test_an_engine_that_does_not_do_it_is_named(servers, words, tmp_path, capsys):
    servers[2].status = 500
    assert main([*words, "--output-dir", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert f"{servers[2].url}/start_profile: answered 500: told" in shown.err and servers[1].url not in shown.err
    assert "1 of 2 engines have begun" in shown.out


def test_what_is_no_router_is_told(servers, words, tmp_path):
    servers[0].workers = []
    with pytest.raises(UserError, match="lists no engine"):
        main([*words, "--action", "stop"])
    with pytest.raises(RunError, match="/workers: asks for another key .401.; give it by --api-key-file") as error:
        main([*words[:2], "--action", "stop"])
    assert KEY not in str(error.value)
    with pytest.raises(RunError, match="http://127.0.0.1:1/workers: ConnectionError"):
        main(["--router-url", "http://127.0.0.1:1", "--action", "stop"])
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RunError, match=f"^{url}/workers: did not answer within --timeout 0.2 s"):
            main(["--router-url", url, "--action", "stop", "--timeout", "0.2"])
    for wrong in (
        ["--router-url", "10.0.0.1:3000", "--action", "stop"],
        [*words, "--action", "stop", "--num-steps", "0"],
        ["--router-url", "http://10.0.0.1:3000", "--action", "stop", "--api-key-file", "/nowhere"],
    ):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
