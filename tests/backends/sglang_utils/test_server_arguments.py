import argparse
import importlib.util
import json
import os
import stat
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.arguments.surface import add_flag, load_surface
from slime.backends.sglang_utils import server_arguments
from slime.backends.sglang_utils.server_arguments import (
    NOT_EXPOSED,
    EnginePart,
    compute_server_arguments,
    compute_server_environment,
    share_of_cores,
)
from slime.backends.sglang_utils.server_process import write_arguments_file
from slime.utils.errors import UserError
from slime.utils.ports import interface_of


def make_args(**overrides) -> SimpleNamespace:
    values = {
        "hf_checkpoint": "/models/m", "seed": 1234, "num_gpus_per_node": 8, "rollout_num_gpus_per_engine": 2,
        "sglang_pp_size": None, "sglang_tp_size": None, "sglang_dp_size": None, "sglang_enable_dp_attention": None,
        "bf16": True, "fp16": False, "params_dtype_name": "bfloat16", "use_rollout_routing_replay": False,
        "trust_remote_code": False, "router_api_key": None, "has_trainer": True, "has_engines": True, "colocate": False,
        "offload_train": False, "offload_rollout": False, "release_train": False, "rollout_external": False,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **overrides})


def compute(args, rank=3, on_cpu=True, **overrides):
    places = {"host": "127.0.0.1", "port": 15000, "nccl_port": 15001, "base_gpu_id": 2, **overrides}
    return compute_server_arguments(args, rank, on_cpu=on_cpu, **places)


def test_values_that_follow_from_the_run():
    values = compute(make_args(router_api_key="key", trust_remote_code=True), on_cpu=False).values
    assert values["model_path"] == "/models/m"
    assert values["random_seed"] == 1234 + 3 * 8
    assert (values["host"], values["port"], values["nccl_port"]) == ("127.0.0.1", 15000, 15001)
    assert (values["base_gpu_id"], values["gpu_id_step"], values["tp_size"]) == (2, 1, 2)
    assert values["skip_server_warmup"] is True
    assert values["trust_remote_code"] is True
    assert values["api_key"] == "key"


@pytest.mark.parametrize(
    ("architecture", "on_cpu", "is_told"),
    [
        ("Qwen3VLForConditionalGeneration", True, True),
        ("Qwen3VLMoeForConditionalGeneration", True, True),
        ("Qwen3VLForConditionalGeneration", False, False),
        ("Qwen3ForCausalLM", True, False),
    ],
)
def test_without_a_gpu_a_server_is_told_to_leave_the_part_that_sees_out(tmp_path, architecture, on_cpu, is_told):
    config = {"architectures": [architecture], "text_config": {"architectures": None, "hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    values = compute(make_args(hf_checkpoint=str(tmp_path)), on_cpu=on_cpu).values
    assert ("language_model_only" in values) == is_told
    # What the user says wins.
    typed = compute(make_args(hf_checkpoint=str(tmp_path), sglang_language_model_only=False), on_cpu=on_cpu).values
    assert typed["language_model_only"] is False


def test_defaults_without_a_gpu():
    values = compute(make_args()).values
    expected = {"device": "cpu", "attention_backend": "torch_native", "dtype": "float32", "sleep_on_idle": True}
    assert {**expected, "max_total_tokens": 32768, "max_running_requests": 64}.items() <= values.items()


def test_engines_on_gpus_have_no_defaults_of_a_cpu_and_the_16_bit_dtype_of_the_trainer():
    assert compute(make_args(), on_cpu=False).values.keys().isdisjoint({"device", "attention_backend"})
    in_float16, in_float32 = ({"bf16": False, "fp16": half, "params_dtype_name": "typed"} for half in (True, False))
    runs = ({}, in_float16, in_float32, {"has_trainer": False}, {"sglang_dtype": "half"})
    found = [compute(make_args(**run), on_cpu=False).values.get("dtype") for run in runs]
    assert found == ["bfloat16", "typed", None, None, "half"]


def test_engines_that_sleep_have_no_graphs_of_prefill_unless_they_are_asked_for():
    sleeping = {"colocate": True, "offload_rollout": True}
    values = compute(make_args(**sleeping), on_cpu=False).values
    assert (values["enable_memory_saver"], values["cuda_graph_backend_prefill"]) == (True, "disabled")
    typed = compute(make_args(**sleeping, sglang_cuda_graph_backend_prefill="full"), on_cpu=False).values
    assert typed["cuda_graph_backend_prefill"] == "full"
    awake = compute(make_args(), on_cpu=False).values
    assert awake.keys().isdisjoint({"enable_memory_saver", "cuda_graph_backend_prefill"})


@pytest.mark.parametrize("sees, sleeps, kept", [(True, True, True), (True, False, None), (False, True, None)])
def test_engines_that_sleep_keep_the_vision_tower_that_no_push_brings(tmp_path, sees, sleeps, kept):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "any", **({"vision_config": {}} if sees else {})}))
    args = make_args(colocate=True, offload_rollout=sleeps, hf_checkpoint=str(tmp_path))
    assert compute(args, on_cpu=False).values.get("enable_weights_cpu_backup") is kept


