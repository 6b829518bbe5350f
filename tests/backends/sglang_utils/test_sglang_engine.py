"""How long the calls of an engine take when its server is slow or silent; with real servers: `tests/serving`."""

from types import SimpleNamespace

import pytest
import urllib3

from slime.backends.sglang_utils import sglang_engine
from slime.backends.sglang_utils.external import ExternalEngine, describe_engine
from slime.backends.sglang_utils.server_arguments import EnginePart, ServerArguments
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.utils.errors import RunError
from slime.utils.filesystem import remove_scratch_directory
from slime.utils.ports import reserve_port


class BusyServer:
    """In the place of its connections: refuses for `refusals` times, each after `answer_s` seconds of a clock of its own."""

    def __init__(self, answer_s, refusals):
        self.answer_s, self.refusals, self.now = answer_s, refusals, 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def request(self, method, url, json, timeout):
        assert timeout.connect_timeout <= timeout.read_timeout
        self.now += min(timeout.read_timeout, self.answer_s)
        if timeout.read_timeout < self.answer_s:
            raise urllib3.exceptions.HTTPError("too slow")
        self.refusals -= 1
        return SimpleNamespace(status=200 if self.refusals < 0 else 400, data=b"requests are running")


@pytest.fixture
def flush(monkeypatch, tmp_path):
    def call(answer_s, refusals):
        server = BusyServer(answer_s, refusals)
        engine = SGLangEngine(SimpleNamespace(), 3, tmp_path)
        engine._url, engine._connections = "http://10.0.0.1:1", server
        monkeypatch.setattr(sglang_engine, "time", server)
        try:
            engine.flush_cache()
        finally:
            call.took = server.now

    return call


def test_an_engine_carries_out_orders_in_turn_until_one_fails(tmp_path, monkeypatch):
    engine, asked = SGLangEngine(SimpleNamespace(), 3, tmp_path), []
    monkeypatch.setattr(
        engine,
        "_call",
        lambda method, path, payload=None, **_: asked.append((path, payload)) or {"weight_version": "4"},
    )
    assert engine.carry_out([("pause_generation", "retract"), ("get_weight_version",)]) == "4"
    assert asked == [("/pause_generation", {"mode": "retract"}), ("/model_info", None)]
    engine.prove_weight_version("4")
    asked.clear()
    with pytest.raises(RunError, match="engine 3 reports weight version 4 after it was sent 5"):
        engine.carry_out([("end_weight_update",), ("prove_weight_version", "5"), ("continue_generation",)])
    assert [path for path, _ in asked] == ["/end_weight_update", "/model_info"]


@pytest.mark.parametrize(
    ("of_server", "sent"),
    [(None, "auto"), ("dummy", "auto"), ("gguf", "auto"), ("flash_rl", "flash_rl"), ("fastsafetensors",) * 2],
)
def test_a_server_reads_what_is_pushed_whatever_it_loaded_at_its_start(tmp_path, monkeypatch, of_server, sent):
    """A real server that was started without weights: `tests/serving/test_experts_of_engine_ranks.py`."""
    asked = []
    of_run = SGLangEngine(SimpleNamespace(sglang_load_format=of_server), 3, tmp_path)
    info = describe_engine("http://10.0.0.1:1", {"model_path": "/m", "load_format": of_server})
    for engine in (of_run, ExternalEngine(SimpleNamespace(), 3, str(tmp_path), info)):
        monkeypatch.setattr(engine, "_call", lambda method, path, payload: asked.append(payload))
        engine.update_weights_from_disk("/w", "4")
    told = {"model_path": "/w", "load_format": sent, "flush_cache": True, "weight_version": "4"}
    # Of the server of others, which answers for its first rank, all ranks are asked something before the files may go.
    assert asked == [told, told, {"action": "checksum", "skip_tensor_list": [""]}]


