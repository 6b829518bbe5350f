"""Values that follow from other flags: aliases, sizes and modes, time limits."""

import argparse
import json
import os

import pytest

from slime.arguments import parse_args
from slime.arguments.derivation import derive_time_limits
from slime.arguments.origins import Origin
from slime.utils.errors import UserError
from slime.utils.hf_files import TIME_LIMITS
from tests.support.models.args import command_line, parse, write_config


def test_a5_temperature_zero_is_for_evaluation_only(tmp_path):
    data = str(tmp_path / "prompts.jsonl")
    with pytest.raises(UserError, match="--rollout-temperature 0.0: training needs a value above 0"):
        parse(tmp_path, "--rollout-temperature", "0")
    args = parse(tmp_path, "--eval-temperature", "0", "--eval-prompt-data", "a", data)
    assert args.eval_datasets[0].temperature == 0


def test_a11_repeated_eval_sets_accumulate(tmp_path):
    data = str(tmp_path / "prompts.jsonl")
    args = parse(tmp_path, "--eval-prompt-data", "a", data, "--eval-prompt-data", "b", data)
    assert [dataset.name for dataset in args.eval_datasets] == ["a", "b"]
    assert args.eval_prompt_data == ["a", data, "b", data]


def test_one_lone_eval_path_is_named_aime(tmp_path):
    args = parse(tmp_path, "--eval-prompt-data", str(tmp_path / "prompts.jsonl"))
    assert [dataset.name for dataset in args.eval_datasets] == ["aime"]


def test_batch_sizes_are_derived(tmp_path):
    assert parse(tmp_path).global_batch_size == 8
    assert parse(tmp_path, "--num-steps-per-rollout", "4").global_batch_size == 2
    args = parse(tmp_path, "--global-batch-size", "4")
    assert (args.num_steps_per_rollout, args.over_sampling_batch_size) == (2, 4)
    assert args.origins["num_steps_per_rollout"] is Origin.DERIVED
    assert args.origins["global_batch_size"] is Origin.COMMAND_LINE


def test_dump_details_sets_the_templates_that_are_not_typed(tmp_path):
    args = parse(tmp_path, "--dump-details", "D")
    assert args.save_debug_rollout_data == os.path.abspath("D/rollout_data/{rollout_id}.pt")
    assert args.save_debug_train_data == os.path.abspath("D/train_data/{rollout_id}.pt")
    args = parse(tmp_path, "--dump-details", "D", "--save-debug-train-data", "/mine/{rank}.pt")
    assert args.save_debug_train_data == "/mine/{rank}.pt"


def test_limits_follow_from_the_context(tmp_path):
    args = parse(tmp_path, "--rollout-max-context-len", "100")
    assert (args.rollout_max_prompt_len, args.eval_max_context_len) == (99, 100)


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ("", 14400),
        ("--http-request-timeout 60", 14400),
        ("--http-request-timeout 20000.5", 20001),
        ("--http-request-timeout 20000 --sglang-router-request-timeout-secs 14400", 14400),
    ],
)
def test_our_router_gives_a_request_as_long_as_its_client_unless_it_is_told_otherwise(tmp_path, words, seconds):
    """It would end a longer answer, which the client then begins anew."""
    assert parse(tmp_path, *words.split()).sglang_router_request_timeout_secs == seconds


def test_a_nucleus_is_told_of_a_limited_top_k(tmp_path):
    args = parse(tmp_path, "--rollout-top-p", "0.9")
    assert (args.rollout_top_k, args.origins["rollout_top_k"]) == (2048, Origin.DERIVED)
    assert args.eval_top_k == -1, "nobody asked for it"
    off = parse(tmp_path, "--rollout-top-p", "0.9", "--rollout-top-k", "-1")
    assert (off.rollout_top_k, off.origins["rollout_top_k"]) == (2048, Origin.DERIVED), "nobody typed this number"
    typed = parse(tmp_path, "--rollout-top-p", "0.9", "--rollout-top-k", "7")
    assert (typed.rollout_top_k, typed.origins["rollout_top_k"]) == (7, Origin.COMMAND_LINE)
    assert parse(tmp_path).rollout_top_k == -1
    fewer = ["--rollout-top-p", "0.9", "--sglang-sampling-mask-max-tokens"]
    assert parse(tmp_path, *fewer, "1024").rollout_top_k == 512, "equal tokens at the cut have room"
    assert parse(tmp_path, *fewer, "1").rollout_top_k == 1
    assert parse(tmp_path, *fewer, "9000").rollout_top_k == 2048