@pytest.mark.parametrize("replayed", [True, False])
@pytest.mark.parametrize("groups", [2, None])
def test_experts_of_groups_of_attention_are_not_read_from_graphs_of_prefill(replayed, groups):
    attention = {"sglang_enable_dp_attention": groups is not None, "sglang_dp_size": groups}
    args = make_args(use_rollout_routing_replay=replayed, rollout_num_gpus_per_engine=2, **attention)
    values = compute(args, on_cpu=False).values
    assert (values.get("cuda_graph_backend_prefill") == "disabled") is (replayed and groups == 2)


def test_still_so_graphs_of_prefill_do_not_go_with_memory_that_is_given_back():
    (package,) = importlib.util.find_spec("sglang").submodule_search_locations
    backend = Path(package, "srt/model_executor/runner_backend/breakable_cuda_graph_backend.py").read_text()
    assert "Breakable CUDA graph is not compatible with memory saver mode" in backend


def test_given_flags_win_over_defaults_and_none_does_not():
    arguments = compute(make_args(sglang_max_total_tokens=1000, sglang_dtype=None, sglang_sleep_on_idle=False))
    assert arguments.values["max_total_tokens"] == 1000
    assert arguments.values["dtype"] == "float32"
    assert arguments.values["sleep_on_idle"] is False
    assert arguments.typed == {"max_total_tokens", "sleep_on_idle"}


def test_derived_fields_and_router_settings_are_not_taken_from_flags():
    args = make_args(sglang_port=1, sglang_router_ip="1.2.3.4", sglang_router_port=5, sglang_server_concurrency=9)
    arguments = compute(args)
    assert arguments.values["port"] == 15000
    assert arguments.typed == frozenset()


def test_tensor_parallel_size_is_gpus_over_pipeline_size():
    args = make_args(rollout_num_gpus_per_engine=4, sglang_pp_size=2)
    assert compute(args).values["tp_size"] == 2
    assert compute(make_args(sglang_tp_size=2)).values["tp_size"] == 2


def test_each_server_of_an_engine_over_nodes_knows_its_part():
    args = make_args(rollout_num_gpus_per_engine=16)
    values = compute(args, part=EnginePart(2, 1, "10.0.0.5:4000")).values
    assert "disaggregation_bootstrap_port" not in values
    assert (values["nnodes"], values["node_rank"], values["dist_init_addr"]) == (2, 1, "10.0.0.5:4000")
    assert values["tp_size"] == 16, "of all parts"
    alone = compute(args).values
    assert (alone["nnodes"], alone["node_rank"], alone["dist_init_addr"]) == (1, 0, None)


def test_an_engine_with_data_parallel_attention_counts_its_ports_from_the_first_of_a_row():
    """Its ranks find each other elsewhere, where there are several nodes."""
    args = make_args(rollout_num_gpus_per_engine=16, sglang_dp_size=4, sglang_enable_dp_attention=True)
    values = compute(args, first_port="127.0.0.1:17000").values
    assert (values["tp_size"], values["dp_size"], values["enable_dp_attention"]) == (16, 4, True)
    assert values["dist_init_addr"] == "127.0.0.1:17000"
    part = EnginePart(2, 1, "10.0.0.5:4000", first_port="10.0.0.5:17000")
    assert compute(args, part=part, first_port=part.first_port).values["dist_init_addr"] == "10.0.0.5:17000"