@pytest.mark.parametrize(
    ("role", "part", "reserved"),
    [
        ("prefill", None, True),
        ("prefill", EnginePart(2, 0, "127.0.0.1:9", 15002), True),
        ("prefill", EnginePart(2, 1, "127.0.0.1:9", 15002), False),
        ("decode", None, False),
        ("regular", None, False),
    ],
)
def test_an_engine_that_prefills_holds_a_port_for_those_that_decode(tmp_path, monkeypatch, role, part, reserved):
    """Until its server is healthy, and the port is known to whoever registers it."""
    engine, held = SGLangEngine(SimpleNamespace(engine_start_timeout=1.0), 3, tmp_path, role), []

    def launch(*arguments):
        port = engine.bootstrap_port()
        if port is not None:
            with pytest.raises(RunError, match="no free port"):
                reserve_port("127.0.0.1", port, attempts=1)
        held.append(port)

    monkeypatch.setenv("SLIME_HOST_IP", "127.0.0.1")
    monkeypatch.setattr(engine, "_launch", launch)
    monkeypatch.setattr(engine, "_wait_until_healthy", lambda timeout: None)
    monkeypatch.setattr(engine, "_call", lambda *request: None)
    engine.init(part=part)
    assert held == [engine.bootstrap_port()] and (held[0] is not None) == reserved
    if reserved:
        reserve_port("127.0.0.1", held[0], attempts=1).release()


def test_an_engine_with_groups_of_attention_holds_a_row_of_ports_until_its_server_is_healthy(tmp_path, monkeypatch):
    args = SimpleNamespace(engine_start_timeout=1.0, sglang_enable_dp_attention=True, sglang_dp_size=4)
    engine, held = SGLangEngine(args, 3, tmp_path), []

    def launch(*arguments):
        host, _, first = engine.reserve_first_port().rpartition(":")
        held.extend(range(int(first), int(first) + 34))
        with pytest.raises(RunError, match="no free port"):
            reserve_port(host, held[-1], attempts=1)

    monkeypatch.setenv("SLIME_HOST_IP", "127.0.0.1")
    monkeypatch.setattr(engine, "_launch", launch)
    monkeypatch.setattr(engine, "_wait_until_healthy", lambda timeout: None)
    monkeypatch.setattr(engine, "_call", lambda *request: None)
    engine.init()
    for port in held:
        reserve_port("127.0.0.1", port, attempts=1).release()


@pytest.mark.parametrize(("given", "threads"), [(3, "3"), (None, "5")])
def test_a_server_computes_with_the_threads_of_its_user_or_its_share_of_the_cores(
    tmp_path, monkeypatch, given, threads
):
    args = SimpleNamespace(sglang_enable_dp_attention=None)
    engine, started = SGLangEngine(args, 3, tmp_path, threads=given), []
    arguments = ServerArguments({"tp_size": 1, "host": "127.0.0.1"}, frozenset())
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr(sglang_engine, "gpus_on_this_machine", lambda: 0)
    monkeypatch.setattr(sglang_engine, "share_of_cores", lambda args: 5)
    monkeypatch.setattr(sglang_engine, "compute_server_arguments", lambda *words, **named: arguments)
    monkeypatch.setattr(
        sglang_engine,
        "ChildProcess",
        lambda name, command, log, environment: started.append(environment) or SimpleNamespace(start=lambda: None),
    )
    port = SimpleNamespace(host="127.0.0.1", port=15000)
    engine._launch(port, port, 0, None)
    remove_scratch_directory(engine._scratch_dir)
    assert [environment["OMP_NUM_THREADS"] for environment in started] == [threads]


def test_an_engine_that_prefills_can_be_asked_alone(tmp_path, monkeypatch):
    engine, asked = SGLangEngine(SimpleNamespace(), 3, tmp_path, "prefill"), []
    monkeypatch.setattr(engine, "_call", lambda method, path, payload, timeout: asked.append(payload))
    engine.generate({"input_ids": [[1], [2]]})
    assert asked == [{"input_ids": [[1], [2]], "bootstrap_host": "2.2.2.2", "bootstrap_room": 0}]


