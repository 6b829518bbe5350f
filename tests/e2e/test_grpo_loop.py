"""The whole loop on real parts: six GRPO rollouts, one training rank, two engines behind the router, float32. And the same
command killed and started again, which goes on as if nothing had happened."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.models.tiny_task import PLUG_INS, ROLLOUT_BATCH_SIZE, SAMPLES_PER_PROMPT, TinyTask
from tests.support.processes.train_process import ListeningSocket, TrainProcess, checkpoint_tensors
from tests.support.tables.metrics_page import unnamed

ROLLOUTS = range(6)
RESUMED = (3, 4, 5)
LOG_PROB_GATE = 1e-5
PLANTED_SECRET = "a-secret-that-may-stand-nowhere"


@dataclasses.dataclass(frozen=True)
class LoopRun:
    """A run of six rollouts: where it keeps what, and the process."""

    process: TrainProcess
    checkpoints: Path
    dumps: Path
    # What was seen while it ran: every socket that listened, and the directory of its Ray.
    listening: list[ListeningSocket] = dataclasses.field(default_factory=list)
    ray_sessions: set[Path] = dataclasses.field(default_factory=set)
    shared_memory: set[Path] = dataclasses.field(default_factory=set)
    # Its directory for temporary files, of which only the whole run knows.
    temporary: Path | None = None


def run_loop(task: TinyTask, directory: Path, env: dict[str, str] | None = None, *more: str) -> LoopRun:
    """The command, the same but for the directories and `more` flags."""
    checkpoints, dumps = directory / "checkpoints", directory / "dumps"
    flags = [
        *task.loop_flags,
        "--num-rollout", "6",
        "--custom-generate-function-path", f"{PLUG_INS}:marked_generate",
        "--check-weight-update-equal",
        "--save", checkpoints, "--load", checkpoints, "--save-interval", "3",
        "--eval-interval", "6", "--eval-prompt-data", "held_out", task.evaluation,
        "--save-debug-rollout-data", dumps / "{rollout_id}.pt",
        "--rollout-data-postprocess-path", f"{PLUG_INS}:hashed_token",
        "--train-env-vars", json.dumps({"HUB_TOKEN": PLANTED_SECRET}),
        *more,
    ]  # fmt: skip
    return LoopRun(TrainProcess(flags, directory, env), checkpoints, dumps)


@pytest.fixture(scope="module")
def finished_run(task, tmp_path_factory) -> Iterator[LoopRun]:
    """Six rollouts on one training rank and two engines, with everything checked that can be."""
    directory = tmp_path_factory.mktemp("whole")
    # The paths of Unix sockets in it must stay short.
    temporary = Path(tempfile.mkdtemp(prefix="e2e-", dir="/tmp"))
    run = run_loop(task, directory, {"E2E_KEY_FILE": str(directory / "key"), "TMPDIR": str(temporary)})
    run = dataclasses.replace(run, temporary=temporary)
    with run.process as process:
        process.wait_for_line(r"rollout \d \(\d/6\)", 300)
        run.listening.extend(process.listening())
        run.ray_sessions.update(process.ray_sessions())
        scratch = [path.name for path in temporary.glob("slime-*")]
        run.shared_memory.update(
            path for path in Path("/dev/shm").iterdir() if any(name in path.name for name in scratch)
        )
        process.wait_for_success(400)
        process.assert_no_process_left()
    yield run
    shutil.rmtree(temporary, ignore_errors=True)


@pytest.fixture(scope="module", params=["by a person", "by itself"])
def resumed_run(request, task, tmp_path_factory):
    """Killed while rollout 5 of 6 generates, when the checkpoint of rollout 3 is there; then run to its end.

    It is started again by a person after its driver was killed, or by itself after a training rank was.
    """
    directory = tmp_path_factory.mktemp("killed")
    more = ["--max-restarts", "1"] if request.param == "by itself" else []
    killed = run_loop(task, directory, {"E2E_HOLD_ROLLOUT": "4"}, *more)
    with killed.process as process:
        process.wait_for_line("holding rollout 4", 300)
        left_alone = process.processes()
        rank = next(pid for pid, command in left_alone.items() if "RankProcess" in command)
        assert (killed.checkpoints / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
        if more:
            os.kill(rank, signal.SIGKILL)
            process.wait_for_line("restart 1 of 1", 60)
            (directory / "go").touch()
            process.wait_for_success(400)
            process.assert_no_process_left()
            return killed
        process.send_signal_to_driver(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
        process.assert_no_process_left(60)
    # Engines, ranks and Ray's own processes were there and followed their driver.
    assert any("server_process" in command for command in left_alone.values())

    resumed = run_loop(task, directory)
    resumed.process.finish(300)
    return resumed


@pytest.fixture(scope="module")
def output(finished_run) -> str:
    return finished_run.process.output()


def load_dump(run, name) -> list[dict]:
    return torch.load(run.dumps / f"{name}.pt", weights_only=True)["samples"]


def test_trainer_and_engines_agree_on_log_probs_after_every_weight_update(finished_run):
    differences = finished_run.process.scalars("train/train_rollout_logprob_abs_diff")
    assert sorted(differences) == list(ROLLOUTS)
    assert all(0 < difference <= LOG_PROB_GATE for difference in differences.values()), differences
    # The weights have moved meanwhile, by far more than that.
    kl = finished_run.process.scalars("train/kl_loss")
    assert kl[0] == 0 and kl[5] > 100 * LOG_PROB_GATE


def test_the_reference_names_every_metric(finished_run):
    tags = finished_run.process.scalar_tags()
    assert len(tags) > 40 and unnamed(tags) == []


def test_the_engines_proved_that_they_hold_the_weights(output):
    assert re.search(r"weight check: \d+ tensors equal on 2 engines", output)


@pytest.mark.parametrize("rollout_id", ROLLOUTS)
def test_samples_name_the_weights_that_generated_them(finished_run, rollout_id):
    # One push before the first generation and one after each training step.
    version = str(rollout_id + 1)
    samples = load_dump(finished_run, rollout_id)
    assert len(samples) == ROLLOUT_BATCH_SIZE * SAMPLES_PER_PROMPT
    for sample in samples:
        assert sample["weight_versions"] == [version]
        assert [list(span) for span in sample["weight_version_spans"]] == [[version, 0, sample["response_length"]]]


def test_plug_ins_by_path_were_used(finished_run):
    samples = [sample for rollout_id in ROLLOUTS for sample in load_dump(finished_run, rollout_id)]
    assert all(sample["metadata"]["generated_by"] == "marked_generate" for sample in samples)
    for sample in samples:
        response = sample["tokens"][-sample["response_length"] :]
        # The random model never answers correctly, so the reward is the part that the plug-in added.
        assert sample["reward"] == pytest.approx((response % 2).float().mean().item())
    assert len({sample["reward"] for sample in samples}) > 2


def test_groups_are_independent_answers_to_one_prompt(finished_run):
    samples = load_dump(finished_run, 0)
    for group in range(ROLLOUT_BATCH_SIZE):
        siblings = [sample for sample in samples if sample["group_index"] == group]
        assert len(siblings) == SAMPLES_PER_PROMPT
        assert len({sample["prompt"] for sample in siblings}) == 1
        assert len({tuple(sample["tokens"].tolist()) for sample in siblings}) > 1


def test_prompts_follow_the_shuffled_epochs(finished_run):
    numbers = [
        sample["metadata"]["number"]
        for rollout_id in ROLLOUTS
        for sample in load_dump(finished_run, rollout_id)[::SAMPLES_PER_PROMPT]
    ]
    first_epoch, second_epoch = numbers[:14], numbers[14:]
    assert sorted(first_epoch) == list(range(14)) and first_epoch != sorted(first_epoch)
    assert len(set(second_epoch)) == len(second_epoch) == 10


def test_evaluation_before_the_first_and_after_the_last_rollout(finished_run, output):
    rewards = finished_run.process.scalars("eval/held_out")
    # Three rollouts are an epoch here, and the end of an epoch is evaluated too.
    assert sorted(rewards) == [0, 3, 6]
    for step, reward in rewards.items():
        name, dump = (
            (f"after rollout {step - 1}", f"eval_{step - 1}") if step else ("before rollout 0", "eval_before_0")
        )
        dumped = [sample["reward"] for sample in load_dump(finished_run, dump)]
        assert len(dumped) == 3 and reward == pytest.approx(sum(dumped) / 3)
        assert f"evaluation {name}: held_out {reward:.4f}" in output


def test_one_console_line_per_rollout(finished_run, output):
    loss = finished_run.process.scalars("train/loss")
    for rollout_id in ROLLOUTS:
        lines = re.findall(rf"^\S+ rollout {rollout_id} \({rollout_id + 1}/6\) \|.*$", output, re.MULTILINE)
        assert len(lines) == 1
        assert f"loss {loss[rollout_id]:.4f}" in lines[0]
        for label in ("reward", "length", "kl", "grad_norm", "seconds: generate", "train", "sync", "step"):
            assert f"{label} " in lines[0]
        assert (" save " in lines[0]) == (rollout_id in (2, 5))


def test_tensorboard_has_the_metrics_of_every_rollout(finished_run):
    for tag in (
        "rollout/raw_reward", "rollout/response_len/mean", "train/loss", "train/pg_loss", "train/kl_loss",
        "train/entropy_loss", "train/grad_norm", "train/lr-pg_0", "perf/rollout_time", "perf/train_time",
        "perf/update_weights_time", "perf/step_time", "perf/train_wait_time", "perf/wait_time_ratio",
        "perf/actor_train_tok_per_s", "perf/actor_train_tflops", "perf/request/e2e_latency/mean",
        "perf/driver_host_memory_gib", "perf/manager_host_memory_gib", "perf/engine_host_memory_gib",
        "perf/rank_host_memory_gib",
    ):  # fmt: skip
        scalars = finished_run.process.scalars(tag)
        assert sorted(scalars) == list(ROLLOUTS), tag
        assert all(math.isfinite(value) for value in scalars.values()), tag
    assert sorted(finished_run.process.scalars("perf/save_model_time")) == [2, 5]
    assert list(finished_run.process.scalars("train/lr-pg_0").values()) == pytest.approx([1e-3] * 6)


def test_checkpoints_lie_where_they_should(finished_run):
    save = finished_run.checkpoints
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == "5"
    assert sorted(path.name for path in save.iterdir()) == [
        ".checkpoints.lock", "args.json", "iter_0000002", "iter_0000005", "latest_checkpointed_iteration.txt",
        "latest_evaluation.txt", "rollout",
    ]  # fmt: skip
    for rollout_id in (2, 5):
        names = {path.name for path in (save / f"iter_{rollout_id:07d}").iterdir()}
        assert {"common.pt", "metadata.json", "rng_00000.safetensors", "weight_version.json"} <= names
        state = json.loads((save / f"rollout/global_dataset_state_dict_{rollout_id}/state.json").read_text())
        drawn = ROLLOUT_BATCH_SIZE * (rollout_id + 1)
        assert (state["sample_group_index"], state["sample_offset"]) == (drawn, drawn - 14 * state["epoch_id"])


def test_the_run_record_repeats_the_command(finished_run, task):
    record = json.loads((finished_run.checkpoints / "args.json").read_text())
    assert record["arguments"]["hf_checkpoint"] == {"value": str(task.model), "origin": "command line"}
    assert record["arguments"]["check_weight_update_equal"]["value"] is True
    assert record["versions"]["torch"] == torch.__version__


def test_the_api_key_is_written_nowhere(finished_run):
    key = (finished_run.process.directory / "key").read_bytes()
    assert len(key) > 20
    holders = [
        path
        for path in finished_run.process.directory.rglob("*")
        if path.is_file() and path.name != "key" and key in path.read_bytes()
    ]
    assert holders == []


def test_a_secret_of_the_ranks_environment_is_written_nowhere(finished_run):
    directories = [finished_run.process.directory, *finished_run.ray_sessions]
    assert len(directories) == 2
    files = [path for directory in directories for path in directory.rglob("*") if path.is_file()]
    assert any("raylet" in path.name for path in files)
    assert [path for path in files if PLANTED_SECRET.encode() in path.read_bytes()] == []
    # Not because the ranks never got it.
    note = finished_run.process.directory / "hub_token.sha256"
    assert note.read_text() == hashlib.sha256(PLANTED_SECRET.encode()).hexdigest()


def test_nothing_of_a_run_on_one_machine_can_be_reached_from_another(finished_run):
    listening = finished_run.listening
    programs = ("gcs_server", "raylet", "agent", "RankProcess", "EngineActor", "router_process", "server_process")
    for program in programs:
        assert any(program.lower() in socket.command.lower() for socket in listening), program
    loopback = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
    assert [socket for socket in listening if socket.address not in loopback] == []


def test_nothing_but_rays_logs_is_left_in_the_temporary_directories(finished_run):
    left = {path.name for path in finished_run.temporary.iterdir()}
    # torch keeps its compiled kernels for the next run.
    assert {name for name in left if not name.startswith("torchinductor_")} <= {"ray"}
    # Each engine had one; their names hold that of the engine's own directory.
    assert len(finished_run.shared_memory) == 2
    assert [path for path in finished_run.shared_memory if path.exists()] == []


def test_the_output_is_for_people(output):
    assert "Traceback" not in output
    # Ray's own messages about itself, and those of libraries.
    assert not re.search(r"INFO worker\.py|FutureWarning|UserWarning", output)


# --- killed and started again ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_goes_on_after_the_published_checkpoint(resumed_run):
    output = resumed_run.process.output().rpartition("restart 1 of 1")[2]
    assert ", resuming" in output
    assert "rollout 2 (3/6) |" not in output and "rollout 3 (4/6) |" in output and "rollout 5 (6/6) |" in output
    # No second evaluation before training.
    assert "evaluation before" not in output
    # Nothing that outlives a killed driver holds its directory, and no start is in the way of the next one.
    assert "another run" not in resumed_run.process.output()
    assert (resumed_run.process.event_directory / ".run.lock").read_text().startswith("process ")


@pytest.mark.slow
@pytest.mark.parametrize("rollout_id", RESUMED)
def test_prompts_tokens_and_rewards_are_those_of_the_whole_run(finished_run, resumed_run, rollout_id):
    whole, resumed = load_dump(finished_run, rollout_id), load_dump(resumed_run, rollout_id)
    assert [sample["prompt"] for sample in resumed] == [sample["prompt"] for sample in whole]
    assert [sample["tokens"].tolist() for sample in resumed] == [sample["tokens"].tolist() for sample in whole]
    for name in ("index", "group_index", "label", "reward", "metadata", "weight_versions", "weight_version_spans"):
        assert [sample[name] for sample in resumed] == [sample[name] for sample in whole]


@pytest.mark.slow
@pytest.mark.parametrize("tag", ["train/loss", "train/pg_loss", "train/kl_loss", "train/grad_norm"])
def test_what_was_learned_is_bitwise_the_same(finished_run, resumed_run, tag):
    whole, resumed = finished_run.process.scalars(tag), resumed_run.process.scalars(tag)
    # The event files of both starts lie in one directory: all steps are there.
    assert sorted(resumed) == sorted(whole)
    assert [resumed[step] for step in RESUMED] == [whole[step] for step in RESUMED]


@pytest.mark.slow
def test_data_state_and_weights_end_the_same(finished_run, resumed_run):
    def state(run):
        return json.loads((run.checkpoints / "rollout/global_dataset_state_dict_5/state.json").read_text())

    assert state(resumed_run) == state(finished_run)
    resumed, whole = (checkpoint_tensors(run.checkpoints / "iter_0000005") for run in (resumed_run, finished_run))
    assert whole and resumed == whole
