"""Engines that follow a run: what they are given, and when; what is published comes from the real transport."""

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.utils.errors import UserError
from slime.utils.plugin_loader import load_function
from slime.weights.transports.disk_delta import DiskDeltaTransport
from tests.support.processes.waiting import wait_until

EXAMPLE = Path(__file__).parents[3] / "examples/delta_weight_sync"
Follower, newest, main = (load_function(f"{EXAMPLE}/follow.py:{name}") for name in ("Follower", "newest", "main"))


class Engine:
    """Loads a directory when it is told to, and tells its version, as a server does; `failing` answers an error."""

    def __init__(self):
        self.version, self.weights, self.failing, self.keys, self.asked = "default", {}, False, [], 0
        # While it is not set, the engine answers nothing.
        self.answers = threading.Event()
        self.answers.set()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                engine.asked += 1
                engine.answers.wait(60)
                self.answer({"weight_version": engine.version})

            def do_POST(self):
                payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                engine.keys.append(self.headers["Authorization"])
                engine.answers.wait(60)
                if not engine.failing:
                    files = Path(payload["model_path"]).glob("*.safetensors")
                    engine.weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
                    engine.version = payload["weight_version"]
                self.answer({"success": not engine.failing}, 400 if engine.failing else 200)

            def answer(self, value, status=200):
                text = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@contextlib.contextmanager
def served():
    engine = Engine()
    try:
        yield engine
    finally:
        engine.answers.set()
        engine.server.shutdown()
        engine.server.server_close()


@pytest.fixture
def engine():
    with served() as engine:
        yield engine


class Run:
    """A run of one source that pushes a model of two tensors."""

    def __init__(self, root: Path):
        self.hf, self.pushes = root / "hf", root / "pushes"
        if not self.hf.exists():
            self.hf.mkdir()
            (self.hf / "config.json").write_text("{}")
            save_file({"a": torch.zeros(1000), "b": torch.zeros(1000)}, self.hf / "model.safetensors")
        args = SimpleNamespace(
            hf_checkpoint=str(self.hf), update_weight_disk_dir=str(self.pushes), update_weight_disk_keep_files=False,
            update_weight_delta_encoding="xor", update_weight_delta_checksum="xxh3-128", release_train=False,
            update_weight_local_checkpoint_dir=str(root / "own"), distributed_timeout_minutes=1,
        )  # fmt: skip
        self.transport = DiskDeltaTransport(args, 0, 1)
        self.weights = {"a": torch.zeros(1000), "b": torch.zeros(1000)}

    def push(self, version: int, whole: bool = False, **values: float) -> Path:
        """`values`: of one place of a tensor."""
        for name, value in values.items():
            self.weights[name] = self.weights[name].clone()
            self.weights[name][version] = value
        if whole:
            self.transport.carry_all()
        self.transport.begin(version)
        self.transport.send(list(self.weights.items()))
        self.transport.finish()
        self.transport.settle()
        return self.pushes / f"weight_v{version:06d}"


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def follower_of(run, tmp_path, *engines):
    return Follower(run.pushes, run.hf, tmp_path / "local", [engine.url for engine in engines], 60)


def assert_serves(engine, run, version):
    assert engine.version == str(version)
    assert all(engine.weights[name].equal(tensor) for name, tensor in run.weights.items())


def test_an_engine_is_given_every_push_once(run, tmp_path, engine):
    follower = follower_of(run, tmp_path, engine)
    assert follower.step() is None and engine.version == "default"
    for version, change in ((1, {"a": 1.0}), (2, {"b": 2.0}), (3, {})):
        run.push(version, **change)
        assert follower.step() == version
        assert_serves(engine, run, version)
        assert follower.step() is None
    assert len(engine.keys) == 3


def test_one_that_comes_late_is_led_through_all_deltas(run, tmp_path, engine):
    run.push(1, a=1.0)
    run.push(2, b=2.0)
    run.push(3, a=3.0)
    assert follower_of(run, tmp_path, engine).step() == 3
    assert_serves(engine, run, 3)


def test_a_whole_publication_takes_the_place_of_what_was_before(run, tmp_path, engine):
    follower = follower_of(run, tmp_path, engine)
    run.push(1, a=1.0)
    follower.step()
    run.push(2, whole=True, b=2.0)
    assert [path.name for path in run.pushes.glob("weight_v*")] == ["weight_v000002"]
    assert follower.step() == 2
    assert_serves(engine, run, 2)


def test_an_engine_that_was_started_anew_is_given_the_weights_again(run, tmp_path, engine):
    follower = follower_of(run, tmp_path, engine)
    run.push(1, a=1.0)
    assert follower.step() == 1
    engine.version, engine.weights = "default", {}
    assert follower.step() == 1
    assert_serves(engine, run, 1)


