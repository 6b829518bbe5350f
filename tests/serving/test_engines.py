"""Two real engines behind the real router, and a plain single-process trainer that pushes weights to them.

The servers are started once. The tests that end them come last.
"""

import os
import shutil
import signal
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import requests

from slime.arguments import build_parser
from slime.utils.errors import RunError, UserError
from tests.support.log_probs import ReferenceModel, generation_request, response_of
from tests.support.tiny_checkpoint import make_tiny_checkpoint
from tests.support.waiting import wait_until

API_KEY = "key-of-this-test-run"
# An integer with a suffix, a list of integers, JSON, a text that only sglang can read, a switch turned off.
TYPED_FLAGS = (
    "--sglang-max-total-tokens", "16Ki", "--sglang-gc-threshold", "701", "11", "12",
    "--sglang-default-chat-template-kwargs", '{"enable_thinking": false}',
    "--sglang-cuda-graph-config", '{"decode": {"backend": "disabled"}}', "--no-sglang-dllm-fdfo",
    "--sglang-served-model-name", "tiny",
)  # fmt: skip
PROMPT = [5, 9, 77, 200, 31, 8, 90, 3]


def typed_server_flags() -> dict[str, Any]:
    """What the parser makes of `TYPED_FLAGS`."""
    args = build_parser().parse_args(["--rollout-batch-size", "1", *TYPED_FLAGS])
    return {name: value for name, value in vars(args).items() if value is not None and name.startswith("sglang_")}


def make_args(checkpoint, **overrides) -> SimpleNamespace:
    values = {
        "hf_checkpoint": str(checkpoint),
        "log_level": "INFO",
        "seed": 1,
        "num_gpus_per_node": 2,
        "rollout_num_gpus_per_engine": 1,
        "router_api_key": API_KEY,
        "router_policy": "round_robin",
        "distributed_timeout_minutes": 1,
        "engine_start_timeout": 120.0,
        "engine_load_timeout": 60.0,
        "http_control_timeout": 60.0,
        "sglang_enable_deterministic_inference": True,
    }
    return SimpleNamespace(**{**values, **overrides})


@pytest.fixture(scope="module")
def old_checkpoint(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("old"), seed=0)


@pytest.fixture(scope="module")
def new_model(tmp_path_factory):
    return ReferenceModel(make_tiny_checkpoint(tmp_path_factory.mktemp("new"), seed=1))


@pytest.fixture(scope="module")
def old_model(old_checkpoint):
    return ReferenceModel(old_checkpoint)


@pytest.fixture(scope="module")
def serving(old_checkpoint, tmp_path_factory):
    import ray

    from slime.serving.engine_group import EngineGroup
    from slime.serving.router import start_router

    log_dir = tmp_path_factory.mktemp("logs")
    args = make_args(old_checkpoint, **typed_server_flags())
    started = time.monotonic()
    ray.init(address="local", num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False)
    placement_group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * 2)
    assert placement_group.wait(30)
    ray_seconds = time.monotonic() - started
    router = start_router(args, log_dir)
    group = EngineGroup(args, placement_group, [(0, 0), (1, 1)], log_dir)
    try:
        group.start()
        router.wait_ready()
        router_seconds = time.monotonic() - started
        group.wait_ready()
        engine_seconds = time.monotonic() - started
        group.register(router)
        total = time.monotonic() - started
        print(
            f"Ray {ray_seconds:.1f} s, router {router_seconds:.1f}, engines {engine_seconds:.1f}, registered {total:.1f}"
        )
        yield SimpleNamespace(args=args, router=router, group=group, log_dir=log_dir)
    finally:
        group.shutdown()
        router.shutdown()
        ray.shutdown()


def post(url, payload, key=API_KEY):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return requests.post(url, json=payload, headers=headers, timeout=60)


def mean_difference(answer, model) -> float:
    tokens, log_probs = response_of(answer)
    assert len(tokens) == 24
    reference = model.log_probs(PROMPT, tokens)
    return sum(abs(a - b) for a, b in zip(log_probs, reference, strict=True)) / len(tokens)


def server_tree(pid: int) -> list[psutil.Process]:
    server = psutil.Process(pid)
    return [server, *server.children(recursive=True)]


