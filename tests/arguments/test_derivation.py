import os

import pytest

from slime.arguments.origins import Origin
from slime.utils.errors import UserError
from tests.support.args import parse


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


def test_values_that_default_to_another_flags(tmp_path):
    args = parse(tmp_path, "--reward-key", "score", "--eps-clip", "0.1", "--rollout-function-path", "tests.f")
    assert (args.eval_reward_key, args.eps_clip_high, args.eval_function_path) == ("score", 0.1, "tests.f")
    assert args.rm_model_path == args.hf_checkpoint
    assert parse(tmp_path, "--eps-clip-high", "0.3").eps_clip_high == 0.3


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