def test_pipeline_stages_that_do_not_divide_over_the_nodes_are_refused_before_a_server_waits_for_them():
    args = make_args(rollout_num_gpus_per_engine=12, sglang_pp_size=3)
    compute(args, part=EnginePart(3, 0, "10.0.0.5:4000"))
    compute(args, part=EnginePart(6, 0, "10.0.0.5:4000"))
    with pytest.raises(UserError, match="3 pipeline stages on 2 nodes; .* --sglang-pp-size that divides"):
        compute(args, part=EnginePart(2, 0, "10.0.0.5:4000"))


def test_engines_that_prefill_and_decode_are_told_their_part(monkeypatch):
    monkeypatch.setattr(server_arguments.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(server_arguments, "import_problem", lambda module: None)
    typed = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0, "disaggregation_ib_device": "mlx5_0"}
    args = make_args(sglang_disaggregation_transfer_backend=None, **{f"sglang_{k}": v for k, v in typed.items()})
    prefill = compute(args, on_cpu=False, role="prefill", bootstrap_port=15002).values
    assert (prefill["disaggregation_mode"], prefill["load_balance_method"]) == ("prefill", "follow_bootstrap_room")
    assert prefill["disaggregation_bootstrap_port"] == 15002
    assert typed.items() <= prefill.items() and "disaggregation_transfer_backend" not in prefill, "the server's default"
    decode = compute(args, on_cpu=False, role="decode").values
    assert (decode["disaggregation_mode"], decode["load_balance_method"]) == ("decode", "round_robin")
    assert decode.keys().isdisjoint({"enable_hierarchical_cache", "hicache_ratio", "disaggregation_bootstrap_port"})
    assert decode["disaggregation_ib_device"] == "mlx5_0"
    regular = compute(make_args(), on_cpu=False).values
    assert not [name for name in regular if name.startswith(("disaggregation", "load_balance"))]


