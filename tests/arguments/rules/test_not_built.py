import pytest

from slime.arguments import parse_args
from tests.support.args import command_line, parse
from tests.support.rules import assert_violation

CASES = [
    (
        "--rollout-top-p 0.9",
        "--rollout-top-p 0.9: the trainer's log-probs are those of the full distribution, and replay of the kept set is not "
        "built yet; give 1.0 (--eval-top-p is free)",
    ),
    (
        "--rollout-top-k 5",
        "--rollout-top-k 5: the trainer's log-probs are those of the full distribution, and replay of the kept set is not "
        "built yet; give -1 (--eval-top-k is free)",
    ),
    (
        "--rollout-num-gpus 0",
        "--rollout-num-gpus 0: give the number of GPUs for the engines, or --debug-train-only; a run of routers alone is not "
        "built yet",
    ),
    (
        "--rollout-num-gpus 4 --rollout-num-gpus-per-engine 4 --num-gpus-per-node 2",
        "--rollout-num-gpus-per-engine 4 is above --num-gpus-per-node 2: engines over several nodes are not built yet; an "
        "engine must fit on one node",
    ),
    (
        "--actor-num-gpus-per-node 2 --global-batch-size 8 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2 "
        "--num-gpus-per-node 3",
        "--rollout-num-gpus-per-engine 2: an engine would have the GPUs 2 to 3 of the run, which lie on two nodes "
        "(--num-gpus-per-node 3, training takes the first 2): engines over several nodes are not built yet; give "
        "--rollout-num-gpus-per-engine 1",
    ),
    (
        "--debug-rollout-only --rollout-num-gpus 8 --rollout-num-gpus-per-engine 4 --num-gpus-per-node 6",
        "--rollout-num-gpus-per-engine 4: an engine would have the GPUs 4 to 7 of the run, which lie on two nodes "
        "(--num-gpus-per-node 6): engines over several nodes are not built yet; give --rollout-num-gpus-per-engine 1 or 2",
    ),
]


@pytest.mark.parametrize("words, message", CASES, ids=[words for words, _ in CASES])
def test_a_run_is_refused_and_a_dry_run_notes_it(tmp_path, words, message):
    assert_violation(tmp_path, words, message)
    assert message in parse(tmp_path, *words.split(), "--dry-run").plan_notes


def test_sampling_is_free_where_nothing_is_trained(tmp_path):
    assert parse(tmp_path, "--rollout-top-p", "0.9", "--debug-rollout-only").rollout_top_p == 0.9


def test_the_asynchronous_loop(tmp_path):
    message = "the asynchronous loop is not built yet; run train.py (train_async.py --dry-run plans with it)"
    assert_violation(tmp_path, "", message, asynchronous=True)
    assert message in parse_args(argv=[*command_line(tmp_path), "--dry-run"], asynchronous=True).plan_notes


def test_layers_that_are_not_built(tmp_path):
    words = [word for word in command_line(tmp_path)[2:] if word != "--model-args-from-hf"]
    shape = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --vocab-size 300 --dry-run"
    args = parse_args(argv=[*words, *shape.split(), "--debug-train-only", "--random-init"])
    assert any(
        note.startswith("only models with gated SiLU, RMSNorm and no linear biases are built")
        for note in args.plan_notes
    )