def test_engines_are_asked_and_load_at_once(run, tmp_path, engine):
    """While the first one takes its time, the second one has done all that it does."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool, served() as slow:
        follower = follower_of(run, tmp_path, slow, engine)
        run.push(1, a=1.0)
        slow.answers.clear()
        step = pool.submit(follower.step)
        wait_until(lambda: engine.version == "1" and engine.asked == 1, 30)
        assert slow.version == "default" and not step.done()
        slow.answers.set()
        assert step.result(30) == 1
        assert_serves(slow, run, 1)
        # What they have is asked of both before one of them is given anything.
        slow.answers.clear()
        step = pool.submit(follower.step)
        wait_until(lambda: engine.asked == 2, 30)
        assert not step.done()
        slow.answers.set()
        assert step.result(30) is None


def test_an_engine_that_fails_is_asked_again_and_complained_of_once(run, tmp_path, engine, caplog):
    with served() as well:
        follower = follower_of(run, tmp_path, well, engine)
        run.push(1, a=1.0)
        engine.failing = True
        assert follower.step() is None and follower.step() is None
        assert_serves(well, run, 1)
        assert [record.message for record in caplog.records] == [
            f'{engine.url}/update_weights_from_disk: 400 {{"success": false}}; it is asked again'
        ]
        engine.failing = False
        assert follower.step() == 1
        assert_serves(engine, run, 1)
        assert len(well.keys) == 1


def test_damaged_files_are_not_loaded_and_the_next_ones_are(run, tmp_path, engine, caplog):
    follower = follower_of(run, tmp_path, engine)
    run.push(1, a=1.0)
    assert follower.step() == 1
    published = run.push(2, b=2.0)
    (shard,) = published.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 0xFF
    shard.write_bytes(content)
    assert follower.step() is None and follower.step() is None and engine.version == "1"
    assert caplog.text.count("cannot be used") == 1
    run.push(3, whole=True)
    assert follower.step() == 3
    assert_serves(engine, run, 3)


def test_another_run_begins_again_with_version_one(run, tmp_path, engine):
    follower = follower_of(run, tmp_path, engine)
    run.push(1, a=1.0)
    run.push(2, a=2.0)
    assert follower.step() == 2
    run.transport.close()
    other = Run(tmp_path)
    other.push(1, b=9.0)
    later = max(path.stat().st_mtime_ns for path in run.pushes.glob("*/*.json")) + 10**9
    os.utime(run.pushes / "weight_v000001/model.safetensors.index.json", ns=(later, later))
    assert newest(run.pushes).version == 1
    assert follower.step() == 1
    assert_serves(engine, other, 1)


def test_what_was_written_last_counts_and_not_the_number(tmp_path):
    for version, second in ((7, 100), (1, 200)):
        directory = tmp_path / f"weight_v{version:06d}"
        directory.mkdir()
        (directory / "model.safetensors.index.json").write_text("{}")
        os.utime(directory / "model.safetensors.index.json", (second, second))
    assert newest(tmp_path).version == 1


def test_what_is_no_push_is_passed_by(tmp_path):
    assert newest(tmp_path / "not there") is None
    (tmp_path / "weight_v000001").mkdir()
    (tmp_path / "weight_vx").mkdir()
    (tmp_path / ".weight_v000002").mkdir()
    assert newest(tmp_path) is None


def test_two_followers_do_not_write_one_directory(run, tmp_path, engine):
    run.push(1, a=1.0)
    first = follower_of(run, tmp_path, engine)
    assert first.step() == 1
    with pytest.raises(UserError, match="another run has its weights here"):
        follower_of(run, tmp_path, engine).step()
    first.close()
    assert follower_of(run, tmp_path, engine).step() == 1


def test_a_directory_with_files_of_somebody_is_refused(run, tmp_path, engine):
    (tmp_path / "local").mkdir()
    (tmp_path / "local/thesis.tex").write_text("years of work")
    run.push(1, a=1.0)
    with pytest.raises(UserError, match="holds files that no run has written"):
        follower_of(run, tmp_path, engine).step()


def test_the_command_ends_when_a_version_is_reached_and_shows_its_key_to_engines(run, tmp_path, engine, monkeypatch):
    monkeypatch.setenv("SLIME_ENGINE_API_KEY", "f00d")
    with signals_as_before():
        run.push(1, a=1.0)
        words = [
            "--pushes",
            run.pushes,
            "--hf-checkpoint",
            run.hf,
            "--local",
            tmp_path / "local",
            "--engines",
            engine.url,
        ]
        assert main([*map(str, words), "--until", "1"]) == 0
        assert engine.keys == ["Bearer f00d"]
        (tmp_path / "local/thesis.tex").write_text("years of work")
        (tmp_path / "local/.slime-turn").unlink()
        run.push(2, a=2.0)
        assert main([*map(str, words), "--until", "2"]) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_ends_at_a_signal_while_an_engine_does_not_answer(run, tmp_path, number):
    run.push(1, a=1.0)
    with socket.create_server(("127.0.0.1", 0)) as engine:
        words = ["--pushes", run.pushes, "--hf-checkpoint", run.hf, "--local", tmp_path / "local", "--engines"]
        with subprocess.Popen(
            [sys.executable, EXAMPLE / "follow.py", *words, f"http://127.0.0.1:{engine.getsockname()[1]}"],
            stdin=subprocess.DEVNULL, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as command:  # fmt: skip
            try:
                engine.settimeout(60)
                engine.accept()[0].recv(1)
                command.send_signal(number)
                assert command.wait(20) == 0
            finally:
                command.kill()


@contextlib.contextmanager
def signals_as_before():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
