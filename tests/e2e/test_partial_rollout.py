"""Partial rollouts with over-sampling, a dynamic filter and fan-out at a time, on a real engine; killed, and started again."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from slime.rollout.base_types import leaves
from slime.rollout.data_source_files import groups_from_plain, read_state, state_directory
from slime.utils.types import Sample
from tests.support.models.tiny_task import PLUG_INS, ROLLOUT_BATCH_SIZE, TinyTask
from tests.support.processes.train_process import TrainProcess

ROLLOUTS = range(6)
KILLED_BEHIND = 2

pytestmark = pytest.mark.slow

VARIANTS = {
    "one by one": ["--custom-rm-path", "tests.support.processes.plug_ins.graded_reward"],
    # And an evaluation one of whose prompts nobody answers.
    "as a group": [
        "--custom-rm-path",
        "tests.support.processes.plug_ins.graded_group",
        "--group-rm",
        "--eval-interval",
        "6",
    ],
}


@dataclass(frozen=True)
class Survived:
    """What the second process left, and the data state that it began with."""

    process: TrainProcess
    directory: Path
    begun_with: dict
    first_rollout: int

    def samples(self, rollout_id: int) -> list[Sample]:
        dump = torch.load(self.directory / f"{rollout_id}.pt", weights_only=True)
        return [Sample.from_dict({**entry, "tokens": entry["tokens"].tolist()}) for entry in dump["samples"]]

    def last_state(self) -> dict:
        return read_state(state_directory(self.directory / "checkpoints", ROLLOUTS[-1]))


@pytest.fixture(scope="module", params=VARIANTS)
def survived(request, task: TinyTask, tmp_path_factory) -> Survived:
    directory = tmp_path_factory.mktemp("partial")
    (directory / "eval.yaml").write_text(
        f"eval:\n  datasets:\n    - {{name: held_out, path: {task.evaluation}, eval_early_stop_remaining: 1, "
        "eval_early_stop_idle_timeout: 3}\n"
    )
    checkpoints = directory / "checkpoints"
    flags = [
        *task.loop_flags, "--rollout-num-gpus", "1", "--num-rollout", len(ROLLOUTS), "--save", checkpoints, "--load",
        checkpoints, "--save-interval", "1", "--keep-last", "9", "--save-debug-rollout-data", directory / "{rollout_id}.pt",
        "--partial-rollout", "--mask-offpolicy-in-partial-rollout", "--keep-surplus-groups",
        "--over-sampling-batch-size", 2 * ROLLOUT_BATCH_SIZE,
        "--dynamic-sampling-filter-path", f"{PLUG_INS}:not_every_fifth", "--rollout-max-response-len", "100",
        "--custom-generate-function-path", f"{PLUG_INS}:branching_generate", "--max-tokens-per-gpu", "512",
        *VARIANTS[request.param],
    ]  # fmt: skip
    if "--eval-interval" in flags:
        flags += ["--eval-config", directory / "eval.yaml"]
    with TrainProcess(flags, directory) as process:
        process.wait_for_line(rf"rollout {KILLED_BEHIND} \(", 400)
        process.send_signal_to_driver(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL, process.output()[-4000:]
        process.assert_no_process_left(60)
    saved = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    begun_with = read_state(state_directory(checkpoints, saved))
    return Survived(TrainProcess(flags, directory).finish(500), directory, begun_with, saved + 1)


def test_every_step_has_its_groups_and_executions_that_fanned_out_are_one(survived):
    for rollout_id in ROLLOUTS:
        executions = {}
        for sample in survived.samples(rollout_id):
            assert sample.group_index % 5 != 0, "the filter drops these"
            executions.setdefault((sample.group_index, sample.index), []).append(sample)
        assert len(executions) == 4 * ROLLOUT_BATCH_SIZE
        for (_, index), own in executions.items():
            assert len(own) == (2 if index % 4 == 3 else 1)
            assert len(own) == 1 or own[0].rollout_id == own[1].rollout_id is not None


def test_of_a_continued_answer_what_the_last_weights_wrote_is_trained_and_nothing_else(survived):
    continued = finished_before = 0
    for rollout_id in ROLLOUTS:
        version = str(rollout_id + 1)
        for sample in survived.samples(rollout_id):
            mask, spans = list(sample.loss_mask), sample.weight_version_spans
            assert len(mask) == sample.response_length == spans[-1][2] and spans[0][1] == 0
            if "start_rollout_id" not in sample.metadata:
                # Of this step, or finished in an earlier one beyond what that took.
                assert len(spans) == 1 and int(spans[0][0]) <= int(version) and all(mask)
                continue
            assert sample.metadata["start_rollout_id"] < rollout_id
            own = spans[-1][1] if spans[-1][0] == version else sample.response_length
            assert mask == [0] * own + [1] * (sample.response_length - own)
            continued += len(spans) > 1
            finished_before += own == sample.response_length
    assert continued > 4, (continued, finished_before)


def test_no_prompt_is_lost_and_none_comes_twice(survived):
    trained = [g for r in ROLLOUTS for g in sorted({sample.group_index for sample in survived.samples(r)})]
    assert len(trained) == len(set(trained)) == len(ROLLOUTS) * ROLLOUT_BATCH_SIZE
    state = survived.last_state()
    waiting = [leaves(group)[0].group_index for group in groups_from_plain(state["buffer"])]
    assert len(waiting) == len(set(waiting)) and not set(waiting) & set(trained)
    gone = set(range(state["sample_group_index"])) - set(waiting) - set(trained)
    assert gone and all(number % 5 == 0 for number in gone), "dropped by the filter, which is all that may be missing"


def test_the_buffer_and_partial_work_survive_the_kill(survived):
    partial = {
        sample.index: sample
        for sample in leaves(groups_from_plain(survived.begun_with["buffer"]))
        if sample.response_length and sample.group_index % 5 != 0
    }
    assert partial, "a long answer was under way"
    trained = [s for r in ROLLOUTS if r >= survived.first_rollout for s in survived.samples(r)]
    later = [*trained, *leaves(groups_from_plain(survived.last_state()["buffer"]))]
    found = [sample for sample in later if sample.index in partial]
    assert {sample.index for sample in found} == set(partial)
    for sample in found:
        before = partial[sample.index].tokens
        assert sample.tokens[: len(before)] == before
        assert sample.rollout_log_probs[: partial[sample.index].response_length] == pytest.approx(
            partial[sample.index].rollout_log_probs
        )


def test_an_evaluation_ends_without_the_prompt_that_nobody_answers(survived):
    left = survived.process.scalars("eval/held_out-unfinished_prompts")
    # That at the end of the first epoch, which the kill cut off, is made up for.
    assert left in ({}, {3: 1.0, 6: 1.0}, {0: 1.0, 3: 1.0, 6: 1.0}), left
    assert bool(left) == ("--eval-config" in survived.process.flags)