def test_engines_draft_on_gpus_alone():
    args = make_args(sglang_speculative_algorithm="EAGLE", sglang_speculative_num_steps=3)
    values = compute(args, on_cpu=False).values
    assert (values["speculative_algorithm"], values["speculative_num_steps"]) == ("EAGLE", 3)
    # SGLang takes the layer out of the model itself, and would load nothing else in its place.
    assert values["enable_draft_weights_cpu_backup"] and "speculative_draft_model_path" not in values
    with pytest.raises(
        UserError, match="--sglang-speculative-algorithm EAGLE: engines draft on GPUs alone, and this machine"
    ):
        compute(args)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_without_a_gpu_caches_move_in_host_memory_or_the_engine_does_not_start(monkeypatch, role):
    args = make_args(sglang_disaggregation_transfer_backend=None)
    monkeypatch.setattr(server_arguments.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="moving their caches needs GPUs, .* mooncake-transfer-engine-non-cuda"):
        compute(args, role=role)
    monkeypatch.setattr(server_arguments.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(server_arguments, "import_problem", lambda module: None)
    assert compute(args, role=role).values["disaggregation_transfer_backend"] == "mooncake_tcp"
    args.sglang_disaggregation_transfer_backend = "mooncake"
    with pytest.raises(UserError, match="mooncake moves caches between GPUs, and this machine has none"):
        compute(args, role=role)


@pytest.mark.parametrize(
    "code, problem",
    [
        (
            "raise ImportError('libibverbs.so.1: cannot open')",
            r"imported \(ImportError: libibverbs.so.1: cannot open\)",
        ),
        ("import os; os.abort()", r"imported \(ended by SIGABRT\)"),
        ("", None),
    ],
)
def test_a_library_for_caches_that_is_there_has_to_be_importable(tmp_path, monkeypatch, code, problem):
    """Else the engine would end when it starts."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake/__init__.py").touch()
    (tmp_path / "mooncake/engine.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    args = make_args(sglang_disaggregation_transfer_backend=None)
    with (
        pytest.raises(UserError, match=f"mooncake_tcp needs mooncake.engine, .* {problem}; install")
        if problem
        else nullcontext()
    ):
        compute(args, role="prefill")
    # Engines without such a role never ask.
    compute(args)


def test_contradicting_tensor_parallel_size_names_both_flags():
    with pytest.raises(UserError, match="--sglang-tp-size 4.*--rollout-num-gpus-per-engine 2"):
        compute(make_args(sglang_tp_size=4))
    with pytest.raises(UserError, match="--rollout-num-gpus-per-engine 2.*--sglang-pp-size 3"):
        compute(make_args(sglang_pp_size=3))


def test_environment_of_a_cpu_server(monkeypatch):
    of_trainer = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "backend:native"}
    of_user = {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "true", "http_proxy": "http://proxy:3128"}
    others = {"OMP_NUM_THREADS": "16", "NO_PROXY": "intranet", "no_proxy": "intranet"}
    for name, value in {**of_trainer, **of_user, **others}.items():
        monkeypatch.setenv(name, value)
    environment = compute_server_environment(compute(make_args()), on_cpu=True)
    expected = {
        **of_user, "OMP_NUM_THREADS": "1", "NO_PROXY": "*", "no_proxy": "*", "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    }  # fmt: skip
    assert expected.items() <= environment.items() and not of_trainer.keys() & environment.keys()
    assert len(environment["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 2


def test_variables_of_every_server_that_the_user_has_not_set(monkeypatch):
    given = {
        "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "false", "SGLANG_JIT_DEEPGEMM_FAST_WARMUP": "true",
        "SGLANG_DISABLE_TP_MEMORY_INBALANCE_CHECK": "true", "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
        "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_FALLBACK_VARIANT": "true",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "false",
    }  # fmt: skip
    for name in given:
        monkeypatch.delenv(name, raising=False)
    assert given.items() <= compute_server_environment(compute(make_args()), on_cpu=True).items()
    for name in given:
        monkeypatch.setenv(name, "mine")
    assert dict.fromkeys(given, "mine").items() <= compute_server_environment(compute(make_args()), on_cpu=True).items()


_CACHES = (
    "SGLANG_JIT_CACHE_DIR", "SGLANG_DG_CACHE_DIR", "TVM_FFI_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE", "CUDA_CACHE_PATH", "TILELANG_CACHE_DIR",
)  # fmt: skip


def test_a_server_closes_no_connection_that_orders_come_by(sglang):
    assert sglang["seconds_kept"] >= 3600 > 60 > sglang["seconds_kept_by_itself"]


@pytest.fixture
def no_caches(monkeypatch):
    for name in ("SGLANG_CACHE_DIR", *_CACHES):
        monkeypatch.delenv(name, raising=False)


def test_all_that_a_server_compiles_is_kept_in_one_directory(sglang):
    """Also by what is imported before sglang."""
    assert len(sglang["caches"]) == len(_CACHES) + 2
    assert {os.path.commonpath([place, sglang["cache"]]) for place in sglang["caches"]} == {sglang["cache"]}


def test_the_users_own_places_for_compiled_kernels_stay(no_caches, monkeypatch, tmp_path):
    monkeypatch.setenv("SGLANG_CACHE_DIR", "/mine")
    monkeypatch.setenv("TVM_FFI_CACHE_DIR", "/other")
    environment = compute_server_environment(compute(make_args()), on_cpu=False, cache=tmp_path)
    assert (environment["SGLANG_CACHE_DIR"], environment["SGLANG_JIT_CACHE_DIR"]) == ("/mine", "/mine/jit")
    assert environment["TVM_FFI_CACHE_DIR"] == "/other"


def test_without_a_directory_sglang_chooses(no_caches):
    environment = compute_server_environment(compute(make_args()), on_cpu=False)
    assert not {"SGLANG_CACHE_DIR", *_CACHES} & environment.keys()


def test_what_libraries_read_reaches_the_server(monkeypatch):
    given = {"NCCL_NVLS_ENABLE": "2", "NCCL_CUMEM_ENABLE": "0", "GLOO_SOCKET_IFNAME": "eth7", "SGLANG_ANYTHING": "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    environment = compute_server_environment(compute(make_args(), on_cpu=False), on_cpu=False)
    assert {name: environment[name] for name in given} == given


def test_ranks_of_a_server_meet_on_its_host_whatever_the_driver_has(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("SGLANG_HOST_IP", "10.0.0.1")
    environment = compute_server_environment(compute(make_args(), host="127.0.0.3"), on_cpu=True)
    assert (environment["SGLANG_HOST_IP"], environment["GLOO_SOCKET_IFNAME"]) == (
        "127.0.0.3",
        interface_of("127.0.0.1"),
    )


def test_still_so_sglang_leaves_what_nccl_reads_as_it_was_given():
    (package,) = importlib.util.find_spec("sglang").submodule_search_locations
    source = Path(package, "srt/entrypoints/engine.py").read_text()
    assert 'if "NCCL_CUMEM_ENABLE" not in os.environ or cfg.enable_symm_mem:' in source
    assert (
        '"NCCL_NVLS_ENABLE" not in os.environ\n        or cfg.enable_nccl_nvls\n        or cfg.enable_symm_mem'
        in source
    )


@pytest.mark.parametrize(
    ("cores", "flags", "threads"),
    [
        (2, {"rollout_num_gpus": 1}, 2),
        (2, {"rollout_num_gpus": 2}, 1),
        (2, {"rollout_num_gpus": 5}, 1),
        # Of engines over several nodes, those of one.
        (16, {"rollout_num_gpus": 16}, 2),
        # The trainer waits while engines generate, unless it is asynchronous.
        (16, {"rollout_num_gpus": 2, "world_size": 2}, 8),
        (16, {"rollout_num_gpus": 2, "world_size": 2, "asynchronous": True}, 4),
        (16, {"rollout_num_gpus": 2, "world_size": 32, "asynchronous": True}, 1),
        (16, {"rollout_num_gpus": 2, "world_size": 2, "asynchronous": True, "has_trainer": False}, 8),
    ],
)
def test_ranks_of_engines_share_the_cores_of_a_node(monkeypatch, cores, flags, threads):
    monkeypatch.setattr(server_arguments.os, "sched_getaffinity", lambda process: set(range(cores)))
    args = make_args(**{"asynchronous": False, "world_size": 1, "actor_num_gpus_per_node": 16, **flags})
    assert share_of_cores(args) == threads


@pytest.mark.parametrize(("gpus", "stages", "ranks"), [(1, None, 0), (2, None, 2), (2, 2, 2), (4, 2, 4)])
def test_every_rank_of_every_stage_has_an_entry_of_cores(monkeypatch, gpus, stages, ranks):
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(server_arguments.os, "sched_getaffinity", lambda process: {1, 3, 5})
    args = make_args(rollout_num_gpus_per_engine=gpus, sglang_pp_size=stages)
    environment = compute_server_environment(compute(args), on_cpu=True, threads=2)
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment.get("SGLANG_CPU_OMP_THREADS_BIND", "") == "|".join(["1,3,5"] * ranks)


@pytest.mark.parametrize(
    ("threads", "given", "rounds"),
    [
        (1, {}, None),
        (2, {}, "20000"),
        (2, {"GOMP_SPINCOUNT": "7"}, "7"),
        (2, {"OMP_WAIT_POLICY": "passive"}, None),
    ],
)
def test_threads_wait_awake_for_a_short_time_unless_the_user_says_how_long(monkeypatch, threads, given, rounds):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    environment = compute_server_environment(compute(make_args()), on_cpu=True, threads=threads)
    assert environment.get("GOMP_SPINCOUNT") == rounds


def test_threads_are_left_alone_with_a_gpu(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    environment = compute_server_environment(compute(make_args(), on_cpu=False), on_cpu=False)
    assert environment["OMP_NUM_THREADS"] == "16"
    assert "SGLANG_USE_CPU_ENGINE" not in environment


def test_the_arguments_file_is_for_its_owner_only(tmp_path):
    path = tmp_path / "arguments.json"
    write_arguments_file(path, compute(make_args(router_api_key="key", sglang_dtype="bfloat16")))
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    content = json.loads(path.read_text())
    assert content["values"]["api_key"] == "key" and content["typed"] == ["dtype"]


def test_torch_sees_no_gpu_where_the_engines_are_to_use_none():
    environment = compute_server_environment(compute(make_args()), on_cpu=True)
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


def test_engines_remember_routed_experts_where_they_are_to_be_replayed():
    assert "enable_return_routed_experts" not in compute(make_args()).values
    assert compute(make_args(use_rollout_routing_replay=True)).values["enable_return_routed_experts"] is True


# -- flags: one child process imports sglang and answers all questions about its own classes ---------------------------

SPECS = load_surface("sglang")

QUESTIONS = """
import dataclasses, json, os, sys
from slime.backends.sglang_utils import cpu_runtime
cpu_runtime.install()
import argparse
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs
from slime.backends.sglang_utils.server_process import convert_texts
from slime.utils.errors import UserError

parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
texts = {
    "cuda_graph_config": '{"decode": {"backend": "disabled"}}',
    "quantization_param_path": "None",
    "lora_paths": ["a=b", '{"lora_name": "n", "lora_path": "p"}'],
    "context_length": 4096,
    "dtype": "bfloat16",
    "numa_node": [0, 1],
}
def refused(**typed):
    try:
        return convert_texts(typed, ServerArgs)
    except UserError as error:
        return str(error)
print(json.dumps({
    "fields": ServerArgs.__struct_fields__,
    "command_line": sorted({action.dest for action in parser._actions}),
    "options": [option for action in parser._actions for option in action.option_strings],
    "converted": convert_texts(texts, ServerArgs),
    "wrong_json": refused(cuda_graph_config="{"),
    "caches": [os.environ[name] for name in sys.argv[1:]]
    + [envs.SGLANG_DG_CACHE_DIR.get(), envs.SGLANG_CUTE_AOT_CACHE_DIR.get()],
    "wrong_phase": refused(cuda_graph_config='{"dance": {}}'),
    "seconds_kept": envs.SGLANG_TIMEOUT_KEEP_ALIVE.get(),
    "seconds_kept_by_itself": envs.SGLANG_TIMEOUT_KEEP_ALIVE.default,
}))
"""


@pytest.fixture(scope="module")
def sglang(tmp_path_factory):
    """Answers of a process with the environment of a server."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SGLANG_CACHE_DIR", "SGLANG_TIMEOUT_KEEP_ALIVE", *_CACHES):
            patch.delenv(name, raising=False)
        environment = compute_server_environment(compute(make_args()), on_cpu=True, cache=cache)
    command = [sys.executable, "-W", "ignore", "-c", QUESTIONS, *_CACHES]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert answer.returncode == 0, answer.stderr[-2000:]
    return {"cache": str(cache), **json.loads(answer.stdout.splitlines()[-1])}


