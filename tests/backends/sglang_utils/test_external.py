"""Engines that somebody else started: which are refused and why, and how each of them is left. A real one: `tests/e2e`."""

import contextlib
import dataclasses
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from slime.arguments.surface import version_of
from slime.backends.sglang_utils import external
from slime.backends.sglang_utils.external import (
    ExternalEngine,
    describe_engine,
    discover_external_engines,
    with_external_engines,
)
from slime.serving.topology import of_external_engines
from slime.utils.errors import RunError, UserError

KEY = "key-of-somebody-else"
# What SGLang 0.5.21 says of a server with its defaults, of which the rest concerns nobody here.
STARTED_WITH = {
    "version": version_of("sglang"), "tp_size": 1, "pp_size": 1, "dp_size": 1, "ep_size": 1, "moe_dp_size": 1,
    "disaggregation_mode": "null", "disaggregation_bootstrap_port": 8998, "encoder_only": False, "language_only": False,
    "skip_tokenizer_init": False, "is_embedding": False, "enable_lora": None, "speculative_algorithm": None,
    "quantization": None, "cpu_offload_gb": 0, "offload_group_size": -1, "weight_cache_mode": "off", "tokenizer_worker_num": 1,
    "context_length": None, "dtype": "auto", "weight_version": "default", "enable_return_routed_experts": False,
    "disaggregation_transfer_backend": "mooncake", "json_model_override_args": "{}",
}  # fmt: skip


class Server:
    """Answers as a server does that was started with `STARTED_WITH` and `settings`; `events` are the posted paths."""

    def __init__(self, model, serves="default", key=None, refuses=("slime-pp_0",), generates=False, **settings):
        self.events, outer = [], self
        self.of_model = {
            "model_path": str(model), "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "is_generation": True,
            "weight_version": serves,
        }  # fmt: skip
        answers = {
            "/model_info": self.of_model,
            "/server_info": {**STARTED_WITH, "model_path": str(model), "api_key": key, **settings},
        }

        if generates:
            answers["/health_generate"] = {}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                allowed = key is None or self.headers["Authorization"] == f"Bearer {key}"
                self._answer(200 if allowed and self.path in answers else 401, answers.get(self.path))

            def do_POST(self):
                payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.events.append((self.path, *payload.values()))
                self._answer(400 if self.path in refuses or payload.get("group_name") in refuses else 200, {})

            def _answer(self, status, body):
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def end(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def start():
    with contextlib.ExitStack() as stack:

        def started(*arguments, **settings):
            server = Server(*arguments, **settings)
            stack.callback(server.end)
            return server

        yield started


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    return directory


def make_args(model, *addresses, typed=(), **flags):
    values = {
        "hf_checkpoint": str(model), "rollout_external_engine_addrs": list(addresses), "router_api_key": None,
        "typed_flags": set(typed), "update_weight_mode": "full", "use_rollout_routing_replay": False,
        "rollout_num_gpus": None, "has_trainer": True, "params_dtype_name": "bfloat16",
        "rollout_num_gpus_per_engine": 1, "http_control_timeout": 10.0, "engine_load_timeout": 10.0,
        "update_weights_in_flight": False, "rollout_top_p": 1.0, "rollout_top_k": -1, "router_prefill_policy": None,
        "router_decode_policy": None, "sglang_context_length": None, "rollout_max_context_len": None,
        "eval_max_context_len": None, "eval_interval": None, "rollout_max_prompt_len": 1024, "rollout_max_response_len": 7168,
        "eval_max_prompt_len": None, "eval_datasets": [],
    }  # fmt: skip
    return SimpleNamespace(**{**values, **flags})


def refusal(args):
    with pytest.raises(UserError) as refused:
        discover_external_engines(args)
    return str(refused.value)


# -- discovery -----------------------------------------------------------------------------------------------------------


def test_machines_that_are_gone_are_waited_for_together(model, monkeypatch):
    all_are_asked = threading.Barrier(16)

    def ask(url, api_key):
        all_are_asked.wait(60)
        raise RunError("no answer (within 10 s)")

    monkeypatch.setattr(external, "ask_engine", ask)
    addresses = [f"10.0.0.1:{port}" for port in range(1, 17)]
    lines = refusal(make_args(model, *addresses)).splitlines()
    assert lines == [f"--rollout-external-engine-addrs {address}: no answer (within 10 s)" for address in addresses]


def test_engines_are_found_with_their_sizes_and_parsed_arguments_stay(start, model):
    first, second = start(model), start(model, serves="7", tp_size=4, key=KEY)
    args = make_args(model, first.address, f"http://{second.address}/", router_api_key=KEY)
    found = with_external_engines(args)
    infos = found.rollout_external_engine_infos
    assert [info.url for info in infos] == [f"http://{first.address}", f"http://{second.address}"]
    assert [(info.num_gpus, info.weight_version, info.worker_type) for info in infos] == [
        (1, "default", "regular"),
        (4, "7", "regular"),
    ]
    assert (found.rollout_num_engines, found.rollout_num_gpus) == (2, 5)
    assert args.rollout_num_gpus is None and not hasattr(args, "rollout_external_engine_infos")
    assert KEY not in repr(infos)


@pytest.mark.parametrize(
    ("dtype", "named", "computes"),
    [
        ("auto", "float32", "float16"), ("auto", None, "float16"), ("auto", "bfloat16", None), ("half", "bfloat16", "float16"),
        ("bfloat16", "float32", None),
    ],
)  # fmt: skip
def test_an_engine_in_another_dtype_than_the_trainer_is_warned_of(start, model, caplog, dtype, named, computes):
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "dtype": named}))
    with_external_engines(make_args(model, start(model, dtype=dtype).address))
    told = [record.message for record in caplog.records if " computes in " in record.message]
    assert len(told) == (computes is not None) and all(
        f"in {computes}, and the trainer in bfloat16" in text for text in told
    )


