"""`--true-on-policy-mode` with a real engine: a run in which both sides agree goes on, and one that spoils a log-prob stops."""

from __future__ import annotations

import re

import pytest

from tests.support.processes.train_process import TrainProcess

pytestmark = pytest.mark.slow

ROLLOUTS = range(2)
# Without a GPU engine and trainer round in ways of their own: docs/en/advanced/reproducibility.md.
ROUNDING = "1e-4"


def flags_of(task):
    return [
        *task.rollout_flags, *task.train_flags, "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1",
        "--num-rollout", len(ROLLOUTS), "--true-on-policy-mode", "--ci-train-rollout-logprob-abs-diff-threshold", ROUNDING,
    ]  # fmt: skip


def test_a_run_whose_sides_agree_tells_by_how_much(task, tmp_path):
    process = TrainProcess(flags_of(task), tmp_path).finish(500)
    means = process.scalars("train/train_rollout_logprob_abs_diff")
    largest = process.scalars("train/mismatch_max_abs")
    assert sorted(largest) == sorted(means) == list(ROLLOUTS)
    assert all(0 < means[rollout] <= largest[rollout] <= 1e-5 for rollout in ROLLOUTS), (means, largest)


def test_a_log_prob_that_a_function_spoils_stops_the_run_before_the_update(task, tmp_path):
    hook = ["--rollout-sample-hook-path", "tests.support.processes.plug_ins.spoiled_log_prob"]
    dumps = ["--save-debug-train-data", tmp_path / "train" / "{rollout_id}.pt"]
    with TrainProcess([*flags_of(task), *hook, *dumps], tmp_path / "run") as process:
        assert process.wait(500) == 1
        process.assert_no_process_left()
    assert list(process.scalars("train/loss")) == [0], "the second rollout trains nothing"
    assert re.search(
        r"rollout 1, step 0: log-probs of engine and trainer differ by 0\.2(5|4999)\d* at "
        r"response token 0 of sample 21 \(engine -\S+, trainer -\S+\), "
        r"more than --ci-train-rollout-logprob-abs-diff-threshold 0\.0001 allows "
        r"\(--true-on-policy-mode\); 1 of \d+ trained tokens, in 1 of 16 samples, differ by more\. Likely cause: "
        r"15 other samples agree, .* is "
        r"--rollout-sample-hook-path tests\.support\.processes\.plug_ins\.spoiled_log_prob\. ",
        process.output(),
    ), process.output()[-4000:]
    assert sorted(path.name for path in (tmp_path / "train").iterdir()) == ["0.pt", "1.pt"]