@pytest.fixture(scope="module")
def parser():
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    group = parser.add_argument_group("SGLang")
    for spec in SPECS:
        add_flag(group, spec)
    return parser


def given(parser, *words):
    return {name: value for name, value in vars(parser.parse_args(list(words))).items() if value is not None}


def test_every_field_has_a_flag_or_a_reason(sglang):
    described = {spec.metadata["field"] for spec in SPECS}
    off_the_command_line = set(sglang["fields"]) - set(sglang["command_line"])
    assert described == set(sglang["fields"]) - NOT_EXPOSED - off_the_command_line
    assert {name for name in off_the_command_line if not name.startswith("_")} == {
        "custom_sigquit_handler", "grpc_worker_threads", "speculative_boundary_reduction", "stat_loggers",
        "uses_mamba_radix_cache",
    }  # fmt: skip
    assert set(sglang["fields"]) | {"config"} >= NOT_EXPOSED, "an exclusion that excludes nothing"


def test_every_spelling_of_sglang_works_behind_our_prefix(sglang):
    ours = {flag for spec in SPECS for flag in spec.flags}
    theirs = {f"--sglang-{option.removeprefix('--')}" for option in sglang["options"] if option.startswith("--")}
    hidden = {f"--sglang-{name.replace('_', '-')}" for name in NOT_EXPOSED}
    assert theirs - ours == {*hidden, "--sglang-help", "--sglang-model", "--sglang-nccl-init-addr"}


