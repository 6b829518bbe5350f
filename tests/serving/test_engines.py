"""Two real engines behind the real router, and a plain single-process trainer that pushes weights to them.

The servers are started once. The tests that end them come last.
"""

import asyncio
import concurrent.futures
import os
import re
import shutil
import signal
import time
from types import SimpleNamespace

import psutil
import pytest
import ray
import requests

from slime.observability.waiting import wait_for
from slime.rollout.abort import abort
from slime.rollout.generation_call import GenerationCall
from slime.serving import engines
from slime.serving.fleet import EngineName
from slime.serving.model_routers import start_router
from slime.serving.router import Worker
from slime.serving.topology import topology_of
from slime.utils import http_utils
from slime.utils.engine_answers import num_requests
from slime.utils.env import actor_environment
from slime.utils.errors import RunError, UserError
from tests.support.models.tiny_checkpoint import make_tiny_checkpoint
from tests.support.oracles.log_probs import ReferenceModel, generation_request, response_of
from tests.support.processes.local_ray import start_ray
from tests.support.processes.served_engines import (
    API_KEY,
    PROMPT,
    Serving,
    make_args,
    mean_difference,
    post,
    pushing,
    server_tree,
    typed_server_flags,
    wait_until_ended,
)
from tests.support.processes.waiting import wait_until
from tools import profile_rollout


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
    log_dir = tmp_path_factory.mktemp("logs")
    local = str(tmp_path_factory.mktemp("host") / "weights")
    args = make_args(old_checkpoint, **typed_server_flags(), update_weight_local_checkpoint_dir=local)
    started = time.monotonic()
    start_ray(num_cpus=4, num_gpus=2)
    placement_group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * 2)
    assert placement_group.wait(120)
    ray_seconds = time.monotonic() - started
    serving = Serving(args, log_dir, placement_group)
    try:
        serving.wait_ready()
        total = time.monotonic() - started
        print(f"Ray {ray_seconds:.1f} s, ready {total:.1f}")
        yield serving
    finally:
        serving.owner.shutdown()
        ray.shutdown()


def test_log_lines_of_engines_say_which_engine_it_is(tmp_path, monkeypatch):
    """Ray puts the name of an actor in front of what it logs."""
    monkeypatch.setattr(engines, "configure_logger", lambda level: None)
    args, info = SimpleNamespace(log_level="INFO"), SimpleNamespace(worker_type="regular", load_format=None)
    assert repr(engines.EngineActor(args, 3, tmp_path)) == "engine 3"
    assert repr(engines.ExternalEngineActor(args, 4, str(tmp_path), info)) == "engine 4"


# -- arguments -----------------------------------------------------------------------------------------------------------


def test_typed_flags_reach_the_server(serving):
    headers = {"Authorization": f"Bearer {API_KEY}"}
    info = requests.get(f"{serving.urls[0]}/server_info", headers=headers, timeout=300).json()
    assert info["max_total_tokens"] == 16384
    assert info["gc_threshold"] == [701, 11, 12]
    assert info["default_chat_template_kwargs"] == {"enable_thinking": False}
    assert info["cuda_graph_config"]["decode"]["backend"] == "disabled"
    assert info["dllm_fdfo"] is False
    assert info["random_seed"] == 1 and info["tp_size"] == 1, "derived values stay"


def test_engines_have_what_their_manager_was_given_by_the_driver(serving):
    """Wherever the manager runs, and whatever its node's own environment is."""

    class Actor:
        """Tells its environment instead of starting a server."""

        def __init__(self, *arguments):
            pass

        def init(self, base_gpu_id):
            return dict(os.environ)

        def shutdown(self):
            pass

    class Manager:
        """Starts an engine as the rollout manager does."""

        def environment_of_engine(self, args, placement_group, log_dir):
            engines.EngineActor = Actor
            started = engines.Engines(
                args, placement_group, topology_of(args, [(0, 0), (1, 1)]), log_dir, actor_environment()
            )
            try:
                return ray.get(started.start(EngineName(0)), timeout=120)
            finally:
                started.stop()

    given = {"NCCL_SOCKET_IFNAME": "eth7", "RAY_USE_UVLOOP": "1"}
    manager = ray.remote(Manager).options(num_cpus=0, runtime_env={"env_vars": given}).remote()
    asked = manager.environment_of_engine.remote(serving.args, serving.placement_group, str(serving.log_dir))
    environment = ray.get(asked, timeout=240)
    assert environment["NCCL_SOCKET_IFNAME"] == "eth7"
    assert environment["RAY_USE_UVLOOP"] == "0", "what every actor gets wins"
    ray.kill(manager)