@pytest.mark.parametrize(("running", "waiting"), [(0, 0), (1, 0), (0, 2)])
def test_an_engine_tells_whether_it_has_requests(tmp_path, monkeypatch, running, waiting):
    engine, asked = SGLangEngine(SimpleNamespace(), 3, tmp_path), []
    loads = [{"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": waiting}]
    monkeypatch.setattr(
        engine, "_call", lambda *request, timeout: asked.append((*request, timeout)) or {"loads": loads}
    )
    assert engine.has_requests() is (running + waiting > 0)
    assert asked == [("GET", "/v1/loads?include=core", 5.0)]


@pytest.mark.parametrize("answer", ["<html>Back soon</html>", ["x"]])
@pytest.mark.parametrize(
    "ask", [SGLangEngine.has_requests, SGLangEngine.get_weight_version, SGLangEngine.weights_checksum]
)
def test_the_page_of_a_proxy_before_an_engine_is_an_error_of_that_engine(tmp_path, monkeypatch, ask, answer):
    engine = SGLangEngine(SimpleNamespace(), 3, tmp_path)
    monkeypatch.setattr(engine, "_call", lambda *request, **options: answer)
    with pytest.raises(RunError, match="^engine 3 answered /.* with ") as raised:
        ask(engine)
    assert str(raised.value).endswith(repr(str(answer)))


def test_a_cache_is_flushed_when_the_last_request_has_ended(flush):
    flush(answer_s=0.25, refusals=4)
    assert flush.took == 4 * (0.25 + 1) + 0.25


@pytest.mark.parametrize(
    ("answer_s", "message"),
    [(0.0, "engine 3 refused to flush its cache for 60 s: requests are running"),
     (25.0, "engine 3 did not answer /flush_cache within 8 s"),
     (1000.0, "engine 3 did not answer /flush_cache within 60 s")],
)  # fmt: skip
def test_a_minute_is_a_minute_for_a_slow_or_silent_server(flush, answer_s, message):
    with pytest.raises(RunError, match=message):
        flush(answer_s, refusals=1000)
    assert 59.0 <= flush.took <= 60.0


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_an_engine_that_was_paused_under_requests_goes_on_for_a_moment_if_it_refuses_to_flush(
    tmp_path, monkeypatch, mode
):
    """A grammar may be compiled for a request: a paused server does not notice that this has ended."""
    engine, asked = SGLangEngine(SimpleNamespace(http_control_timeout=1.0), 3, tmp_path), []

    def request(method, path, payload, timeout=None):
        asked.append((path.removeprefix("/").removesuffix("_generation"), *payload.values()))
        refuses = path == "/flush_cache" and [path for path, *_ in asked].count("flush_cache") < 3
        return SimpleNamespace(status=400 if refuses else 200, data=b"refused", json=lambda: {})

    monkeypatch.setattr(engine, "_request", request)
    monkeypatch.setattr(
        sglang_engine, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda s: asked.append((s,)))
    )
    engine.carry_out([("pause_generation", mode), ("flush_cache",)])
    between = [("continue",), (1.0,), ("pause", "retract")] if mode == "retract" else [(1.0,)]
    assert asked == [("pause", mode), ("flush_cache",), *between, ("flush_cache",), *between, ("flush_cache",)]
    engine.continue_generation()
    asked.clear()
    engine.flush_cache()
    assert asked == [("flush_cache",), (1.0,), ("flush_cache",), (1.0,), ("flush_cache",)]


