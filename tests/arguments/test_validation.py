import os

import pytest

from slime.utils.errors import UserError
from tests.support.args import parse


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["--global-batch-size", "3"],
            r"4 x --n-samples-per-prompt 2 = 8 .* no multiple of --global-batch-size 3; 1, 2, 4, 8",
        ),
        (["--num-steps-per-rollout", "3"], r"cannot be split into --num-steps-per-rollout 3; 1, 2, 4, 8 would do"),
        (["--num-steps-per-rollout", "2", "--global-batch-size", "8"], "give --global-batch-size 4"),
        (["--rollout-temperature", "0"], r"--rollout-temperature 0.0: training needs a value above 0"),
        (["--rollout-top-p", "0.9"], "--rollout-top-p 0.9"),
        (["--use-dynamic-batch-size"], "needs --max-tokens-per-gpu"),
        (["--use-kl-loss"], "--use-kl-loss needs --ref-load"),
        (["--loss-type", "custom_loss"], "needs --custom-loss-function-path"),
        (["--eps-clip-c", "0.5"], "--eps-clip-c 0.5: it must be above 1"),
        (["--save-interval", "2"], "--save-interval needs --save"),
        (["--eval-interval", "2"], "--eval-interval needs --eval-prompt-data"),
        (["--eval-prompt-data", "a", "b", "c"], "needs pairs `name path`, but has 3 words"),
        (["--prompt-data", "/nowhere/data.jsonl@[0:5]"], "there is no file /nowhere/data.jsonl"),
        (["--input-key", "question"], "there is no field 'question' .--input-key.; the row has prompt, label"),
        (["--custom-rm-path", "/nowhere/reward.py:grade"], "--custom-rm-path .*: there is no file /nowhere/reward.py"),
        (["--rollout-sample-hook-path", "/nowhere/hook.py"], "--rollout-sample-hook-path .*: there is no file"),
        (["--debug-rollout-only", "--debug-train-only"], "exclude each other"),
        (["--rollout-num-gpus", "0"], "--rollout-num-gpus 0: give the number of GPUs for the engines"),
        (["--rollout-num-gpus", "3", "--rollout-num-gpus-per-engine", "2"], "no multiple of"),
        (["--over-sampling-batch-size", "2"], "must be at least --rollout-batch-size 4"),
        (["--tensor-model-parallel-size", "2"], "must divide the number of training ranks"),
        (["--sequence-parallel"], "--sequence-parallel needs --tensor-model-parallel-size above 1"),
        (["--micro-batch-size", "3"], "is no multiple of --micro-batch-size 3"),
        (
            ["--rollout-max-context-len", "10", "--rollout-max-prompt-len", "10"],
            "must be below --rollout-max-context-len 10",
        ),
        (["--rollout-max-context-len", "1000"], "above the model's --max-position-embeddings 512"),
        (["--sglang-router-ip", "127.0.0.1"], "belong together"),
        (["--n-samples-per-prompt", "0"], "--n-samples-per-prompt 0: it must be at least 1"),
        (["--rollout-top-k", "5"], "--rollout-top-k 5"),
        (["--global-batch-size", "0"], "--global-batch-size 0: it must be at least 1"),
        (["--tensor-model-parallel-size", "0"], "--tensor-model-parallel-size 0: it must be at least 1"),
        (["--save-debug-rollout-data", "{step}.pt"], "only {rollout_id} is filled in"),
        (["--save-debug-rollout-data", "a.pt", "--save-debug-train-data", "a.pt"], "name the same file"),
        (["--rm-url", "host:80"], "must start with http"),
        (["--load-debug-rollout-data", "x.pt", "--load-debug-rollout-data-subsample", "2"], "at most 1"),
    ],
)
def test_rule(tmp_path, words, message):
    with pytest.raises(UserError, match=message):
        parse(tmp_path, *words)


def test_all_violations_come_in_one_message(tmp_path):
    with pytest.raises(UserError) as error:
        parse(tmp_path, "--rollout-temperature", "-1", "--global-batch-size", "3", "--save-interval", "1")
    message = str(error.value)
    assert "--rollout-temperature" in message and "--global-batch-size" in message and "--save-interval" in message


def test_save_hf_must_not_be_the_source(tmp_path):
    model = str(tmp_path / "model")
    with pytest.raises(UserError, match="would overwrite --hf-checkpoint"):
        parse(tmp_path, "--save", str(tmp_path / "run"), "--save-hf", model)


def test_a5_temperature_zero_is_allowed_in_evaluation(tmp_path):
    data = str(tmp_path / "prompts.jsonl")
    args = parse(tmp_path, "--eval-temperature", "0", "--eval-prompt-data", "a", data)
    assert args.eval_datasets[0].temperature == 0


def test_a11_repeated_eval_sets_accumulate(tmp_path):
    data = str(tmp_path / "prompts.jsonl")
    args = parse(tmp_path, "--eval-prompt-data", "a", data, "--eval-prompt-data", "b", data)
    assert [dataset.name for dataset in args.eval_datasets] == ["a", "b"]


def test_one_lone_eval_path_is_named_aime(tmp_path):
    args = parse(tmp_path, "--eval-prompt-data", str(tmp_path / "prompts.jsonl"))
    assert [dataset.name for dataset in args.eval_datasets] == ["aime"]


def test_batch_sizes_are_derived(tmp_path):
    assert parse(tmp_path).global_batch_size == 8
    assert parse(tmp_path, "--num-steps-per-rollout", "4").global_batch_size == 2
    assert parse(tmp_path, "--global-batch-size", "4").num_steps_per_rollout == 2


def test_dump_details_sets_both_templates(tmp_path):
    args = parse(tmp_path, "--dump-details", "D")
    assert args.save_debug_rollout_data == os.path.abspath("D/rollout_data/{rollout_id}.pt")
    assert args.save_debug_train_data == os.path.abspath("D/train_data/{rollout_id}.pt")


def test_single_sample_groups_are_only_centred(tmp_path, caplog):
    args = parse(tmp_path, "--n-samples-per-prompt", "1")
    assert args.grpo_std_normalization is False
    assert "all advantages are zero" in caplog.text


def test_context_limit_limits_the_prompt(tmp_path):
    assert parse(tmp_path, "--rollout-max-context-len", "100").rollout_max_prompt_len == 99


def test_files_are_opened_before_anything_starts(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="--prompt-data .*empty.jsonl: holds no rows"):
        parse(tmp_path, "--prompt-data", str(tmp_path / "empty.jsonl"))
    (tmp_path / "other.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    with pytest.raises(
        UserError, match="other.jsonl:1: the row has neither `prompt` nor `input`, only question, answer"
    ):
        parse(tmp_path, "--eval-interval", "1", "--eval-prompt-data", "set", str(tmp_path / "other.jsonl"))


def test_an_own_data_source_reads_its_files_in_its_own_way(tmp_path):
    (tmp_path / "other.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    parse(tmp_path, "--data-source-path", "my.Source", "--prompt-data", str(tmp_path / "other.jsonl"))


def test_an_unreadable_config_is_reported_alone(tmp_path):
    with pytest.raises(UserError) as error:
        parse(tmp_path, "--hf-checkpoint", "/nowhere/model")
    assert str(error.value).count("\n") == 0
