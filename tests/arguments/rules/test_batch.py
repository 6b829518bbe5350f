import logging

import pytest

from slime.arguments import parse_args
from slime.utils.errors import UserError
from tests.support.args import command_line, parse
from tests.support.rules import assert_violation

PRODUCT = "--rollout-batch-size 4 x --n-samples-per-prompt 2 = 8 rollouts per step"


@pytest.mark.parametrize(
    "words, message",
    [
        ("--global-batch-size 3", f"{PRODUCT} is no multiple of --global-batch-size 3; 1, 2, 4, 8 would do"),
        ("--num-steps-per-rollout 3", f"{PRODUCT} cannot be split into --num-steps-per-rollout 3; 1, 2, 4, 8 would do"),
        (
            "--num-steps-per-rollout 2 --global-batch-size 8",
            f"{PRODUCT}, but --global-batch-size 8 x --num-steps-per-rollout 2 = 16; drop one of them, or give "
            "--global-batch-size 4",
        ),
        (
            "--over-sampling-batch-size 2",
            "--over-sampling-batch-size 2 must be at least --rollout-batch-size 4",
        ),
        (
            "--micro-batch-size 3",
            "--global-batch-size 8 is no multiple of --micro-batch-size 3 x 1 data-parallel ranks; change one, or give "
            "--use-dynamic-batch-size",
        ),
        (
            "--use-dynamic-batch-size",
            "--use-dynamic-batch-size needs --max-tokens-per-gpu, the token budget of a micro-batch (8192 is usual)",
        ),
        ("--balance-by-flops", "--balance-by-flops needs --use-dynamic-batch-size"),
        (
            "--tensor-model-parallel-size 2",
            "--tensor-model-parallel-size 2 must divide the number of training ranks, 1 (--actor-num-nodes 1 x "
            "--actor-num-gpus-per-node 1); --actor-num-gpus-per-node 2 would do, or smaller sizes",
        ),
    ],
)  # fmt: skip
def test_rule(tmp_path, words, message):
    assert_violation(tmp_path, words, message)


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
            "--load-debug-rollout-data needs --num-rollout: a dump does not tell how many there are",
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


def test_own_rollout_functions_may_return_any_number(tmp_path):
    args = parse(tmp_path, "--rollout-function-path", "tests.support.rollout", "--global-batch-size", "3")
    assert (args.num_steps_per_rollout, args.global_batch_size) == (2, 3)


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