@pytest.mark.parametrize(
    ("words", "warned"),
    [("256", True), ("4096", False), ("256 --rollout-top-k 64", False), ("256 --debug-train-only", False)],
)
def test_a_nucleus_that_engines_have_little_room_for_is_warned_of(tmp_path, caplog, words, warned):
    parse(tmp_path, "--rollout-top-p", "0.9", "--sglang-sampling-mask-max-tokens", *words.split())
    told = "--sglang-sampling-mask-max-tokens 256 cuts --rollout-top-k to 128; give 4096, or --rollout-top-k"
    assert [record.message for record in caplog.records].count(told) == warned


def test_values_that_default_to_another_flags(tmp_path):
    args = parse(tmp_path, "--reward-key", "score", "--eps-clip", "0.1", "--rollout-function-path", "tests.f")
    assert (args.eval_reward_key, args.eps_clip_high, args.eval_function_path) == ("score", 0.1, "tests.f")
    assert args.rm_model_path == args.hf_checkpoint
    assert parse(tmp_path, "--eps-clip-high", "0.3").eps_clip_high == 0.3


@pytest.mark.parametrize(
    "words, expected",
    [
        ("--rollout-max-context-len 100 --rollout-max-prompt-len 10", {"rollout_max_prompt_len": 10}),
        ("--rollout-max-context-len 100 --eval-max-context-len 50", {"eval_max_context_len": 50}),
        ("--rollout-top-p 0.9 --eval-top-k 5", {"eval_top_k": 5}),
        ("--reward-key score --eval-reward-key acc", {"eval_reward_key": "acc"}),
        ("--eval-function-path tests.g", {"eval_function_path": "tests.g"}),
        ("--over-sampling-batch-size 6", {"over_sampling_batch_size": 6}),
        ("--n-samples-per-prompt 2", {"grpo_std_normalization": True}),
        ("--n-samples-per-prompt 1", {"grpo_std_normalization": False}),
        ("--balance-data", {"balance_data": True}),
    ],
)
def test_what_was_typed_stays_beside_what_it_would_follow_from(tmp_path, words, expected):
    args = parse(tmp_path, *words.split())
    assert {name: getattr(args, name) for name in expected} == expected


def test_switches_that_imply_others(tmp_path):
    dynamic = ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "512")
    assert parse(tmp_path, "--balance-by-flops", *dynamic).balance_data
    assert parse(tmp_path, "--use-rollout-routing-replay", "--dry-run", "--debug-rollout-only").use_routing_replay


def test_the_on_policy_proof_is_deterministic_and_strict(tmp_path):
    args = parse(tmp_path, "--true-on-policy-mode", "--dry-run")
    assert args.deterministic_mode and args.sglang_enable_deterministic_inference
    assert args.ci_train_rollout_logprob_abs_diff_threshold == 0.0
    flags = ("--true-on-policy-mode", "--ci-train-rollout-logprob-abs-diff-threshold", "0.5", "--dry-run")
    assert parse(tmp_path, *flags).ci_train_rollout_logprob_abs_diff_threshold == 0.5


def test_precision_of_a_plan(tmp_path, monkeypatch):
    monkeypatch.delenv("SLIME_ACCELERATOR", raising=False)
    assert parse(tmp_path, "--dry-run").params_dtype_name == "bfloat16"
    assert parse(tmp_path, "--dry-run", "--fp16").params_dtype_name == "float16"
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    assert parse(tmp_path, "--dry-run").params_dtype_name == "float32"


def recomputation(args):
    return args.recompute_granularity, args.recompute_method, args.recompute_num_layers


