"""The whole loop with `--train-backend fsdp` on two ranks: engines compute what the trainer does, a killed run goes on, shared
devices change no number, and Megatron learns the same."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from slime.utils.checkpoint_directory import iteration_directory
from tests.support.models.tiny_task import PLUG_INS, TinyTask
from tests.support.processes.train_process import SavingRun, TrainProcess, checkpoint_tensors

pytestmark = pytest.mark.slow

ROLLOUTS = range(4)
LOG_PROB_GATE = 1e-5
FSDP = ["--train-backend", "fsdp"]
APART = ["--rollout-num-gpus", "1"]
NUMBERS = ("train/loss", "train/pg_loss", "train/kl_loss", "train/grad_norm", "train/lr-pg_0", "rollout/raw_reward")


def run_of(task: TinyTask, directory: Path, *words: object, env: dict[str, str] | None = None) -> SavingRun:
    """Adam's epsilon is large: near zero its update is the gradient's sign, and rounding errors would become steps."""
    checkpoints = directory / "checkpoints"
    flags = [
        *task.rollout_flags, *task.train_flags, "--actor-num-gpus-per-node", "2", "--num-rollout", len(ROLLOUTS),
        "--lr-decay-style", "cosine", "--lr-warmup-iters", "1", "--adam-eps", "1e-4", "--ref-update-interval", "2",
        "--custom-generate-function-path", f"{PLUG_INS}:marked_generate", "--check-weight-update-equal",
        "--save", checkpoints, "--load", checkpoints, "--save-interval", "1", "--keep-last", "2", *words,
    ]  # fmt: skip
    return SavingRun(TrainProcess(flags, directory, env), checkpoints)


@pytest.fixture(scope="module")
def apart(task, tmp_path_factory) -> SavingRun:
    return run_of(task, tmp_path_factory.mktemp("apart"), *FSDP, *APART).finish()


@pytest.fixture(scope="module")
def megatron(task, tmp_path_factory) -> SavingRun:
    return run_of(task, tmp_path_factory.mktemp("megatron"), *APART).finish()


def weights_in(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    files = directory.glob("model-*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def weights_of(run: SavingRun) -> dict[str, torch.Tensor]:
    return weights_in(iteration_directory(run.checkpoints, ROLLOUTS[-1]))


def remembered_by(run: SavingRun) -> dict[str, bytes]:
    """What the optimizer remembers, and the reference, which is refreshed, in the last checkpoint."""
    last = iteration_directory(run.checkpoints, ROLLOUTS[-1])
    return {
        f"{place}.{n}": t for place in ("optimizer", "states/ref") for n, t in checkpoint_tensors(last / place).items()
    }


def assert_pushes_were_checked(run: SavingRun, engines: int) -> None:
    assert re.search(rf"weight check: \d+ tensors equal on {engines} engines?", run.process.output())


def assert_engines_held_the_weights(run: SavingRun, engines: int) -> None:
    assert_pushes_were_checked(run, engines)
    differences = run.process.scalars("train/train_rollout_logprob_abs_diff")
    assert sorted(differences) == list(ROLLOUTS)
    assert all(0 < value <= LOG_PROB_GATE for value in differences.values()), differences


def assert_same(run: SavingRun, other: SavingRun) -> None:
    """Every number, every weight and every moment, bit by bit."""
    for tag in NUMBERS:
        assert run.process.scalars(tag) == other.process.scalars(tag) != {}, tag
    left, right = weights_of(run), weights_of(other)
    assert left.keys() == right.keys() and len(left) > 10
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
    left, right = remembered_by(run), remembered_by(other)
    assert left.keys() == right.keys() and len(left) > 30
    assert [name for name in left if left[name] != right[name]] == []


def test_trainer_and_engines_agree_after_every_push(apart):
    assert_engines_held_the_weights(apart, 1)
    # The weights have moved meanwhile, by far more than that.
    assert apart.process.scalars("train/grad_norm")[0] > 0
    rates = apart.process.scalars("train/lr-pg_0")
    assert rates[0] == 0 and rates[1] == pytest.approx(1e-3) and rates[1] > rates[2] > rates[3] > 0


def test_checkpoints_are_hugging_face_directories_of_which_the_last_are_kept(task, apart):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kept = {path.name for path in apart.checkpoints.glob("iter_*")}
    assert kept == {"iter_0000002", "iter_0000003"}
    last = iteration_directory(apart.checkpoints, ROLLOUTS[-1])
    model = AutoModelForCausalLM.from_pretrained(last, dtype=torch.float32)
    weights = weights_of(apart)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.named_parameters())
    assert len(AutoTokenizer.from_pretrained(last)) == len(AutoTokenizer.from_pretrained(task.model))


@pytest.mark.parametrize("started", ["by a person", "by itself"])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(task, apart, tmp_path, started):
    """The driver is killed, and somebody starts it again; or one of two ranks, and the run starts again by itself."""
    more = ["--max-restarts", "1"] if started == "by itself" else []
    killed = run_of(task, tmp_path, *FSDP, *APART, *more, env={"E2E_HOLD_ROLLOUT": "2"})
    with killed.process as process:
        process.wait_for_line("holding rollout 2", 400)
        assert (killed.checkpoints / "latest_checkpointed_iteration.txt").read_text().strip() == "1"
        if more:
            ranks = [pid for pid, command in process.processes().items() if "RankProcess" in command]
            assert len(ranks) == 2
            os.kill(ranks[0], signal.SIGKILL)
            process.wait_for_line("restart 1 of 1", 120)
            (tmp_path / "go").touch()
            process.wait_for_success(600)
        else:
            process.send_signal_to_driver(signal.SIGKILL)
            assert process.wait(60) == -signal.SIGKILL
        process.assert_no_process_left(60)
    assert_same(killed if more else run_of(task, tmp_path, *FSDP, *APART).finish(), apart)


def test_sides_that_sleep_in_turn_change_no_number(task, apart, tmp_path):
    """Each rank has an engine beside it, which takes its weights out of shared memory."""
    shared = run_of(
        task, tmp_path, *FSDP, "--colocate", "--rollout-num-gpus", "2", "--sglang-log-level", "info"
    ).finish()
    assert_engines_held_the_weights(shared, 2)
    logs = [path.read_text(errors="replace") for path in shared.process.event_directory.glob("logs/engine_*.log")]
    assert len(logs) == 2 and all("POST /update_weights_from_tensor " in log for log in logs)
    assert_same(shared, apart)


def test_files_carry_the_weights_too(task, apart, tmp_path):
    """Beside them an export, and older copies of the actor, one of which a checkpoint holds."""
    words = ["--update-weight-transport", "disk", "--update-weight-disk-dir", tmp_path / "pushes", "--keep-old-actor"]
    run = run_of(task, tmp_path, *FSDP, *APART, *words, "--save-hf", tmp_path / "export-{rollout_id}").finish()
    assert_pushes_were_checked(run, 1)
    # Then the copy that log-probs are taken of is another one than the engines have.
    differences = run.process.scalars("train/train_rollout_logprob_abs_diff")
    assert 0 < differences[0] <= LOG_PROB_GATE < differences[3]
    assert run.process.scalars("rollout/raw_reward")[0] == apart.process.scalars("rollout/raw_reward")[0]
    exported, saved = weights_in(tmp_path / "export-3"), weights_of(run)
    assert exported.keys() == saved.keys() and all(torch.equal(exported[name], saved[name]) for name in saved)
    states = iteration_directory(run.checkpoints, ROLLOUTS[-1]) / "states"
    assert {path.name for path in states.iterdir()} == {"ref", "rollout_actor"}
    # What generated the last rollout is what the one before it had trained.
    older = {name.removeprefix("/"): bits for name, bits in checkpoint_tensors(states / "rollout_actor").items()}
    before = weights_in(iteration_directory(run.checkpoints, ROLLOUTS[-2]))
    assert older.keys() == before.keys()
    assert all(before[name].numpy().tobytes() == older[name] for name in before)


def assert_same_up_to_the_order_of_sums(run: SavingRun, other: SavingRun) -> None:
    """1e-7 of a gradient, 1e-3 of which a step keeps."""
    assert run.process.scalars("rollout/raw_reward") == other.process.scalars("rollout/raw_reward")
    for tag, absolute in (
        ("train/lr-pg_0", 1e-12),
        ("train/loss", 1e-5),
        ("train/kl_loss", 1e-5),
        ("train/grad_norm", 1e-4),
    ):
        expected, found = other.process.scalars(tag), run.process.scalars(tag)
        assert sorted(found) == list(ROLLOUTS) and found == pytest.approx(expected, abs=absolute, rel=1e-3), tag


def test_megatron_learns_the_same(apart, megatron):
    """Both compute in float32."""
    assert_same_up_to_the_order_of_sums(apart, megatron)


def test_ranks_that_share_samples_and_save_memory_learn_the_same(task, apart, tmp_path):
    words = [
        "--context-parallel-size",
        "2",
        "--gradient-checkpointing",
        "--fsdp-cpu-offload",
        "--optimizer-cpu-offload",
    ]
    shared = run_of(task, tmp_path, *FSDP, *APART, *words, "--attn-implementation", "sdpa").finish()
    assert_engines_held_the_weights(shared, 1)
    assert_same_up_to_the_order_of_sums(shared, apart)
    assert weights_of(shared).keys() == weights_of(apart).keys()