# -- sleep ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """An engine whose server remembers what it was asked; `engine.refuses` is what it answers with an error."""
    engine = SGLangEngine(SimpleNamespace(http_control_timeout=1.0), 0, tmp_path)
    engine.asked, engine.refuses = [], set()

    def request(method, path, payload=None, timeout=None):
        short = path.removesuffix("_memory_occupation").removesuffix("_generation").lstrip("/")
        engine.asked.append((short, *payload.get("tags", ())))
        if short in engine.refuses:
            return SimpleNamespace(status=400, data=b"no")
        return SimpleNamespace(status=200, json=lambda: {})

    monkeypatch.setattr(engine, "_request", request)
    return engine


CACHES = ("kv_cache", "cuda_graph")


def test_an_engine_sleeps_and_wakes_in_two_steps_each_of_them_once(engine):
    for _ in range(2):
        engine.sleep()
    assert engine.asked == [("flush_cache",), ("pause",), ("flush_cache",), ("release", "weights", *CACHES)]
    engine.asked.clear()
    for _ in range(2):
        engine.wake_weights()
    assert engine.asked == [("resume", "weights")]
    engine.asked.clear()
    engine.continue_generation()
    for _ in range(2):
        engine.wake_caches()
    assert engine.asked == [("resume", *CACHES), ("continue",)]
    engine.asked.clear()
    engine.continue_generation()
    assert engine.asked == [("continue",)], "awake, it goes on at once"


def test_an_engine_that_nobody_told_to_go_on_stays_paused(engine):
    """A push that failed on it left half of the weights there."""
    engine.sleep()
    engine.wake_weights()
    engine.continue_generation()
    engine.wake_caches()
    engine.sleep()
    engine.wake_weights()
    engine.asked.clear()
    engine.wake_caches()
    assert engine.asked == [("resume", *CACHES)]


def test_caches_do_not_wake_before_weights(engine):
    engine.sleep()
    engine.asked.clear()
    with pytest.raises(RunError, match="no use before it has weights"):
        engine.wake_caches()
    assert engine.asked == []


def test_half_awake_it_gives_back_what_it_has(engine):
    engine.sleep()
    engine.wake_weights()
    engine.asked.clear()
    engine.sleep()
    assert engine.asked == [("release", "weights")]


def test_what_the_server_refused_has_not_happened(engine):
    engine.refuses = {"release"}
    with pytest.raises(RunError, match="answered 400 to /release_memory_occupation"):
        engine.sleep()
    engine.wake_caches()
    engine.continue_generation()
    assert engine.asked[-1] == ("continue",)


def test_a_request_that_does_not_end_within_a_minute_keeps_the_engine_awake_and_is_an_error(engine, monkeypatch):
    clock = BusyServer(0.0, 0)
    monkeypatch.setattr(sglang_engine, "time", clock)
    engine.refuses = {"flush_cache"}
    with pytest.raises(RunError, match="engine 0 refused to flush its cache for 60 s: no"):
        engine.sleep()
    assert 59.0 <= clock.now <= 60.0
    assert set(engine.asked) == {("flush_cache",)}, "it goes on with the request, and has all of its memory"
    engine.refuses.clear()
    engine.asked.clear()
    engine.sleep()
    assert engine.asked == [("flush_cache",), ("pause",), ("flush_cache",), ("release", "weights", *CACHES)]


def test_awake_engines_are_not_woken(engine):
    engine.wake_weights()
    engine.wake_caches()
    assert engine.asked == []


def test_what_no_push_brings_is_neither_overwritten_nor_compared(monkeypatch, tmp_path):
    engine = SGLangEngine(SimpleNamespace(http_control_timeout=1.0, engine_load_timeout=1.0), 0, tmp_path)
    asked = []

    def request(method, path, payload=None, timeout=None):
        asked.append((path, payload["action"], {"axis_map", "visual."}.issubset(payload["skip_tensor_list"])))
        return SimpleNamespace(status=200, json=lambda: {"ranks": []})

    monkeypatch.setattr(engine, "_request", request)
    engine.reset_weights()
    engine.weights_checksum()
    assert asked == [("/weights_checker", "reset_tensors", True), ("/weights_checker", "checksum", True)]
