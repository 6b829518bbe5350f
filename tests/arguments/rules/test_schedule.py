"""Schedules of learning rate and weight decay: what Megatron-Core's scheduler would only assert."""

import pytest

from tests.support.args import parse
from tests.support.rules import violations


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lr-warmup-fraction 0.1 --lr-warmup-iters 5",
         "--lr-warmup-fraction 0.1 and --lr-warmup-iters 5 exclude each other; drop one"),
        ("--lr-warmup-fraction 1.5", "--lr-warmup-fraction 1.5: it must be at least 0 and below 1, 0.1 for example"),
        ("--min-lr 1e-3 --lr 1e-4", "--min-lr 0.001 is above --lr 0.0001; give at most 0.0001"),
        ("--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler", "contradict each other; drop one"),
        ("--lr-decay-style WSD", "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
        ("--start-weight-decay 0.1", "--start-weight-decay and --end-weight-decay belong together"),
        ("--start-weight-decay 0.2 --end-weight-decay 0.1",
         "--start-weight-decay 0.2 and --end-weight-decay 0.1: weight decay can only grow; give --end-weight-decay 0.2"),
        ("--start-weight-decay 0.1 --end-weight-decay 0.2",
         "--start-weight-decay 0.1 and --end-weight-decay 0.2 need --weight-decay-incr-style linear or cosine, not constant"),
        ("--lr-warmup-init 1e-3", "--lr-warmup-init 0.001 is above --lr 1e-06; give at most 1e-06 (0 is usual)"),
        ("--lr-warmup-iters 4",
         "--lr-warmup-iters 4 must be below the 4 optimizer steps of the schedule (those of --num-rollout 4); give at most 3, "
         "or --lr-decay-iters above 4"),
        ("--lr-warmup-iters 9 --lr-decay-iters 9",
         "--lr-warmup-iters 9 must be below the 9 optimizer steps of the schedule (--lr-decay-iters); give at most 8, or "
         "--lr-decay-iters above 9"),
        ("--lr-warmup-iters -3", "--lr-warmup-iters -3: it must be at least 0"),
        ("--lr-decay-iters 0", "--lr-decay-iters 0: it must be at least 1"),
    ],
)  # fmt: skip
def test_a_broken_rule_says_what_would_work(tmp_path, words, message):
    assert message in "\n".join(violations(tmp_path, words))


@pytest.mark.parametrize(
    "words",
    [
        "--lr-warmup-iters 3",
        "--lr-warmup-iters 4 --lr-decay-iters 5",
        "--start-weight-decay 0.1 --end-weight-decay 0.1",
        "--start-weight-decay 0.1 --end-weight-decay 0.2 --weight-decay-incr-style linear",
        "--lr-warmup-iters 100 --debug-rollout-only",
    ],
)
def test_what_the_scheduler_can_do(tmp_path, words):
    parse(tmp_path, *words.split())