# -- generation ----------------------------------------------------------------------------------------------------------


def test_log_probs_through_the_router_equal_transformers(serving, old_model):
    for _ in range(2):
        answer = post(f"{serving.router.url}/generate", generation_request(PROMPT))
        assert answer.ok, answer.text
        tokens, log_probs = response_of(answer.json())
        assert log_probs == pytest.approx(old_model.log_probs(PROMPT, tokens), abs=1e-4)


def test_engines_with_a_key_behind_a_given_router_without_one(serving, tmp_path):
    running = start_router(SimpleNamespace(router_policy="round_robin"), tmp_path)
    try:
        running.wait_ready()
        address = {"sglang_router_ip": running.ip, "sglang_router_port": running.port}
        given = start_router(SimpleNamespace(**address, router_api_key=None), tmp_path)
        given.add_workers([Worker(url) for url in serving.urls], worker_api_key=API_KEY)
        assert post(f"{given.url}/generate", generation_request(PROMPT), key=None).ok
        with pytest.raises(UserError, match="serves engines that are not of this run"):
            start_router(SimpleNamespace(**address, router_api_key=None), tmp_path)
        given.remove_workers(serving.urls)
        assert given.workers() == []
        given.shutdown()
        assert running.process.poll() is None, "somebody else's router goes on"
    finally:
        running.shutdown()


def test_all_engines_behind_the_router_profile_their_next_steps(serving, tmp_path):
    (tmp_path / "key").write_text(API_KEY)
    profiles = tmp_path / "profiles"
    words = ["--router-url", serving.router.url, "--api-key-file", str(tmp_path / "key"), "--num-steps", "2"]
    assert profile_rollout.main([*words, "--activities", "CPU", "--output-dir", str(profiles)]) == 0
    for url in serving.urls:
        assert post(f"{url}/generate", generation_request(PROMPT)).ok
    wait_until(lambda: len(list(profiles.rglob("*.trace.json.gz"))) == 2)


def test_a_sampling_seed_decides_the_tokens_on_every_engine(serving):
    def tokens_of(seed, engine_url):
        request = generation_request(PROMPT)
        request["sampling_params"]["sampling_seed"] = seed
        return response_of(post(f"{engine_url}/generate", request).json())[0]

    first, second = serving.urls
    assert tokens_of(1, first) == tokens_of(1, second) == tokens_of(1, first)
    assert tokens_of(1, first) != tokens_of(2, first)


def test_an_abort_reaches_the_requests_of_its_call_through_the_router_and_no_others(serving, monkeypatch):
    """Requests keep through the router the ids by which engines are told to abort them."""
    monkeypatch.setattr(http_utils, "_settings", http_utils.HttpSettings())
    args = make_args("unused", sglang_router_ip="127.0.0.1", sglang_router_port=serving.router.port)
    args.sglang_server_concurrency, args.rollout_num_engines, args.abort_timeout = 4, 2, 120.0
    args.http_request_timeout, args.http_max_retries, args.sglang_model_routers = 300.0, 1, {}

    async def answers(call, length):
        """Two requests, which the router gives to different engines."""
        with call.under_way():
            posts = [
                http_utils.post_generate(
                    f"{serving.router.url}/generate",
                    generation_request(PROMPT, length),
                    request_ids=call.request_ids,
                )
                for _ in range(2)
            ]
            call.pendings |= {asyncio.create_task(post) for post in posts}
            return await asyncio.gather(*call.pendings)

    async def requests_at_engines():
        http_utils.trust_engine_urls(serving.urls)
        loads = [await http_utils.get(f"{url}/v1/loads?include=core") for url in serving.urls]
        return sum(map(num_requests, loads))

    async def main():
        http_utils.init_http_client(args)
        wound_down, other = GenerationCall(), GenerationCall()
        try:
            tasks = [asyncio.create_task(answers(call, 400)) for call in (wound_down, other)]
            async with asyncio.timeout(120):
                while await requests_at_engines() < 4:
                    await asyncio.sleep(0.01)
            with wound_down.under_way():
                await abort(args)
            return await asyncio.gather(*tasks)
        finally:
            await http_utils.close_http_client()

    aborted, whole = asyncio.run(main())
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in aborted] == ["abort"] * 2
    assert all(len(response_of(answer)[0]) < 400 for answer in aborted)
    assert [len(response_of(answer)[0]) for answer in whole] == [400] * 2


