"""The asynchronous loop on real parts: two rollouts ahead of the training rank, weights after every second one."""

from __future__ import annotations

import dataclasses
import re
import signal
from pathlib import Path

import pytest
import torch

from tests.support.models.tiny_task import PLUG_INS, ROLLOUT_BATCH_SIZE, SAMPLES_PER_PROMPT, TinyTask
from tests.support.oracles.drawn_groups import assert_in_turn, assert_none_is_lost
from tests.support.processes.train_process import TrainProcess
from tests.support.processes.waiting import wait_until

ROLLOUTS = range(6)
BUFFER, INTERVAL = 2, 2
LOG_PROB_GATE = 1e-5

pytestmark = pytest.mark.slow


@dataclasses.dataclass(frozen=True)
class AsyncRun:
    process: TrainProcess
    checkpoints: Path
    dumps: Path

    def samples(self, rollout_id: int) -> list[dict]:
        return torch.load(self.dumps / f"{rollout_id}.pt", weights_only=True)["samples"]


def run_loop(task: TinyTask, directory: Path, *more: object, env: dict[str, str] | None = None) -> AsyncRun:
    checkpoints, dumps = directory / "checkpoints", directory / "dumps"
    flags = [
        *task.loop_flags, "--num-rollout", len(ROLLOUTS), "--async-buffer-size", BUFFER, "--update-weights-interval", INTERVAL,
        "--custom-generate-function-path", f"{PLUG_INS}:marked_generate",
        "--save", checkpoints, "--load", checkpoints, "--save-interval", "2",
        "--eval-interval", "3", "--eval-prompt-data", "held_out", task.evaluation,
        "--save-debug-rollout-data", dumps / "{rollout_id}.pt", *more,
    ]  # fmt: skip
    return AsyncRun(TrainProcess(flags, directory, env, program="train_async.py"), checkpoints, dumps)


@pytest.fixture(scope="module", params=["megatron", "fsdp"])
def trainer(request):
    return ["--train-backend", "fsdp", "--actor-num-gpus-per-node", "2"] if request.param == "fsdp" else []


@pytest.fixture(scope="module")
def finished(task, tmp_path_factory, trainer):
    run = run_loop(task, tmp_path_factory.mktemp("whole"), *trainer, "--check-weight-update-equal")
    run.process.finish()
    return run


