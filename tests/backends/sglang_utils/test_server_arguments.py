import json
import logging
import os
import stat
from types import SimpleNamespace

import pytest

from slime.backends.sglang_utils.server_arguments import compute_server_arguments, compute_server_environment
from slime.backends.sglang_utils.server_process import hide_from_logs, write_arguments_file
from slime.utils.errors import UserError


def make_args(**overrides) -> SimpleNamespace:
    values = {"hf_checkpoint": "/models/m", "seed": 1234, "num_gpus_per_node": 8, "rollout_num_gpus_per_engine": 2}
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


def test_defaults_without_a_gpu():
    values = compute(make_args()).values
    assert values["device"] == "cpu"
    assert values["attention_backend"] == "torch_native"
    assert values["dtype"] == "float32"
    assert (values["max_total_tokens"], values["max_running_requests"]) == (32768, 64)
    assert values["sleep_on_idle"] is True


def test_no_cpu_defaults_with_a_gpu():
    values = compute(make_args(), on_cpu=False).values
    assert "device" not in values and "attention_backend" not in values and "dtype" not in values
    assert compute(make_args(fp16=True), on_cpu=False).values["dtype"] == "float16"


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


def test_contradicting_tensor_parallel_size_names_both_flags():
    with pytest.raises(UserError, match="--sglang-tp-size 4.*--rollout-num-gpus-per-engine 2"):
        compute(make_args(sglang_tp_size=4))
    with pytest.raises(UserError, match="--rollout-num-gpus-per-engine 2.*--sglang-pp-size 3"):
        compute(make_args(sglang_pp_size=3))


def test_environment_of_a_cpu_server(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    environment = compute_server_environment(compute(make_args()), on_cpu=True)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["TORCHDYNAMO_DISABLE"] == "1"
    assert environment["SGLANG_JIT_DEEPGEMM_PRECOMPILE"] == "true"
    assert environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"
    assert len(environment["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 2


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


def test_the_api_key_is_hidden_in_log_records(caplog):
    factory = logging.getLogRecordFactory()
    try:
        hide_from_logs("s3cret")
        with caplog.at_level(logging.INFO):
            logging.getLogger("server").info("arguments %s and %d%%", {"api_key": "s3cret"}, 5)
            logging.getLogger("server").info("plain %s", "text")
    finally:
        logging.setLogRecordFactory(factory)
    assert caplog.messages == ["arguments {'api_key': '***'} and 5%", "plain text"]


def test_records_that_cannot_be_formatted_and_tracebacks(caplog):
    factory = logging.getLogRecordFactory()
    try:
        hide_from_logs("s3cret")
        record = logging.getLogRecordFactory()("server", logging.INFO, "f", 1, "careful", (FutureWarning,), None)
        assert (record.msg, record.args) == ("careful", (FutureWarning,)), "left alone"
        try:
            raise ValueError("key s3cret is wrong")
        except ValueError:
            logging.getLogger("server").exception("failed")
    finally:
        logging.setLogRecordFactory(factory)
    assert "ValueError: key *** is wrong" in caplog.text and "s3cret" not in caplog.text


def test_torch_sees_no_gpu_where_the_engines_are_to_use_none():
    environment = compute_server_environment(compute(make_args()), on_cpu=True)
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


def test_engines_remember_routed_experts_where_they_are_to_be_replayed():
    assert "enable_return_routed_experts" not in compute(make_args()).values
    assert compute(make_args(use_rollout_routing_replay=True)).values["enable_return_routed_experts"] is True
