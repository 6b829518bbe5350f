"""What a run that goes on, or begins behind its end, has left to do."""

import pytest

from slime.plan.before_start import nothing_left
from tests.support.models.args import parse


@pytest.mark.parametrize(("pointer", "words", "left"), [
    ("3", "", None), ("4", "", 5), ("4", "--num-rollout 6", None), ("4", "--num-rollout 0", None), ("4", "--ckpt-step 1", None),
    ("4", "--finetune", None), ("4", "--start-rollout-id 2", None),
])  # fmt: skip
def test_a_finished_run_has_nothing_left(tmp_path, pointer, words, left):
    checkpoint = tmp_path / "checkpoint"
    (checkpoint / "iter_0000001").mkdir(parents=True)
    (checkpoint / "latest_checkpointed_iteration.txt").write_text(pointer)
    args = parse(tmp_path, "--num-rollout", "5", "--load", str(checkpoint), *words.split())
    if left is None:
        assert nothing_left(args) is None
    else:
        assert nothing_left(args) == (
            f"nothing left to do: {left} rollouts are done in --load {checkpoint}, --num-rollout is 5; a larger --num-rollout "
            "goes on from there"
        )


@pytest.mark.parametrize(("evaluated", "words", "is_left"), [
    ("4", "--eval-interval 2", True), ("5", "--eval-interval 2", False), ("4", "", False),
    ("4", "--eval-interval 2 --num-rollout 4", False),
])  # fmt: skip
def test_an_evaluation_that_was_cut_off_is_left(tmp_path, evaluated, words, is_left):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("4")
    (checkpoint / "latest_evaluation.txt").write_text(evaluated)
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "a", "label": "1"}\n')
    asked = ["--num-rollout", "5", "--load", str(checkpoint), "--eval-prompt-data", "held_out", str(held_out)]
    args = parse(tmp_path, *asked, *words.split())
    assert (nothing_left(args) is None) is is_left


def test_a_start_behind_the_end_is_said(tmp_path):
    line = "nothing left to do: --start-rollout-id 10 is not below --num-rollout 4"
    assert nothing_left(parse(tmp_path, "--start-rollout-id", "10")) == line