def wait_until_ended(processes):
    wait_until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes))


def make_updater(serving, tensors, expected=None, bucket_bytes=100_000):
    from slime.weights.buckets import split_into_buckets
    from slime.weights.process_group import ProcessGroupWeightUpdater

    updater = ProcessGroupWeightUpdater(
        serving.args, lambda: split_into_buckets(tensors.items(), bucket_bytes), True, expected_names=expected
    )
    group = serving.group
    updater.connect_rollout_engines(group.engines, None, group.gpu_counts, group.gpu_offsets, None)
    return updater


# -- arguments -----------------------------------------------------------------------------------------------------------


def test_typed_flags_reach_the_server(serving):
    headers = {"Authorization": f"Bearer {API_KEY}"}
    info = requests.get(f"{serving.group.urls[0]}/server_info", headers=headers, timeout=60).json()
    assert info["max_total_tokens"] == 16384
    assert info["gc_threshold"] == [701, 11, 12]
    assert info["default_chat_template_kwargs"] == {"enable_thinking": False}
    assert info["cuda_graph_config"]["decode"]["backend"] == "disabled"
    assert info["dllm_fdfo"] is False
    assert info["random_seed"] == 1 and info["tp_size"] == 1, "derived values stay"


# -- generation ----------------------------------------------------------------------------------------------------------


def test_log_probs_through_the_router_equal_transformers(serving, old_model):
    for _ in range(2):
        answer = post(f"{serving.router.url}/generate", generation_request(PROMPT))
        assert answer.ok, answer.text
        tokens, log_probs = response_of(answer.json())
        assert log_probs == pytest.approx(old_model.log_probs(PROMPT, tokens), abs=1e-4)


def test_engines_with_a_key_behind_a_given_router_without_one(serving, tmp_path):
    from slime.serving.router import start_router

    running = start_router(SimpleNamespace(router_policy="round_robin"), tmp_path)
    try:
        running.wait_ready()
        address = {"sglang_router_ip": running.ip, "sglang_router_port": running.port}
        given = start_router(SimpleNamespace(**address, router_api_key=None), tmp_path)
        serving.group.register(given)
        assert post(f"{given.url}/generate", generation_request(PROMPT), key=None).ok
        with pytest.raises(UserError, match="serves engines that are not of this run"):
            start_router(SimpleNamespace(**address, router_api_key=None), tmp_path)
        given.remove_workers(serving.group.urls)
        assert given.workers() == []
        given.shutdown()
        assert running.process.poll() is None, "somebody else's router goes on"
    finally:
        running.shutdown()


def test_a_sampling_seed_decides_the_tokens_on_every_engine(serving):
    def tokens_of(seed, engine_url):
        request = generation_request(PROMPT)
        request["sampling_params"]["sampling_seed"] = seed
        return response_of(post(f"{engine_url}/generate", request).json())[0]

    first, second = serving.group.urls
    assert tokens_of(1, first) == tokens_of(1, second) == tokens_of(1, first)
    assert tokens_of(1, first) != tokens_of(2, first)


def test_both_engines_are_registered_and_healthy(serving):
    workers = serving.router.workers()
    assert sorted(worker["url"] for worker in workers) == sorted(serving.group.urls)
    assert all(worker["is_healthy"] for worker in workers)
    serving.group.call_all("health")


def test_a_request_without_the_key_is_refused(serving):
    for base in (serving.router.url, *serving.group.urls):
        for key in (None, "another key"):
            assert post(f"{base}/generate", generation_request(PROMPT), key).status_code == 401


def test_the_key_is_in_no_log(serving):
    logs = list(serving.log_dir.iterdir())
    assert {log.name for log in logs} == {"engine_0.log", "engine_1.log", "router.log"}
    assert not [log.name for log in logs if API_KEY in log.read_text(errors="replace")]