def test_a_request_that_comes_to_a_sleeping_engine_waits_and_is_answered_when_it_goes_on(serving, old_checkpoint):
    url = serving.urls[0]
    before = response_of(post(f"{url}/generate", generation_request(PROMPT)).json())
    for _ in range(2):
        serving.call_all("sleep")
    with concurrent.futures.ThreadPoolExecutor() as threads:
        waiting = threads.submit(post, f"{url}/generate", generation_request(PROMPT))
        serving.call_all("wake_weights")
        # As a push ends; nobody is told to go on before the caches are there.
        serving.call_all("update_weights_from_disk", str(old_checkpoint))
        serving.call_all("continue_generation")
        # Nothing outside an engine tells that it holds a request; one that it does not hold is answered in far less.
        with pytest.raises(TimeoutError):
            waiting.result(1.0)
        for _ in range(2):
            serving.call_all("wake_caches")
        assert response_of(waiting.result(60).json()) == before
    serving.call_all("health")


def test_a_paused_engine_leaves_the_processor_to_the_push(serving):
    pid = ray.get(serving.engines[0].server_pid.remote(), timeout=120)
    (scheduler,) = [process for process in server_tree(pid) if process.cmdline()[0].startswith("sglang::scheduler")]
    serving.call_all("pause_generation", "retract")
    try:
        before = sum(scheduler.cpu_times()[:2])
        time.sleep(2.0)
        computed = sum(scheduler.cpu_times()[:2]) - before
        assert computed <= 0.05, "it sleeps"
        started = time.monotonic()
        for _ in range(10):
            serving.call_all("flush_cache")
        assert time.monotonic() - started < 5, "an order wakes it: its sleep would be of a second each time"
    finally:
        serving.call_all("continue_generation")
    assert post(f"{serving.urls[0]}/generate", generation_request(PROMPT, 1)).ok


def test_both_engines_are_registered_and_healthy(serving):
    workers = serving.router.workers()
    assert sorted(worker["url"] for worker in workers) == sorted(serving.urls)
    assert all(worker["is_healthy"] for worker in workers)
    serving.call_all("health")


def test_a_request_without_the_key_is_refused(serving):
    for base in (serving.router.url, *serving.urls):
        for key in (None, "another key"):
            assert post(f"{base}/generate", generation_request(PROMPT), key).status_code == 401


def test_the_key_is_in_no_log(serving):
    logs = list(serving.log_dir.iterdir())
    assert {log.name for log in logs} == {"engine_0.log", "engine_1.log", "router.log"}
    assert not [log.name for log in logs if API_KEY in log.read_text(errors="replace")]


