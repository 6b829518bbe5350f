"""Rules about prompts, evaluation sets, rollouts and batches."""

import contextlib
import logging

import pytest

from slime.arguments import parse_args
from slime.utils.errors import UserError
from tests.support.models.args import command_line, parse
from tests.support.models.seen_batch import PROVIDER
from tests.support.tables.rules import assert_violation, violations


def test_pairs_of_evaluation_sets(tmp_path):
    with pytest.raises(UserError, match=r"--eval-prompt-data needs pairs `name path`, but has 3 words: a b c"):
        parse(tmp_path, "--eval-prompt-data", "a", "b", "c")


def test_prompts_are_needed(tmp_path):
    words = command_line(tmp_path)
    at = words.index("--prompt-data")
    del words[at : at + 2]
    with pytest.raises(UserError) as error:
        parse_args(argv=words)
    assert str(error.value) == (
        "--prompt-data is needed (or --disable-rollout-global-dataset with an own data source)"
    )  # fmt: skip
    parse_args(argv=[*words, "--disable-rollout-global-dataset"])


def test_files_are_opened_before_anything_starts(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="--prompt-data .*empty.jsonl: holds no rows"):
        parse(tmp_path, "--prompt-data", str(tmp_path / "empty.jsonl"))
    (tmp_path / "other.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    with pytest.raises(
        UserError, match="other.jsonl:1: the row has neither `prompt` nor `input`, only question, answer"
    ):
        parse(tmp_path, "--eval-interval", "1", "--eval-prompt-data", "set", str(tmp_path / "other.jsonl"))


def test_a_wrong_row_is_an_error_in_a_dry_run_too(tmp_path):
    with pytest.raises(UserError, match="there is no field 'question'"):
        parse(tmp_path, "--input-key", "question", "--dry-run")


