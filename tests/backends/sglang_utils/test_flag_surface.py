"""The flags of the installed sglang. One child process imports it and answers all questions about its own classes."""

import argparse
import json
import subprocess
import sys

import pytest

from slime.arguments.surface import add_flag, load_surface
from slime.backends.sglang_utils.flag_surface import NOT_EXPOSED

SPECS = load_surface("sglang")

QUESTIONS = """
import dataclasses, json
from slime.backends.sglang_utils import cpu_runtime
cpu_runtime.install()
import argparse
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
    "wrong_phase": refused(cuda_graph_config='{"dance": {}}'),
}))
"""


@pytest.fixture(scope="module")
def sglang():
    command = [sys.executable, "-W", "ignore", "-c", QUESTIONS]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr[-2000:]
    return json.loads(answer.stdout.splitlines()[-1])


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