@pytest.mark.parametrize(
    ("spellings", "attribute"),
    [
        ("tp tp-size tensor-parallel-size", "sglang_tp_size"),
        ("dp dp-size data-parallel-size", "sglang_dp_size"),
        ("pp pp-size pipeline-parallel-size", "sglang_pp_size"),
        ("ep ep-size expert-parallel-size", "sglang_ep_size"),
        ("cuda-graph-max-bs cuda-graph-max-bs-decode", "sglang_cuda_graph_max_bs_decode"),
    ],
)
def test_all_spellings_of_a_field_set_one_attribute(parser, spellings, attribute):
    for spelling in spellings.split():
        assert given(parser, f"--sglang-{spelling}", "2") == {attribute: 2}


def test_nothing_is_given_unless_typed(parser):
    assert given(parser) == {}


def test_values_have_the_type_that_the_server_expects(parser):
    words = (
        "--sglang-context-length 32Ki --sglang-max-total-tokens 25.6k --sglang-mem-fraction-static 0.7 "
        "--sglang-cuda-graph-bs 1 2 4 --sglang-bucket-time-to-first-token 0.1 1 --sglang-log-requests-target stdout "
        '--sglang-extra-metric-labels {"a":"b"} --sglang-forward-hooks [{"name":"x"}] --sglang-model-checksum '
        "--sglang-disable-cuda-graph --no-sglang-sleep-on-idle --no-sglang-dllm-fdfo --sglang-no-lora-strict-loading"
    )
    assert given(parser, *words.split()) == {
        "sglang_context_length": 32768,
        "sglang_max_total_tokens": 25600,
        "sglang_mem_fraction_static": 0.7,
        "sglang_cuda_graph_bs_decode": [1, 2, 4],
        "sglang_bucket_time_to_first_token": [0.1, 1.0],
        "sglang_log_requests_target": ["stdout"],
        "sglang_extra_metric_labels": {"a": "b"},
        "sglang_forward_hooks": [{"name": "x"}],
        "sglang_model_checksum": "",
        "sglang_disable_cuda_graph": True,
        "sglang_sleep_on_idle": False,
        "sglang_dllm_fdfo": False,
        "sglang_lora_strict_loading": False,
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--sglang-page-size two", "invalid int value: 'two'"),
        ("--sglang-context-length 32K", "such as 32768, 32Ki"),
        ("--sglang-dtype float99", "invalid choice: 'float99'.*bfloat16"),
        ("--sglang-extra-metric-labels {a", "is not JSON"),
    ],
)
def test_a_wrong_value_is_found_while_parsing(parser, words, message):
    with pytest.raises(argparse.ArgumentError, match=message):
        parser.parse_args(words.split())