@pytest.fixture(scope="module")
def resumed(task, tmp_path_factory, trainer):
    """Killed while rollout 4 generates, beside whatever is trained; then the same command."""
    directory = tmp_path_factory.mktemp("killed")
    killed = run_loop(task, directory, *trainer, env={"E2E_HOLD_ROLLOUT": "4"})
    with killed.process as process:
        process.wait_for_line("holding rollout 4", 300)
        process.wait_for_line(r"rollout 2 \(3/6\)", 60)
        process.send_signal_to_driver(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
        process.assert_no_process_left(60)
    assert (killed.checkpoints / "latest_checkpointed_iteration.txt").read_text().strip() in ("2", "3")
    resumed = run_loop(task, directory, *trainer)
    resumed.process.finish(300)
    return resumed


def versions(run: AsyncRun, rollout_id: int) -> set[str]:
    return {span[0] for sample in run.samples(rollout_id) for span in sample["weight_version_spans"]}


def test_every_rollout_is_made_by_one_version_and_is_no_older_than_the_buffer_allows(finished):
    for rollout_id in ROLLOUTS:
        assert len(finished.samples(rollout_id)) == ROLLOUT_BATCH_SIZE * SAMPLES_PER_PROMPT
        (version,) = versions(finished, rollout_id)
        # Version 1 is the push before the first rollout; one more follows every second one that is trained.
        trained_with = 1 + rollout_id // INTERVAL
        assert trained_with - 1 <= int(version) <= trained_with
    assert versions(finished, 0) == versions(finished, 1) == {"1"}


def test_engines_and_trainer_compute_alike_where_the_rollout_is_of_the_current_weights(finished):
    differences = finished.process.scalars("train/train_rollout_logprob_abs_diff")
    assert sorted(differences) == list(ROLLOUTS)
    for rollout_id in ROLLOUTS:
        (version,) = versions(finished, rollout_id)
        is_current = rollout_id % INTERVAL == 0 and int(version) == 1 + rollout_id // INTERVAL
        assert (differences[rollout_id] <= LOG_PROB_GATE) == is_current


def test_metrics_evaluations_and_checkpoints_are_those_of_the_other_loop(finished):
    for tag in ("rollout/raw_reward", "train/loss", "perf/rollout_time", "perf/train_time", "perf/step_time"):
        assert sorted(finished.process.scalars(tag)) == list(ROLLOUTS), tag
    assert sorted(finished.process.scalars("perf/update_weights_time")) == [1, 3, 5]
    assert sorted(finished.process.scalars("eval/held_out")) == [0, 3, 6]
    assert (finished.checkpoints / "latest_checkpointed_iteration.txt").read_text().strip() == "5"
    output = finished.process.output()
    assert re.search(r"weight check: \d+ tensors equal on 2 engines", output)
    for rollout_id in ROLLOUTS:
        assert len(re.findall(rf"rollout {rollout_id} \({rollout_id + 1}/6\) \|", output)) == 1


def test_prompts_are_those_of_the_data_in_its_order(finished):
    assert_in_turn([finished.samples(rollout_id) for rollout_id in ROLLOUTS])
    numbers = [s["metadata"]["number"] for r in ROLLOUTS for s in finished.samples(r)[::SAMPLES_PER_PROMPT]]
    assert sorted(numbers[:14]) == list(range(14)) and len(set(numbers[14:])) == 10


def test_a_killed_run_goes_on_with_the_same_prompts_and_steps(finished, resumed):
    for rollout_id in ROLLOUTS:
        indices = [[s["index"] for s in run.samples(rollout_id)] for run in (finished, resumed)]
        assert indices[0] == indices[1]
        prompts = [[s["prompt"] for s in run.samples(rollout_id)] for run in (finished, resumed)]
        assert prompts[0] == prompts[1]
    for tag in ("rollout/raw_reward", "train/loss"):
        assert sorted(resumed.process.scalars(tag)) == list(ROLLOUTS), tag


def test_ctrl_c_ends_everything(task, tmp_path):
    run = run_loop(task, tmp_path, env={"E2E_HOLD_ROLLOUT": "3"})
    with run.process as process:
        process.wait_for_line("holding rollout 3", 300)
        # Rollout 1 is trained beside it, and its push waits for it.
        pointer = run.checkpoints / "latest_checkpointed_iteration.txt"
        wait_until(lambda: pointer.is_file() and pointer.read_text().strip() == "1", 120)
        process.send_signal_to_group(signal.SIGINT)
        assert process.wait(90) == 130
        process.assert_no_process_left()
    assert "kept: the checkpoint of rollout 1" in run.process.output()


@pytest.fixture(scope="module")
def in_flight(task, tmp_path_factory):
    """Answers so long that every push falls into them; no sample may be more than two pushes old."""
    directory = tmp_path_factory.mktemp("in_flight")
    run = run_loop(
        task, directory, "--update-weights-in-flight", "--update-weights-interval", 1, "--max-weight-staleness", 2,
        "--rollout-max-response-len", 300, "--max-tokens-per-gpu", 1024,
        # With several steps the trainer computes its log-probs before the first.
        "--num-steps-per-rollout", 2, "--save-debug-train-data", directory / "train_{rollout_id}.pt",
    )  # fmt: skip
    run.process.finish()
    return run


def trained(run: AsyncRun, rollout_id: int) -> dict[int, dict]:
    """By sample index: what the trainer had, its own log-probs before the step among it."""
    dump = torch.load(run.dumps.parent / f"train_{rollout_id}.pt", weights_only=True)
    return {int(sample["sample_indices"]): sample for sample in dump["samples"]}


def test_running_requests_go_on_with_new_weights_and_their_tokens_say_so(in_flight):
    mixed = 0
    for rollout_id in ROLLOUTS:
        for sample in in_flight.samples(rollout_id):
            assert sample["status"] in ("completed", "truncated")
            spans = sample["weight_version_spans"]
            assert [spans[0][1], *(span[2] for span in spans)] == [
                *(span[1] for span in spans),
                sample["response_length"],
            ]
            assert sorted({int(span[0]) for span in spans}) == [int(span[0]) for span in spans]
            mixed += len(spans) > 1
    assert mixed > 0
    assert set(in_flight.process.scalars("rollout/aborted_samples").values()) == {0.0}


def test_no_token_is_older_than_the_bound_when_it_is_trained(in_flight):
    reported = in_flight.process.scalars("rollout/staleness/max")
    for rollout_id in ROLLOUTS:
        # Version 1 is the push before the first rollout, and one more follows each.
        ages = [
            rollout_id + 1 - int(span[0]) for s in in_flight.samples(rollout_id) for span in s["weight_version_spans"]
        ]
        assert min(ages) >= 0 and max(ages) <= 2
        assert reported[rollout_id] == max(ages)
    assert set(in_flight.process.scalars("rollout/stale_samples").values()) == {0.0}
    assert max(reported.values()) > 0


def assert_tokens_are_of_the_weights_that_they_name(run: AsyncRun) -> None:
    """The trainer's log-probs before its step are those of the newest version: engines that kept anything they had computed
    with old weights would tell others for tokens that bear its number."""
    compared = behind_a_swap = 0
    for rollout_id in ROLLOUTS:
        dumped = trained(run, rollout_id)
        for sample in run.samples(rollout_id):
            ours, theirs = (dumped[sample["index"]][name] for name in ("log_probs", "rollout_log_probs"))
            for version, start, end in sample["weight_version_spans"]:
                difference = (ours[start:end] - theirs[start:end]).abs().max()
                if int(version) == rollout_id + 1:
                    assert difference < 1e-4
                    compared += 1
                    behind_a_swap += start > 0
                elif end - start > 8:
                    assert difference > 1e-4
    assert compared > 16 and behind_a_swap > 0


def test_tokens_behind_a_swap_are_of_the_new_weights_alone(in_flight):
    assert_tokens_are_of_the_weights_that_they_name(in_flight)


@pytest.fixture(scope="module")
def never_stops(task, tmp_path_factory):
    """Generation goes on whatever is trained; six groups are in flight where a rollout takes four."""
    directory = tmp_path_factory.mktemp("never_stops")
    run = run_loop(
        task, directory, "--async-buffer-size", 1, "--update-weights-interval", 1,
        "--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
        "--eval-function-path", "slime.rollout.sglang_rollout.generate_rollout", "--sglang-server-concurrency", 12,
        "--max-weight-staleness", 2, "--rollout-max-response-len", 300, "--max-tokens-per-gpu", 1024,
        "--num-steps-per-rollout", 2, "--save-debug-train-data", directory / "train_{rollout_id}.pt",
    )  # fmt: skip
    run.process.finish()
    return run


def test_generation_that_never_stops_loses_no_prompt_and_trains_none_older_than_the_bound(never_stops):
    rollouts = [never_stops.samples(rollout_id) for rollout_id in ROLLOUTS]
    assert_none_is_lost(rollouts, never_stops.checkpoints)
    for rollout_id, samples in enumerate(rollouts):
        ages = [rollout_id + 1 - int(span[0]) for sample in samples for span in sample["weight_version_spans"]]
        assert min(ages) >= 0 and max(ages) <= 2
    assert sorted(never_stops.process.scalars("rollout/groups_in_flight")) == list(ROLLOUTS)
    assert sorted(never_stops.process.scalars("eval/held_out")) == [0, 3, 6]
    assert_tokens_are_of_the_weights_that_they_name(never_stops)


def test_a_rollout_ahead_that_fails_ends_the_run_after_what_is_trained(task, tmp_path):
    """What is under way is finished, and saved where that is due, before the error of the next rollout ends the run."""
    (tmp_path / "mine.py").write_text(
        "from slime.rollout.sglang_rollout import generate_rollout as inherited\n"
        "def generate_rollout(args, rollout_id, data_source, evaluation=False):\n"
        "    if rollout_id == 2: raise KeyError('made to fail')\n"
        "    return inherited(args, rollout_id, data_source, evaluation)\n"
    )
    run = run_loop(task, tmp_path / "run", "--rollout-function-path", tmp_path / "mine.py", "--skip-eval-before-train")
    with run.process as process:
        assert process.wait(300) == 2
        process.assert_no_process_left()
    output = process.output()
    assert "made to fail" in output and "rollout 1 (2/6) |" in output
    assert (run.checkpoints / "latest_checkpointed_iteration.txt").read_text().strip() == "1"