def test_an_engine_without_room_for_the_longest_sample_is_warned_of(start, model, caplog):
    small, enough = start(model, max_total_num_tokens=8193), start(model, max_total_num_tokens=8194)
    with_external_engines(make_args(model, small.address, enough.address))
    (told,) = [record.message for record in caplog.records if "KV cache" in record.message]
    assert told == (
        f"http://{small.address}: its KV cache has room for samples of 8191 tokens, and the longest may have 8192: its answer "
        "would be cut short; start it with a larger --max-total-tokens or --mem-fraction-static"
    )


@pytest.mark.parametrize(
    "told, expected",
    [
        ({"tp": 2, "pp": 2}, (4, "regular")),
        ({"num_gpus": 8, "num_gpus_per_engine": 4, "tp_size": 2}, (8, "regular")),
        ({"num_gpus_per_engine": 4, "tp_size": 2}, (4, "regular")),
        ({"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 9}, (1, "prefill")),
        ({"encoder_only": True}, (1, "encoder")),
    ],
)
def test_sizes_and_roles_under_all_their_names(told, expected):
    info = describe_engine("http://a:1", {"model_path": "/m", **told})
    assert (info.num_gpus, info.worker_type) == expected
    assert info.bootstrap_port == (9 if info.worker_type == "prefill" else None)


@pytest.mark.parametrize(
    "settings, flags, words",
    [
        ({"version": "0.5.20"}, {}, "it is SGLang 0.5.20, and the run speaks to engines of SGLang"),
        ({"skip_tokenizer_init": True}, {}, "--skip-tokenizer-init: rollouts need the text of responses"),
        ({"preferred_sampling_params": {"min_p": 0.1}}, {}, "--preferred-sampling-params: it would change what answers are"),
        ({"json_model_override_args": '{"rope_theta": 1}'}, {}, "--json-model-override-args: the trainer does not see it"),
        ({"encoder_only": True}, {}, "--encoder-only: engines of SGLang that only encode media take no weights"),
        ({"enable_pd_role_switch": True}, {}, "--enable-pd-role-switch: no run works with engines that prefill at one"),
        ({"enable_lora": True}, {}, "they would change what pushed weights compute); start it without"),
        ({"speculative_algorithm": "EAGLE"}, {}, "--speculative-algorithm EAGLE: the run's own --sglang-speculative flags"),
        ({"pp_size": 2}, {}, "--pp-size 2: its stages would take the same places in a weight group"),
        ({"quantization": "fp8"}, {}, "--quantization fp8: no run works with quantisation by the engine (pushed"),
        ({"tokenizer_worker_num": 2}, {}, "--tokenizer-worker-num 2: no run works with several tokenizer processes"),
        ({"dp_size": 2, "enable_dp_attention": True}, {}, "--dp-size 2: it calls its caches flushed when one of its 2"),
        ({}, {"use_rollout_routing_replay": True}, "started with --enable-return-routed-experts"),
        (
            {"enable_return_routed_experts": True, "enable_hierarchical_cache": True},
            {"use_rollout_routing_replay": True},
            "loses the experts of cached prompts",
        ),
        ({"context_length": 512}, {"sglang_context_length": 1024}, "--sglang-context-length 1024: the engine was started"),
        ({"context_length": 512}, {"rollout_max_context_len": 1024}, "give --rollout-max-context-len 512"),
        (
            {"context_length": 512},
            {"rollout_max_context_len": 256, "eval_max_context_len": 1024, "eval_interval": 1},
            "give --eval-max-context-len 512",
        ),
    ],
)  # fmt: skip
def test_an_engine_that_the_run_cannot_work_with_is_refused_by_name(start, model, settings, flags, words):
    server = start(model, **settings)
    shown = refusal(make_args(model, server.address, **flags))
    assert shown.startswith(f"--rollout-external-engine-addrs {server.address}: ") and words in shown
    assert len(shown.splitlines()) == 1 and "not built" not in shown


PREFILL = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 9}
DECODE = {"disaggregation_mode": "decode"}


def test_engines_that_prefill_and_decode_for_each_other_are_taken(start, model):
    servers = [start(model, **settings) for settings in (DECODE, {**PREFILL, "tp_size": 2}, DECODE)]
    args = make_args(model, *(server.address for server in servers), router_prefill_policy="random")
    infos = discover_external_engines(args)
    assert [(info.worker_type, info.bootstrap_port) for info in infos] == [
        ("decode", None),
        ("prefill", 9),
        ("decode", None),
    ]
    decode, prefill = of_external_engines(infos).models[0].groups
    assert (decode.role, prefill.role) == ("decode", "prefill")
    urls = [f"http://{server.address}" for server in servers]
    # Ids and places in a weight group go up over groups.
    assert [(engine.engine_id, engine.gpu_offset, engine.external.url) for engine in decode.engines + prefill.engines] == [
        (0, 0, urls[0]), (1, 1, urls[2]), (2, 2, urls[1]),
    ]  # fmt: skip
    engines = [ExternalEngine(args, rank, "unused", info) for rank, info in enumerate(infos)]
    for engine in engines:
        engine.init()
        engine.generate({"input_ids": [1]})
    assert [engine.bootstrap_port() for engine in engines] == [None, 9, None]
    # One that prefills is asked alone; it hands its caches to nobody.
    assert [len(server.events[-1]) for server in servers] == [2, 4, 2] and servers[1].events[-1][:2] == (
        "/generate",
        [1],
    )


@pytest.mark.parametrize(
    "settings, flags, words",
    [
        ((PREFILL,), {}, "engines that only prefill and engines that only decode need each other; name some of both"),
        ((DECODE, {}), {}, "engines that only prefill and engines that only decode need each other; name some of both"),
        ((PREFILL, DECODE, {}), {}, "engines that do both would get no requests beside those that only prefill or decode"),
        ((PREFILL, {**DECODE, "disaggregation_transfer_backend": "nixl"}), {}, "they move caches by mooncake and nixl; start "),
        (({},), {"router_prefill_policy": "random"}, "-prefill-policy random has no effect: no engine only does prefill"),
        ((PREFILL, DECODE), {"use_rollout_routing_replay": True}, "it only does prefill: --use-rollout-routing-replay: the "),
        ((PREFILL, DECODE), {"update_weights_in_flight": True}, "it only does decode: --update-weights-in-flight: a paused "),
        ((PREFILL, DECODE), {"rollout_top_p": 0.9}, "it only does decode: --rollout-top-p, --rollout-top-k: it tells no sets"),
        ((PREFILL, {**DECODE, "disaggregation_transfer_backend": "fake"}), {}, "-backend fake moves no caches; start it with"),
    ],
)  # fmt: skip
def test_engines_that_cannot_prefill_and_decode_for_each_other_are_refused(start, model, settings, flags, words):
    addresses = [start(model, enable_return_routed_experts=True, **of_one).address for of_one in settings]
    assert re.search(words, refusal(make_args(model, *addresses, **flags)))


def test_an_engine_with_what_the_user_asks_for_is_taken(start, model):
    server = start(model, context_length=512, enable_return_routed_experts=True)
    asked = {"sglang_context_length": 512, "use_rollout_routing_replay": True, "sglang_server_concurrency": 64}
    assert len(discover_external_engines(make_args(model, server.address, **asked))) == 1


def test_an_engine_with_fewer_positions_than_the_model_is_taken_with_a_limit(start, model):
    (model / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 1024}')
    server = start(model, context_length=512)
    shown = refusal(make_args(model, server.address))
    assert "--context-length 512" in shown and shown.endswith("give --sglang-context-length 512")
    unread = {"eval_max_context_len": 1024}  # nothing is evaluated
    for limit in ({"sglang_context_length": 512}, {"rollout_max_context_len": 512, **unread}):
        (info,) = discover_external_engines(make_args(model, server.address, **limit))
        assert info.context_length == 512
    assert len(discover_external_engines(make_args(model, start(model, context_length=1024).address))) == 1


def test_an_engine_of_another_config_is_taken_where_nothing_is_trained(start, model):
    server = start(model, json_model_override_args='{"rope_theta": 1}')
    assert len(discover_external_engines(make_args(model, server.address, has_trainer=False))) == 1


def test_a_wrong_model_and_the_same_model_elsewhere(start, model, tmp_path):
    (tmp_path / "other").mkdir()
    link = tmp_path / "link"
    link.symlink_to(model)
    shown = refusal(make_args(model, start(tmp_path / "other").address))
    assert f"it serves {tmp_path / 'other'} (Qwen3ForCausalLM), and the run trains --hf-checkpoint {model}" in shown
    assert discover_external_engines(make_args(model, start(link).address))
    # On a machine of its own: there the directory has any name, so kinds of models are compared.
    far = start("/on/another/machine")
    assert discover_external_engines(make_args(model, far.address))
    (model / "config.json").write_text('{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}')
    assert "it serves /on/another/machine" in refusal(make_args(model, far.address))


def test_everything_that_is_wrong_is_told_at_once_and_no_key_with_it(start, model):
    server = start(model, key=KEY)
    port = server.address.partition(":")[2]
    nobody = start(model)
    nobody.end()
    addresses = [server.address, f"localhost:{port}", nobody.address]
    shown = refusal(make_args(model, *addresses, router_api_key=KEY)).splitlines()
    assert [line.partition(": ")[2] for line in shown] == [
        f"this is the engine of {server.address}; name each engine once",
        "no answer (nobody listens there); start the engine, wait until it serves, and name the address it listens on",
    ]
    assert "refuses a request without a key" in refusal(make_args(model, server.address))
    wrong = refusal(make_args(model, server.address, router_api_key="another"))
    assert "refuses the key of --router-api-key" in wrong and KEY not in wrong


def test_sizes_that_were_typed_must_be_those_of_the_engines(start, model):
    servers = [start(model, tp_size=2), start(model, tp_size=2)]
    addresses = [server.address for server in servers]
    shown = refusal(make_args(model, *addresses, typed={"rollout_num_gpus"}, rollout_num_gpus=2))
    assert shown == "--rollout-num-gpus 2: the engines of --rollout-external-engine-addrs have 4; drop the flag"
    typed = {"rollout_num_gpus", "rollout_num_gpus_per_engine"}
    right = make_args(model, *addresses, typed=typed, rollout_num_gpus=4, rollout_num_gpus_per_engine=2)
    assert len(discover_external_engines(right)) == 2


def test_changes_alone_reach_no_engine_of_others(start, model):
    shown = refusal(make_args(model, start(model).address, update_weight_mode="delta"))
    assert shown.startswith("--update-weight-mode delta: ") and shown.endswith("give full")


def test_a_web_page_is_no_engine(start, model, monkeypatch):
    server = start(model)
    monkeypatch.setattr(external, "normalize_external_engine_addr", lambda address: f"http://{address}/docs")
    assert "refuses a request" in refusal(make_args(model, server.address))


# -- life ----------------------------------------------------------------------------------------------------------------


def make_engine(server, model, **flags):
    args = make_args(model, server.address, **flags)
    (info,) = discover_external_engines(args)
    return ExternalEngine(args, 3, "unused", info)


def test_what_a_killed_run_left_is_undone_at_the_start(start, model):
    # One group may be gone while that of a later stage stands.
    server = start(model, refuses=("slime-pp_0",))
    assert make_engine(server, model).init() == f"http://{server.address}"
    # It stays paused until it has weights.
    assert server.events[0] == ("/end_weight_update",)
    assert set(server.events[1:]) >= {("/destroy_weights_update_group", f"slime-pp_{stage}") for stage in range(16)}
    assert {path for path, *_ in server.events[1:]} == {"/destroy_weights_update_group"}


def test_without_pushes_an_engine_between_two_weights_is_refused(start, model):
    torn, whole = start(model), start(model, refuses=("/end_weight_update", "slime-pp_0"))
    with pytest.raises(RunError, match="in the middle of a weight update, and this run pushes nothing"):
        make_engine(torn, model, has_trainer=False).init()
    make_engine(whole, model, has_trainer=False).init()
    assert whole.events[-1] == ("/continue_generation",)


def test_another_engine_at_the_address_is_refused(start, model):
    server = start(model)
    engine = make_engine(server, model)
    engine._info = dataclasses.replace(engine._info, tp_size=2)
    with pytest.raises(RunError, match="engine 3 .* is another one than at the start of the run"):
        engine.init()


JOIN = ("127.0.0.1", 1, 1, 2, "slime-pp_0", "gloo", 5.0)


@pytest.mark.parametrize(
    "calls, left",
    [
        ([], []),
        ([("pause_generation",)], ["/continue_generation"]),
        ([("pause_generation",), ("continue_generation",)], []),
        (
            [("pause_generation",), ("init_weights_update_group", *JOIN)],
            ["/destroy_weights_update_group", "/continue_generation"],
        ),
        ([("init_weights_update_group", *JOIN), ("destroy_weights_update_group", "slime-pp_0")], []),
        # In the middle of a push it has weights of no version: nobody lets it go on.
        ([("pause_generation",), ("begin_weight_update",)], []),
        ([("pause_generation",), ("begin_weight_update",), ("end_weight_update",), ("continue_generation",)], []),
        ([("pause_generation",), ("reset_weights",)], []),
        ([("pause_generation",), ("update_weights_from_disk", "/w", "1")], ["/continue_generation"]),
    ],
)
def test_an_engine_is_left_as_it_was_found(start, model, calls, left):
    server = start(model)
    engine = make_engine(server, model)
    engine.init()
    for method, *arguments in calls:
        # The server refuses the group, and the engine leaves it nonetheless: it may have joined.
        with contextlib.suppress(RunError):
            getattr(engine, method)(*arguments)
    before = len(server.events)
    engine.shutdown()
    assert [path for path, *_ in server.events[before:]] == left


def test_no_order_is_lost_with_a_connection_that_the_server_closes(start, model):
    """As one does whose time for idle connections runs out when the next order is on its way."""
    engine, orders = make_engine(start(model), model), []

    class Closing(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            orders.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            if not self.close_connection:
                # What comes next by this connection is not answered.
                self.rfile.readline()
                self.close_connection = True

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Closing) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        engine._url = f"http://127.0.0.1:{server.server_port}"
        try:
            engine.pause_generation()
            engine.continue_generation()
        finally:
            server.shutdown()
    assert orders == ["/pause_generation", "/continue_generation"]


def test_an_engine_of_others_keeps_its_memory(start, model):
    server = start(model)
    engine = make_engine(server, model)
    engine.init()
    before = list(server.events)
    engine.sleep()
    engine.wake_weights()
    engine.wake_caches()
    assert server.events == before


def test_a_server_that_was_started_again_behind_a_tunnel_is_dead_although_it_answers(start, model):
    """The tunnel takes connections meanwhile. The weights of the push are gone."""
    server = start(model, serves="5", generates=True)
    engine = make_engine(server, model)
    engine.init()
    assert engine.makes_progress(5.0) is True, "nothing was pushed to it"
    engine.prove_weight_version("5")
    assert engine.makes_progress(5.0) is True
    server.of_model["weight_version"] = "default"
    with pytest.raises(RunError, match="engine 3 died: http://.* serves weights of version default, and was sent 5"):
        engine.makes_progress(5.0)
    # From here on a push changes them.
    engine.pause_generation()
    assert engine.makes_progress(5.0) is True
    server.of_model["weight_version"] = "6"
    engine.prove_weight_version("6")
    del server.of_model["weight_version"]
    assert engine.makes_progress(5.0) is False, "it does not say what it serves: it is asked again"


def test_a_server_that_is_gone_is_told_of_and_one_that_is_there_is_not(start, model, monkeypatch):
    monkeypatch.setattr(external, "_POLL_SECONDS", 0.01)
    server = start(model)
    engine = make_engine(server, model)
    engine.init()
    assert engine.makes_progress(0.5) is False, "it listens, and gives no token"
    watch = threading.Thread(target=engine.wait_for_end)
    watch.start()
    engine.shutdown()
    watch.join(10)
    assert not watch.is_alive()
    engine = make_engine(server, model)
    engine.init()
    server.end()
    with pytest.raises(RunError, match=f"engine 3 died: nobody listens at http://{server.address} any more"):
        engine.wait_for_end()
    with pytest.raises(RunError, match="engine 3 died"):
        engine.makes_progress(0.5)
    engine.shutdown()