def test_g6_servers_listen_on_loopback_only(serving):
    for pid in [serving.router.process.pid, *ray.get([engine.server_pid.remote() for engine in serving.engines])]:
        for process in server_tree(pid):
            listening = [c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
            assert set(listening) <= {"127.0.0.1", "::1"}, (process.name(), listening)


def test_log_probs_tell_old_and_new_weights_apart(serving, old_model, new_model):
    answer = post(f"{serving.urls[0]}/generate", generation_request(PROMPT)).json()
    assert mean_difference(answer, old_model) < 1e-5
    assert mean_difference(answer, new_model) > 0.1


# -- weights -------------------------------------------------------------------------------------------------------------


APART = {"colocate": False}
# On the devices of two training ranks, or one engine there and one beside.
TOGETHER, MIXED = ({"colocate": True, "has_trainer": True, "world_size": ranks} for ranks in (2, 1))


# The smaller bucket is smaller than the embedding, which travels alone then, and larger than any other tensor.
@pytest.mark.parametrize(
    "num_sources, bucket, larger, placement",
    [
        (1, 100_000, 0, APART), (2, 100_000, 0, APART), (1, 50_000, 1, APART), (2, 100_000, 0, TOGETHER),
        (1, 50_000, 1, TOGETHER), (1, 100_000, 0, MIXED),
    ],
)  # fmt: skip
def test_a_push_makes_all_engines_serve_the_new_weights(serving, new_model, num_sources, bucket, larger, placement):
    tensors = new_model.named_tensors()
    assert sum(tensor.nbytes > bucket for tensor in tensors.values()) == larger
    serving.call_all("reset_weights")
    flags = {"update_weight_buffer_size": bucket, **placement}
    with pushing(serving, tensors, expected=set(tensors), num_sources=num_sources, **flags) as push:
        report = push()
        assert (report.version, report.failed) == (1, {})
        assert serving.call_all("get_weight_version") == ["1", "1"]
        for answer in serving.call_all("generate", generation_request(PROMPT)):
            assert mean_difference(answer, new_model) <= 1e-5
            assert answer["meta_info"]["weight_version"] == "1"
        assert report.metrics["perf/update_weights_bytes"] == sum(tensor.nbytes for tensor in tensors.values())
        assert report.metrics["perf/update_weights_parts"] > num_sources
        assert report.metrics["perf/update_weights_time"] > 0
        assert push().version == 2
        assert serving.call_all("get_weight_version") == ["2", "2"]


@pytest.mark.parametrize("num_sources", [1, 2])
def test_a_push_through_files(serving, old_checkpoint, old_model, new_model, tmp_path, num_sources):
    serving.call_all("reset_weights")
    flags = {
        "update_weight_transport": "disk", "update_weight_disk_dir": str(tmp_path), "update_weight_disk_keep_files": False,
        "hf_checkpoint": str(old_checkpoint), "release_train": False, "update_weight_local_checkpoint_dir": None,
    }  # fmt: skip
    for version, model in ((7, new_model), (8, old_model)):
        tensors = model.named_tensors()
        with pushing(serving, tensors, set(tensors), num_sources, version - 1, **flags) as push:
            report = push()
        assert (report.version, report.failed) == (version, {})
        assert report.metrics["perf/update_weights_bytes"] == sum(tensor.nbytes for tensor in tensors.values())
        for answer in serving.call_all("generate", generation_request(PROMPT)):
            assert mean_difference(answer, model) <= 1e-5
            assert answer["meta_info"]["weight_version"] == str(version)
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_push_of_what_changed(serving, old_checkpoint, old_model, new_model, tmp_path):
    """Engines load the copy of their host, which the first push makes, and the second one patches."""
    serving.call_all("reset_weights")
    flags = {
        "update_weight_transport": "disk", "update_weight_mode": "delta", "update_weight_disk_dir": str(tmp_path / "pushes"),
        "update_weight_disk_keep_files": False, "release_train": False, "hf_checkpoint": str(old_checkpoint),
        "update_weight_delta_encoding": "xor", "update_weight_delta_checksum": "xxh3-128",
    }  # fmt: skip
    tensors = dict(old_model.named_tensors())
    changed = sorted(tensors)[0]
    of_new = new_model.named_tensors()
    with pushing(serving, tensors, set(tensors), 2, **flags) as push:
        first = push()
        for answer in serving.call_all("generate", generation_request(PROMPT)):
            assert mean_difference(answer, old_model) <= 1e-5
        tensors[changed] = of_new[changed]
        second = push()
        tensors.update(of_new)
        third = push()
    assert (third.version, first.failed, second.failed, third.failed) == (3, {}, {}, {})
    densities = [report.metrics["perf/update_weights_density"] for report in (first, second, third)]
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert densities[0] == 0 < densities[1] <= tensors[changed].nbytes / total < densities[2]
    wire = [report.metrics["perf/update_weights_wire_bytes"] for report in (first, second, third)]
    assert wire[0] == 0 < wire[1] < wire[2]
    for answer in serving.call_all("generate", generation_request(PROMPT)):
        assert mean_difference(answer, new_model) <= 1e-5
        assert answer["meta_info"]["weight_version"] == "3"
    left = sorted(path.name for path in (tmp_path / "pushes").iterdir())
    assert left == [".lock", "weight_v000001", "weight_v000002", "weight_v000003"]


@pytest.mark.parametrize("placement", [APART, TOGETHER, MIXED], ids=["group", "handles", "both"])
def test_checksums_prove_that_the_engines_hold_what_was_pushed(serving, old_checkpoint, old_model, tmp_path, placement):
    from slime.weights.hf_writer import write_hf_checkpoint
    from slime.weights.verification import check_all_reset, check_equal_checksums

    tensors = old_model.named_tensors()
    scratch = tmp_path / "scratch"
    write_hf_checkpoint(scratch, tensors.items(), old_checkpoint)
    serving.call_all("update_weights_from_disk", str(scratch))
    shutil.rmtree(scratch)
    from_disk = serving.checksums()
    serving.call_all("reset_weights")
    check_all_reset(from_disk, serving.checksums())
    with pushing(serving, tensors, **placement) as push:
        push()
        check_equal_checksums(from_disk, serving.checksums(), dict.fromkeys(from_disk, 0))


def test_s11_checksums_expose_a_tensor_that_was_not_pushed(serving, old_model):
    from slime.weights.verification import check_equal_checksums

    tensors = dict(old_model.named_tensors())
    good = serving.checksums()
    lost = tensors.pop("model.layers.1.mlp.down_proj.weight")
    tensors["model.layers.1.mlp.down_projection.weight"] = lost
    serving.call_all("reset_weights")
    with pushing(serving, tensors, expected=None) as push:
        push()
        with pytest.raises(RunError, match=r"1 of \d+ tensors: 0/model.layers.1.mlp.down_proj.weight"):
            check_equal_checksums(good, serving.checksums(), dict.fromkeys(good, 0))


def test_s11_an_unknown_tensor_name_is_refused_before_it_is_sent(serving, old_model):
    tensors = dict(old_model.named_tensors())
    expected = set(tensors)
    renamed = {"model.norm.weight.renamed": tensors.pop("model.norm.weight"), **tensors}
    versions = serving.call_all("get_weight_version")
    with pushing(serving, renamed, expected) as push:
        with pytest.raises(RunError, match="does not have: model.norm.weight.renamed"):
            push()
        assert serving.call_all("get_weight_version") == versions
        # Nothing was sent, so generation goes on.
        assert post(f"{serving.router.url}/generate", generation_request(PROMPT)).ok
        # Here all but the last bucket was.
        renamed["model.norm.weight.renamed"] = renamed.pop("model.norm.weight.renamed")
        with pytest.raises(RunError, match="does not have: model.norm.weight.renamed"):
            push()
    for engine in serving.call_all("end_weight_update"):
        assert engine is None
    # A later push is not disturbed.
    with pushing(serving, old_model.named_tensors(), expected) as push:
        assert push().version == 1
        assert serving.call_all("get_weight_version") == ["1", "1"]
        assert post(f"{serving.router.url}/generate", generation_request(PROMPT)).ok


class OutsideTheGroup:
    """An engine that is told to receive in a group that it is no part of, as often as it is asked."""

    def __init__(self, engine):
        self._engine = engine
        self.update_weights_from_distributed = SimpleNamespace(remote=self._receive)

    def __getattr__(self, method):
        return getattr(self._engine, method)

    def _receive(self, names, dtypes, shapes, group_name, *rest):
        return self._engine.update_weights_from_distributed.remote(names, dtypes, shapes, "another group", *rest)


def test_an_engine_that_refuses_the_tensors_is_left_out_and_the_other_gets_all_of_them(serving, old_model, new_model):
    from slime.weights.transports import Receiver

    with pushing(serving, new_model.named_tensors()) as push:
        push()
    minutes = 20
    with pushing(serving, old_model.named_tensors(), distributed_timeout_minutes=minutes) as push:
        one, other = serving.engines
        started = time.monotonic()
        report = push([Receiver(0, one, 1, 0), Receiver(1, OutsideTheGroup(other), 1, 1)])
        assert time.monotonic() - started < 60 * minutes, "the refusal ends it, and not the limit of the broadcast"
        assert report.version == 1 and list(report.failed) == [1]
        assert re.match(r"engine 1 answered 400 .*another group", report.failed[1])
        answer = post(f"{serving.urls[0]}/generate", generation_request(PROMPT)).json()
        assert answer["meta_info"]["weight_version"] == "1" and mean_difference(answer, old_model) <= 1e-5
    # Who restarts it would do this; the next push goes to both.
    ray.get(serving.engines[1].end_weight_update.remote(), timeout=120)
    with pushing(serving, old_model.named_tensors()) as push:
        assert push().failed == {}
        for url in serving.urls:
            assert post(f"{url}/generate", generation_request(PROMPT)).ok


def test_a_group_that_broke_is_built_anew_and_costs_no_engine(serving, old_model, new_model):
    with pushing(serving, new_model.named_tensors()) as push:
        push()
        # An engine leaves the group behind our back, so that its half of the broadcast fails, and with it that of others.
        ray.get(serving.engines[1].destroy_weights_update_group.remote("slime-pp_0"), timeout=120)
        report = push()
        assert (report.version, report.failed) == (2, {})
        for url in serving.urls:
            answer = post(f"{url}/generate", generation_request(PROMPT)).json()
            assert answer["meta_info"]["weight_version"] == "2" and mean_difference(answer, new_model) <= 1e-5


def test_s6_a_bad_path_keeps_the_weights(serving):
    before = serving.checksums()
    with pytest.raises(RunError, match="answered 400 to /update_weights_from_disk"):
        serving.call_all("update_weights_from_disk", "/no/such/checkpoint")
    assert serving.checksums() == before


# -- faults --------------------------------------------------------------------------------------------------------------


def test_f6_an_engine_that_cannot_start_shows_its_last_log_lines(tmp_path, old_checkpoint):
    from slime.backends.sglang_utils.sglang_engine import SGLangEngine

    engine = SGLangEngine(make_args(old_checkpoint, sglang_no_such_field=3), 7, tmp_path)
    with pytest.raises(RunError) as error:
        engine.init(timeout=300)
    text = str(error.value)
    assert f"engine 7 failed to start: exit code 2; log {tmp_path / 'engine_7.log'} ends with:" in text
    assert "--sglang-no-such-field: not known to the installed sglang" in text


def test_f8_an_engine_without_its_scheduler_is_reported_and_leaves_no_process(serving):
    engine, url = serving.engines[1], serving.urls[1]
    processes = server_tree(ray.get(engine.server_pid.remote(), timeout=120))
    (scheduler,) = [process for process in processes if process.cmdline()[0].startswith("sglang::scheduler")]
    end = engine.wait_for_end.remote()
    scheduler.kill()
    cause = rf"its scheduler_0 \(process {scheduler.pid}\): ended by SIGKILL"
    with pytest.raises(RunError, match=f"^engine 1 died: {cause}"):
        serving.owner.ended.result(60)
    with pytest.raises(RunError, match=f"^engine 1 died: {cause}"):
        wait_for(end, "end of engine 1", 60)
    with pytest.raises(RunError, match=rf"engine 1 died \(/health\): {cause}"):
        serving.call_all("health")
    assert [engine.name.engine_id for engine in serving.owner.engines().engines] == [0], "nobody gets a dead one"
    wait_until_ended(processes)
    serving.router.remove_workers([url])
    assert [worker["url"] for worker in serving.router.workers()] == [serving.urls[0]]
    for _ in range(4):
        assert post(f"{serving.router.url}/generate", generation_request(PROMPT, 1)).ok


def test_an_engine_that_is_shut_down_did_not_die(serving):
    end = serving.engines[0].wait_for_end.remote()
    assert ray.wait([end], timeout=0.5)[0] == []  # it lives
    ray.get(serving.engines[1].shutdown.remote(), timeout=120)
    assert ray.get(serving.engines[1].wait_for_end.remote(), timeout=120) is None


def test_a_server_follows_its_killed_actor(serving):
    engine = serving.engines[0]
    processes = server_tree(ray.get(engine.server_pid.remote(), timeout=120))
    os.kill(processes[0].ppid(), signal.SIGKILL)
    wait_until_ended(processes)


def test_shutdown_leaves_no_process(serving):
    processes = server_tree(serving.router.process.pid)
    serving.owner.shutdown()
    wait_until_ended(processes)
    assert serving.owner._engines._handles == {}


def test_a_router_address_that_is_none_is_a_user_error():
    import http.server
    import threading

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