def test_gradient_checkpointing_recomputes_every_layer(tmp_path):
    assert recomputation(parse(tmp_path, "--gradient-checkpointing")) == ("full", "uniform", 1)


def test_typed_recomputation_comes_before_gradient_checkpointing(tmp_path):
    args = parse(tmp_path, "--gradient-checkpointing", "--recompute-activations", "--dry-run")
    assert recomputation(args) == ("selective", None, None)
    typed = "--recompute-granularity full --recompute-method block --recompute-num-layers 2"
    assert recomputation(parse(tmp_path, "--gradient-checkpointing", *typed.split())) == ("full", "block", 2)


def test_tis_threshold_is_tis_clip(tmp_path):
    assert parse(tmp_path, "--tis-threshold", "3", "--dry-run").tis_clip == 3
    assert parse(tmp_path, "--tis-threshold", "3", "--tis-clip", "3", "--dry-run").tis_clip == 3


def test_gated_attention_is_an_attention_output_gate(tmp_path):
    with pytest.raises(UserError, match=r"hf_validate_args failed(.|\n)*--attention-output-gate +given"):
        parse(tmp_path, "--use-gated-attention")


def test_a_file_for_the_plan_means_a_dry_run(tmp_path):
    assert parse(tmp_path, "--dry-run-json", str(tmp_path / "plan.json")).dry_run


def test_offload_optimizer_states(tmp_path):
    assert parse(tmp_path, "--offload-optimizer-states", "--dry-run").optimizer_cpu_offload


def test_messages_are_about_the_name_that_was_typed(tmp_path):
    notes = parse(tmp_path, "--tis-threshold", "3", "--dry-run").plan_notes
    assert [note for note in notes if "--tis-clip" in note] == []


def plan(tmp_path, words: str):
    """Derived arguments of a dry run that types no sizes but those in `words`."""
    base = command_line(tmp_path)
    for flag in ("--rollout-num-gpus", "--actor-num-gpus-per-node"):
        at = base.index(flag)
        del base[at : at + 2]
    return parse_args(argv=[*base, *words.split(), "--dry-run"])


def sizes(args):
    return args.actor_num_nodes, args.actor_num_gpus_per_node, args.rollout_num_gpus


def offloads(args):
    return args.offload_train, args.offload_rollout


@pytest.mark.parametrize(
    "words, expected",
    [
        ("--colocate", (1, 8, 8)),
        ("--colocate --actor-num-nodes 2 --actor-num-gpus-per-node 4 --global-batch-size 8", (2, 4, 8)),
        ("--colocate --rollout-num-gpus 4", (1, 8, 4)),
        ("--debug-rollout-only --rollout-num-gpus 4", (1, 4, 4)),
        ("--debug-rollout-only --rollout-num-gpus 16", (2, 8, 16)),
        ("--debug-rollout-only --rollout-num-gpus 0 --router-api-key k", (0, 0, 0)),
        ("--debug-rollout-only --colocate --actor-num-gpus-per-node 2", (1, 2, 2)),
        ("--debug-rollout-only --rollout-external-engine-addrs a:1 --actor-num-gpus-per-node 4", (1, 4, None)),
        ("--debug-train-only", (1, 8, 0)),
        ("--debug-train-only --rollout-num-gpus 4", (1, 8, 0)),
    ],
)
def test_sizes(tmp_path, words, expected):
    assert sizes(plan(tmp_path, words)) == expected


@pytest.mark.parametrize(
    "words, expected",
    [
        ("--rollout-num-gpus 8", (False, False)),
        ("--rollout-num-gpus 8 --offload", (True, True)),
        ("--rollout-num-gpus 8 --offload-train", (True, False)),
        ("--rollout-num-gpus 8 --offload --no-offload-train", (False, True)),
        ("--colocate --offload --no-offload-rollout", (True, False)),
        ("--colocate", (True, True)),
        ("--colocate --no-offload-rollout", (True, False)),
        ("--colocate --offload", (True, True)),
        ("--debug-rollout-only --colocate --offload", (False, False)),
        ("--rollout-num-gpus 8 --advantage-estimator ppo", (True, False)),
        (
            "--colocate --release-train --save /s --update-weight-transport disk --update-weight-disk-dir /d",
            (False, True),
        ),
    ],
)  # fmt: skip
def test_offloads(tmp_path, words, expected):
    args = plan(tmp_path, words)
    assert offloads(args) == expected
    assert not hasattr(args, "offload")
    assert (args.disable_param_buffer_cpu_backup, args.disable_grad_buffer_cpu_backup) == (expected[0],) * 2