def test_g6_servers_listen_on_loopback_only(serving):
    import ray

    for pid in [serving.router.process.pid, *ray.get([engine.server_pid.remote() for engine in serving.group.engines])]:
        for process in server_tree(pid):
            listening = [c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
            assert set(listening) <= {"127.0.0.1", "::1"}, (process.name(), listening)


def test_log_probs_tell_old_and_new_weights_apart(serving, old_model, new_model):
    answer = post(f"{serving.group.urls[0]}/generate", generation_request(PROMPT)).json()
    assert mean_difference(answer, old_model) < 1e-5
    assert mean_difference(answer, new_model) > 0.1


# -- weights -------------------------------------------------------------------------------------------------------------


def test_a_push_makes_all_engines_serve_the_new_weights(serving, new_model):
    tensors = new_model.named_tensors()
    updater = make_updater(serving, tensors, expected=set(tensors))
    try:
        updater.update_weights()
        assert updater.weight_version == 1
        assert serving.group.call_all("get_weight_version") == ["1", "1"]
        for answer in serving.group.call_all("generate", generation_request(PROMPT)):
            assert mean_difference(answer, new_model) <= 1e-5
            assert answer["meta_info"]["weight_version"] == "1"
        metrics = updater.pop_metrics()
        assert metrics["perf/update_weights_bytes"] == sum(tensor.nbytes for tensor in tensors.values())
        assert metrics["perf/update_weights_parts"] > 1
        assert metrics["perf/update_weights_time"] > 0
        assert updater.pop_metrics() == {}
        updater.update_weights()
        assert serving.group.call_all("get_weight_version") == ["2", "2"]
    finally:
        updater.disconnect_rollout_engines()


def test_checksums_prove_that_the_engines_hold_what_was_pushed(serving, old_checkpoint, old_model, tmp_path):
    from slime.weights.equality import check_all_reset, check_equal_checksums
    from slime.weights.hf_writer import write_hf_checkpoint

    tensors = old_model.named_tensors()
    group = serving.group
    scratch = tmp_path / "scratch"
    write_hf_checkpoint(scratch, tensors.items(), old_checkpoint)
    group.call_all("update_weights_from_disk", str(scratch))
    shutil.rmtree(scratch)
    from_disk = group.call_all("weights_checksum")
    group.call_all("reset_weights")
    check_all_reset(from_disk, group.call_all("weights_checksum"))
    updater = make_updater(serving, tensors)
    try:
        updater.update_weights()
        check_equal_checksums(from_disk, group.call_all("weights_checksum"))
    finally:
        updater.disconnect_rollout_engines()


def test_s11_checksums_expose_a_tensor_that_was_not_pushed(serving, old_model):
    from slime.weights.equality import check_equal_checksums

    tensors = dict(old_model.named_tensors())
    good = serving.group.call_all("weights_checksum")
    lost = tensors.pop("model.layers.1.mlp.down_proj.weight")
    tensors["model.layers.1.mlp.down_projection.weight"] = lost
    serving.group.call_all("reset_weights")
    updater = make_updater(serving, tensors, expected=None)
    try:
        updater.update_weights()
        with pytest.raises(RunError, match=r"1 of \d+ tensors: 0/model.layers.1.mlp.down_proj.weight"):
            check_equal_checksums(good, serving.group.call_all("weights_checksum"))
    finally:
        updater.disconnect_rollout_engines()


def test_s11_an_unknown_tensor_name_is_refused_before_it_is_sent(serving, old_model):
    tensors = dict(old_model.named_tensors())
    expected = set(tensors)
    tensors["model.norm.weight.renamed"] = tensors.pop("model.norm.weight")
    updater = make_updater(serving, tensors, expected)
    versions = serving.group.call_all("get_weight_version")
    try:
        with pytest.raises(RunError, match="does not have: model.norm.weight.renamed"):
            updater.update_weights()
        assert updater.weight_version == 0
        assert serving.group.call_all("get_weight_version") == versions
        # Generation goes on, and a later push is not disturbed.
        assert post(f"{serving.router.url}/generate", generation_request(PROMPT)).ok
        tensors["model.norm.weight"] = tensors.pop("model.norm.weight.renamed")
        updater.update_weights()
        assert serving.group.call_all("get_weight_version") == ["1", "1"]
    finally:
        updater.disconnect_rollout_engines()


def test_an_engine_that_refuses_the_tensors_gives_an_error_and_no_hang(serving, old_model):
    import ray

    updater = make_updater(serving, old_model.named_tensors())
    # The engine leaves the group behind our back, so that its half of the broadcast fails.
    ray.get(serving.group.engines[1].destroy_weights_update_group.remote("slime-pp_0"), timeout=30)
    started = time.monotonic()
    try:
        with pytest.raises(RunError, match=r"engine 1 answered 400 .*slime-pp_0"):
            updater.update_weights()
        assert time.monotonic() - started < 30
        for url in serving.group.urls:
            assert post(f"{url}/generate", generation_request(PROMPT)).ok
    finally:
        updater.disconnect_rollout_engines()


def test_s6_a_bad_path_keeps_the_weights(serving):
    before = serving.group.call_all("weights_checksum")
    with pytest.raises(RunError, match="answered 400 to /update_weights_from_disk"):
        serving.group.call_all("update_weights_from_disk", "/no/such/checkpoint")
    assert serving.group.call_all("weights_checksum") == before


# -- faults --------------------------------------------------------------------------------------------------------------


def test_f6_an_engine_that_cannot_start_shows_its_last_log_lines(tmp_path, old_checkpoint):
    from slime.backends.sglang_utils.sglang_engine import SGLangEngine

    engine = SGLangEngine(make_args(old_checkpoint, sglang_no_such_field=3), 7, tmp_path)
    with pytest.raises(RunError) as error:
        engine.init(timeout=60)
    text = str(error.value)
    assert f"engine 7 failed to start: exit code 2; log {tmp_path / 'engine_7.log'} ends with:" in text
    assert "--sglang-no-such-field: not known to the installed sglang" in text


def test_f8_an_engine_without_its_scheduler_is_reported_and_leaves_no_process(serving):
    import ray

    from slime.observability.waiting import wait_for

    engine, url = serving.group.engines[1], serving.group.urls[1]
    processes = server_tree(ray.get(engine.server_pid.remote(), timeout=30))
    (scheduler,) = [process for process in processes if process.cmdline()[0].startswith("sglang::scheduler")]
    end = engine.wait_for_end.remote()
    scheduler.kill()
    cause = rf"its scheduler_0 \(process {scheduler.pid}\): ended by SIGKILL"
    with pytest.raises(RunError, match=f"^engine 1 died: {cause}"):
        wait_for(end, "end of engine 1", 10)
    with pytest.raises(RunError, match=rf"engine 1 died \(/health\): {cause}"):
        serving.group.call_all("health")
    wait_until_ended(processes)
    serving.router.remove_workers([url])
    assert [worker["url"] for worker in serving.router.workers()] == [serving.group.urls[0]]
    for _ in range(4):
        assert post(f"{serving.router.url}/generate", generation_request(PROMPT, 1)).ok


def test_an_engine_that_is_shut_down_did_not_die(serving):
    import ray

    end = serving.group.engines[0].wait_for_end.remote()
    assert ray.wait([end], timeout=0.5)[0] == []  # it lives
    ray.get(serving.group.engines[1].shutdown.remote(), timeout=30)
    assert ray.get(serving.group.engines[1].wait_for_end.remote(), timeout=30) is None


def test_a_server_follows_its_killed_actor(serving):
    import ray

    engine = serving.group.engines[0]
    processes = server_tree(ray.get(engine.server_pid.remote(), timeout=30))
    os.kill(processes[0].ppid(), signal.SIGKILL)
    wait_until_ended(processes)


def test_shutdown_leaves_no_process(serving):
    processes = server_tree(serving.router.process.pid)
    serving.group.shutdown()
    serving.router.shutdown()
    wait_until_ended(processes)
    assert serving.group.engines == []


def test_a_router_address_that_is_none_is_a_user_error():
    import http.server
    import threading

    from slime.serving.router import start_router

    class NoRouter(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>a web page</html>")

        def log_message(self, *args):
            pass

    with pytest.raises(UserError, match="--sglang-router-ip 127.0.0.1 --sglang-router-port 9: no SGLang router there"):
        start_router(make_args("x", sglang_router_ip="127.0.0.1", sglang_router_port=9), "unused")
    with http.server.HTTPServer(("127.0.0.1", 0), NoRouter) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(UserError, match="no SGLang router there"):
            start_router(make_args("x", sglang_router_ip="127.0.0.1", sglang_router_port=server.server_port), "unused")
        server.shutdown()