def test_an_own_data_source_reads_its_files_in_its_own_way(tmp_path):
    (tmp_path / "other.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    parse(tmp_path, "--data-source-path", "tests.support.Source", "--prompt-data", str(tmp_path / "other.jsonl"))


@pytest.mark.parametrize(
    "words", ["--eval-prompt-data a b c", "--eval-config {tmp}/nothing.yaml"], ids=["odd words", "no such file"]
)
def test_sets_that_cannot_be_read_are_not_asked_for_again(tmp_path, words):
    lines = violations(tmp_path, f"--eval-interval 2 {words}")
    assert len(lines) == 1 and "needs data sets" not in lines[0]


def eval_file(tmp_path, *lines):
    text = "".join(f"    {line}\n" for line in (f"path: {tmp_path}/prompts.jsonl", *lines))
    (tmp_path / "eval.yaml").write_text(f"datasets:\n  - name: a\n{text}")
    return f"--eval-interval 2 --eval-config {tmp_path}/eval.yaml"


def test_a_message_names_where_the_key_of_an_evaluation_set_comes_from(tmp_path):
    pairs = "--eval-interval 2 --eval-prompt-data a {tmp}/prompts.jsonl"
    row = "{tmp}/prompts.jsonl:1: there is no field 'q' (%s); the row has prompt, label"
    assert_violation(tmp_path, f"{pairs} --eval-input-key q", row % "--eval-input-key")
    assert_violation(tmp_path, f"{pairs} --eval-label-key q", row % "--eval-label-key")
    assert_violation(tmp_path, f"{pairs} --label-key q", row % "--label-key")
    assert_violation(tmp_path, eval_file(tmp_path, "input_key: q"), row % "input_key, {tmp}/eval.yaml:4")


def test_something_must_say_how_responses_are_graded(tmp_path):
    words = command_line(tmp_path)[:-2]
    with pytest.raises(UserError, match="prompts.jsonl: nothing says how responses are graded: .*; give --rm-type"):
        parse_args(argv=words)
    parse_args(argv=[*words, "--custom-rm-path", "tests.reward"])
    parse_args(argv=[*words, "--rollout-function-path", "tests.rollout"])
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1", "label": "2", "metadata": {"rm_type": "math"}}\n')
    parse_args(argv=words)


def test_an_evaluation_set_may_say_it_alone(tmp_path):
    words = [*command_line(tmp_path)[:-2], "--rollout-function-path", "tests.rollout"]
    words += ["--eval-function-path", "slime.rollout.sglang_rollout.generate_rollout"]
    with pytest.raises(UserError, match=r"eval.yaml:3: path .*: nothing says how responses are graded"):
        parse_args(argv=[*words, *eval_file(tmp_path).split()])
    parse_args(argv=[*words, *eval_file(tmp_path, "rm_type: math").split()])


@pytest.mark.parametrize(
    "replacement, message",
    [
        ([], "give --num-rollout (rollout steps) or --num-epoch (passes over the data)"),
        (
            ["--num-epoch", "2", "--disable-rollout-global-dataset"],
            "--num-epoch 2 needs the built-in data set; give --num-rollout with --disable-rollout-global-dataset",
        ),
        (
            ["--num-epoch", "2", "--load-debug-rollout-data", "x.pt"],
            "--load-debug-rollout-data needs --num-rollout: the number of rollouts does not follow from a dump",
        ),
    ],
)
def test_the_number_of_rollouts(tmp_path, replacement, message):
    words = command_line(tmp_path)
    at = words.index("--num-rollout")
    words[at : at + 2] = replacement
    with pytest.raises(UserError) as error:
        parse_args(argv=words)
    assert message in str(error.value).splitlines()


def test_an_epoch_beside_a_number_of_rollouts_is_ignored_and_said(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    parse(tmp_path, "--num-epoch", "2")
    assert "--num-epoch 2 is ignored: --num-rollout 4 is given" in caplog.text


@pytest.mark.parametrize(
    "words, is_told",
    [
        ("", True),
        ("--eval-interval 2 --eval-prompt-data a {tmp}/prompts.jsonl", False),
        ("--eval-interval 2 --eval-prompt-data a {tmp}/prompts.jsonl --debug-train-only", True),
    ],
)
def test_a_run_that_does_nothing_says_so(tmp_path, caplog, words, is_told):
    parse(tmp_path, "--num-rollout", "0", *words.format(tmp=tmp_path).split())
    assert ("--num-rollout 0 trains nothing" in caplog.text) == is_told


def test_own_rollout_functions_may_return_any_number(tmp_path):
    args = parse(tmp_path, "--rollout-function-path", "tests.support.rollout", "--global-batch-size", "3")
    assert (args.num_steps_per_rollout, args.global_batch_size) == (2, 3)


DYNAMIC = "--actor-num-gpus-per-node 4 --use-dynamic-batch-size --max-tokens-per-gpu 1024"
TWO_ROLLOUTS = f"{DYNAMIC} --rollout-batch-size 2 --n-samples-per-prompt 1"
NO_SAMPLE = "is below 4 data-parallel ranks, and each of them needs a sample; give 4, or fewer ranks"
VIRTUAL = "--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"


def test_every_rank_needs_a_sample_of_a_step(tmp_path):
    assert violations(tmp_path, TWO_ROLLOUTS) == [f"--global-batch-size 2 {NO_SAMPLE}"]
    parse(tmp_path, *TWO_ROLLOUTS.split(), "--debug-rollout-only")
    parse(tmp_path, *DYNAMIC.split(), "--rollout-batch-size", "2", "--n-samples-per-prompt", "2")


@pytest.mark.parametrize(
    ("words", "is_refused"),
    [
        ("", True),
        # Nobody reads it.
        ("--num-rollout 0", False),
        # Where the run resumes, another dump may be the first that is read.
        ("--load {tmp}/model", False),
    ],
)
def test_the_first_dump_has_to_be_one_where_it_is_read(tmp_path, words, is_refused):
    command = f"--load-debug-rollout-data {{tmp}}/prompts.jsonl {words}".format(tmp=tmp_path).split()
    with pytest.raises(UserError, match="is no readable rollout dump") if is_refused else contextlib.nullcontext():
        parse(tmp_path, *command)


@pytest.mark.parametrize(
    "words",
    [
        "--custom-generate-function-path tests.generate",
        "--rollout-function-path tests.rollout",
        "--data-source-path tests.Source",
        "--custom-convert-samples-to-train-data-path tests.convert",
        "--load-debug-rollout-data {tmp}/prompts.jsonl",
    ],
)
def test_where_rollouts_may_fan_out_too_few_of_them_are_warned_about(tmp_path, caplog, words):
    # Where a dump has its tensors.
    (tmp_path / "prompts.jsonl.safetensors").touch()
    args = parse(tmp_path, *TWO_ROLLOUTS.split(), *words.format(tmp=tmp_path).split())
    assert args.global_batch_size == 2
    assert f"--global-batch-size 2 {NO_SAMPLE}. Only rollouts that fan out" in caplog.text


UNEVEN = (
    "--global-batch-size 6 is no multiple of 4 data-parallel ranks: a step whose samples make more than 4 micro-batches could "
    "not be dealt to them; give 4 or 8, or a larger --max-tokens-per-gpu"
)
SIX_ROLLOUTS = f"{DYNAMIC} --rollout-batch-size 6 --n-samples-per-prompt 1"


@pytest.mark.parametrize(
    "words, is_refused",
    [
        # Two of these, and their prompts, do not fit into one micro-batch: a step has 6 of them. Of 511 tokens it has 3.
        ("--rollout-max-response-len 512", True),
        ("--rollout-max-response-len 511", False),
        ("--rollout-max-response-len 512 --context-parallel-size 2", False),
        ("--rollout-max-response-len 256 --rollout-max-prompt-len 256", False),
        ("--rollout-max-response-len 256 --rollout-max-prompt-len 257", True),
        # Parts of equal FLOPs are split again where they have too many tokens.
        ("--rollout-max-response-len 511 --balance-by-flops", True),
        ("--rollout-max-response-len 100 --balance-by-flops", False),
        ("--rollout-max-response-len 512 --num-rollout 0", False),
        ("--rollout-max-response-len 512 --global-batch-size 12 --rollout-batch-size 12", False),
    ],
)
def test_a_step_that_its_ranks_may_not_divide_is_refused_where_samples_may_be_so_long(
    tmp_path, caplog, words, is_refused
):
    words = f"{SIX_ROLLOUTS} {words}"
    if is_refused:
        assert violations(tmp_path, words) == [UNEVEN]
    else:
        parse(tmp_path, *words.split())
        assert "Such a step" not in caplog.text


@pytest.mark.parametrize("words", ["", "--rollout-max-response-len 512 --custom-generate-function-path tests.generate"])
def test_it_is_warned_about_where_lengths_or_samples_are_not_known(tmp_path, caplog, words):
    parse(tmp_path, *SIX_ROLLOUTS.split(), *words.split())
    assert f"{UNEVEN}. Such a step ends the run" in caplog.text


@pytest.mark.parametrize(
    "batch, words, message",
    [
        (2, "", "--global-batch-size 2 is no multiple of --micro-batch-size 1 x 2 data-parallel ranks x 2 micro-batches that a "
         "virtual pipeline takes at a time; change one"),
        (6, "--microbatch-group-size-per-virtual-pipeline-stage 3", None),
        (6, "", "--global-batch-size 6 is no multiple of --micro-batch-size 1 x 2 data-parallel ranks x 2 micro-batches that a "
         "virtual pipeline takes at a time; change one, or give --use-dynamic-batch-size"),
        (2, "--use-dynamic-batch-size --max-tokens-per-gpu 1024", "--global-batch-size 2 is below 2 data-parallel ranks x 2 "
         "micro-batches that a virtual pipeline takes at a time, and each of them needs a sample; give 4, or fewer ranks"),
        (4, "--use-dynamic-batch-size --max-tokens-per-gpu 1024", None),
    ],
)  # fmt: skip
def test_a_virtual_pipeline_takes_micro_batches_in_groups(tmp_path, batch, words, message):
    sizes = f"--actor-num-gpus-per-node 4 --rollout-batch-size {batch} --n-samples-per-prompt 1"
    # The model of these files has other layers, which is said as well.
    lines = [line for line in violations(tmp_path, f"{sizes} {VIRTUAL} {words}") if "--global-batch-size" in line]
    assert lines == ([message] if message else [])


def test_the_critic_is_asked_for_the_micro_batches_of_its_own_layout(tmp_path):
    config = tmp_path / "roles.yaml"
    words = (
        "--actor-num-gpus-per-node 4 --tensor-model-parallel-size 2 --advantage-estimator ppo --megatron-config-path "
    )
    words, sizes = f"{words}{config}", "--rollout-batch-size 2 --n-samples-per-prompt 1"
    config.write_text("megatron: [{role: critic, overrides: {tensor_model_parallel_size: 1}}]")
    assert violations(tmp_path, f"{words} {sizes}") == [
        f"{config}:1: role critic: --global-batch-size 2 is no multiple of --micro-batch-size 1 x 4 data-parallel ranks; "
        "change one"
    ]
    lines = violations(tmp_path, f"{words} {sizes} --use-dynamic-batch-size --max-tokens-per-gpu 1024")
    assert lines == [f"{config}:1: role critic: --global-batch-size 2 {NO_SAMPLE}"]
    config.write_text("megatron: [{role: critic, overrides: {micro_batch_size: 3}}]")
    assert violations(tmp_path, words) == [
        f"{config}:1: role critic: --global-batch-size 8 is no multiple of --micro-batch-size 3 x 2 data-parallel ranks; "
        "change one, or give --use-dynamic-batch-size"
    ]
    config.write_text("megatron: [{role: critic, overrides: {tensor_model_parallel_size: 0}}]")
    (line,) = violations(tmp_path, f"{words} --save {tmp_path}/run")
    assert "tensor-model-parallel-size 0" in line


@pytest.mark.parametrize(
    "limits, longest",
    [("--rollout-max-context-len 300", 300), ("--rollout-max-prompt-len 100 --rollout-max-response-len 200", 300)],
)
def test_a_sample_above_the_token_budget_is_warned_about(tmp_path, caplog, limits, longest):
    words = [*limits.split(), "--use-dynamic-batch-size", "--max-tokens-per-gpu"]
    parse(tmp_path, *words, "300")
    assert "longest allowed sample" not in caplog.text
    parse(tmp_path, *words, "299")
    assert f"the longest allowed sample has {longest} tokens, more than --max-tokens-per-gpu 299 x" in caplog.text


def test_context_parallel_ranks_share_the_longest_sample(tmp_path, caplog):
    words = "--rollout-max-context-len 300 --use-dynamic-batch-size --max-tokens-per-gpu 150 --dry-run"
    parse(tmp_path, *words.split(), "--context-parallel-size", "2", "--actor-num-gpus-per-node", "2")
    assert "longest allowed sample" not in caplog.text


def test_a_response_alone_may_be_above_the_token_budget(tmp_path, caplog):
    parse(tmp_path, *["--use-dynamic-batch-size", "--max-tokens-per-gpu", "100", "--rollout-max-response-len", "400"])
    assert "the longest allowed sample has 400 tokens, more than --max-tokens-per-gpu 100 x" in caplog.text


def test_where_no_flag_limits_a_sample_the_model_does(tmp_path, caplog):
    parse(tmp_path, "--use-dynamic-batch-size", "--max-tokens-per-gpu", "8")
    assert "the longest allowed sample has 512 tokens, more than --max-tokens-per-gpu 8 x" in caplog.text
    caplog.clear()
    parse(tmp_path, *["--use-dynamic-batch-size", "--max-tokens-per-gpu", "300", "--sglang-context-length", "300"])
    assert "longest allowed sample" not in caplog.text


def test_images_are_generated_about(tmp_path):
    args = parse(tmp_path, "--multimodal-keys", '{"image": "images"}', "--debug-rollout-only")
    assert args.multimodal_keys == {"image": "images"}


def test_images_are_trained_on_by_a_model_that_takes_them(tmp_path):
    words = ["--multimodal-keys", '{"image": "images"}']
    (line,) = violations(tmp_path, words)
    assert f"--custom-model-provider-path {PROVIDER}," in line
    assert parse(tmp_path, *words, "--custom-model-provider-path", PROVIDER).multimodal_keys == {"image": "images"}


def test_a_set_of_evaluation_may_have_images_beside_training_on_texts(tmp_path):
    command_line(tmp_path)
    entry = f"{{name: a, path: {tmp_path}/prompts.jsonl, multimodal_keys: {{MEDIUM: x}}}}"
    (tmp_path / "eval.yaml").write_text(f"datasets:\n  - {entry.replace('MEDIUM', 'image')}\n")
    words = f"--eval-interval 2 --eval-config {tmp_path}/eval.yaml"
    (dataset,) = parse(tmp_path, *words.split()).eval_datasets
    assert dataset.multimodal_keys == {"image": "x"}
    (tmp_path / "eval.yaml").write_text(f"datasets:\n  - {entry.replace('MEDIUM', 'audio')}\n")
    (line,) = violations(tmp_path, words)
    assert line.startswith(f"{tmp_path}/eval.yaml:2: ") and "rows with audio are not built" in line