@pytest.mark.parametrize(
    "words, expected",
    [
        ("--colocate --actor-num-gpus-per-node 4", 4),
        ("--colocate --actor-num-gpus-per-node 4 --num-gpus-per-node 8", 8),
        ("--rollout-num-gpus 8 --actor-num-gpus-per-node 4", 8),
    ],
)
def test_the_node_size_of_colocated_engines(tmp_path, words, expected):
    assert plan(tmp_path, words).num_gpus_per_node == expected


def test_the_critic_shares_the_actors_gpus(tmp_path):
    args = plan(tmp_path, "--rollout-num-gpus 8 --advantage-estimator ppo --actor-num-gpus-per-node 4")
    assert args.use_critic and (args.critic_num_nodes, args.critic_num_gpus_per_node) == (1, 4)
    assert not plan(tmp_path, "--colocate").use_critic


def test_a_dump_means_training_only(tmp_path):
    args = plan(tmp_path, "--load-debug-rollout-data /d/{rollout_id}.pt")
    assert args.debug_train_only and args.has_trainer and not args.has_engines


GB = 10**9


def limits_of(directory, **typed) -> dict[str, float]:
    args = argparse.Namespace(hf_checkpoint=str(directory), **{**dict.fromkeys(TIME_LIMITS), **typed})
    derive_time_limits(args)
    return {name: getattr(args, name) for name in TIME_LIMITS}


def weights(directory, name, size) -> None:
    """A file of `size` bytes that takes no room."""
    with (directory / name).open("wb") as file:
        file.truncate(size)


def test_small_models_have_the_least_limits(tmp_path):
    weights(tmp_path, "model.safetensors", 1)
    assert limits_of(tmp_path) == {
        "engine_start_timeout": 601, "engine_load_timeout": 301, "train_start_timeout": 1801,
        "checkpoint_write_timeout": 601, "checkpoint_publish_timeout": 301,
    }  # fmt: skip


def test_large_models_have_time(tmp_path):
    """1.5 TB, as 744 billion parameters have in 16 bits."""
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1500 * GB}}))
    assert limits_of(tmp_path) == {
        "engine_start_timeout": 600 + 7500, "engine_load_timeout": 300 + 7500,
        "train_start_timeout": 1800 + 10500, "checkpoint_write_timeout": 600 + 52500, "checkpoint_publish_timeout": 300 + 10500,
    }  # fmt: skip


def test_a_typed_limit_stays(tmp_path):
    weights(tmp_path, "model.safetensors", 20 * GB)
    limits = limits_of(tmp_path, engine_start_timeout=5.0)
    assert (limits["engine_start_timeout"], limits["engine_load_timeout"]) == (5.0, 400.0)


@pytest.mark.parametrize(
    "value, message", [("0", "above 0"), ("-3", "above 0"), ("nan", "a finite number"), ("inf", "a finite number")]
)
def test_a_limit_leaves_some_time(tmp_path, value, message):
    write_config(tmp_path)
    with pytest.raises(UserError, match=f"--engine-load-timeout .*it must be {message}"):
        parse(tmp_path, f"--engine-load-timeout={value}")


def test_limits_are_among_the_derived_values(tmp_path):
    args = parse(tmp_path, "--train-start-timeout", "77")
    assert (args.train_start_timeout, args.engine_start_timeout) == (77, 600)
    assert {name: str(args.origins[name]) for name in TIME_LIMITS} == {
        "engine_start_timeout": "derived", "engine_load_timeout": "derived", "train_start_timeout": "command line",
        "checkpoint_write_timeout": "derived", "checkpoint_publish_timeout": "derived",
    }  # fmt: skip