def test_the_flags_in_common_use_exist():
    names = """mem-fraction-static context-length cuda-graph-bs cuda-graph-max-bs disable-cuda-graph max-running-requests
        chunked-prefill-size attention-backend kv-cache-dtype ep-size dp-size enable-dp-attention enable-dp-lm-head
        moe-a2a-backend deepep-mode moe-dense-tp-size speculative-algorithm speculative-num-steps speculative-eagle-topk
        speculative-num-draft-tokens speculative-draft-model-path tool-call-parser reasoning-parser
        disaggregation-transfer-backend disaggregation-ib-device watchdog-timeout log-level
        enable-deterministic-inference tp-size"""
    known = {flag for spec in SPECS for flag in spec.flags}
    assert {f"--sglang-{name}" for name in names.split()} <= known


@pytest.mark.parametrize(
    ("attribute", "defaults"),
    [
        ("sglang_max_prefill_tokens", "[server default: 16384]"),
        ("sglang_log_level", '[server default: "info"; in a run: "warning"]'),
        ("sglang_attention_backend", '[server default: none; on CPU: "torch_native"]'),
        ("sglang_enable_metrics", "[server default: false; in a run: true; on CPU: false]"),
    ],
)
def test_help_tells_the_default_that_will_hold(attribute, defaults):
    (spec,) = [spec for spec in SPECS if spec.dest == attribute]
    assert spec.help.endswith(defaults)


def test_texts_are_read_by_the_command_line_of_sglang(sglang):
    converted = sglang["converted"]
    assert converted["cuda_graph_config"]["decode"]["backend"] == "disabled"
    assert converted["quantization_param_path"] is None
    assert converted["lora_paths"] == ["a=b", {"lora_name": "n", "lora_path": "p"}]
    assert (converted["context_length"], converted["dtype"], converted["numa_node"]) == (4096, "bfloat16", [0, 1])
    assert sglang["wrong_json"].startswith("--sglang-cuda-graph-config {: ")
    assert "unknown phase 'dance'" in sglang["wrong_phase"]


@pytest.mark.parametrize("sleeps, on_cpu, expected", [(True, False, True), (False, False, None), (True, True, None)])
def test_a_server_whose_engine_sleeps_can_give_its_memory_back_where_that_is_possible(sleeps, on_cpu, expected):
    arguments = compute(make_args(offload_rollout=sleeps), on_cpu=on_cpu)
    of_graphs = compute_server_environment(arguments, on_cpu).get("SGLANG_MEMORY_SAVER_CUDA_GRAPH")
    assert (arguments.values.get("enable_memory_saver"), of_graphs) == (expected, expected and "true")
