"""Imitation of demonstrations, in bfloat16 and in two halves: no engine."""

from __future__ import annotations

import json

import pytest

from tests.support.processes.train_process import TrainProcess, checkpoint_tensors


@pytest.fixture(scope="module")
def imitation_flags(task, tmp_path_factory):
    demonstrations = tmp_path_factory.mktemp("imitation") / "demonstrations.jsonl"
    turns = [("user", "What is {0}+1?"), ("assistant", "It is {1}.")]
    rows = [[{"role": role, "content": text.format(i, i + 1)} for role, text in turns] for i in range(24)]
    demonstrations.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return [
        "--hf-checkpoint", task.model, "--model-args-from-hf", "--bf16", "--debug-train-only", "--loss-type", "sft_loss",
        "--disable-compute-advantages-and-returns", "--calculate-per-token-loss", "--prompt-data", demonstrations,
        "--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout", "--input-key", "messages",
        "--rollout-batch-size", "4", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "512",
        "--actor-num-gpus-per-node", "1", "--lr", "1e-5", "--lr-decay-style", "constant", "--save-interval", "3",
    ]  # fmt: skip


@pytest.mark.slow
def test_imitation_in_bfloat16_ends_the_same_in_two_halves(imitation_flags, tmp_path):
    """And checkpoints that are written in the background are those that training waits for. A profiler changes nothing; it
    traces the rollouts of its window wherever they are trained."""
    background = ["--async-save", "--keep-last", "1"]
    background += ["--use-pytorch-profiler", "--profile-step-start", "2", "--profile-step-end", "5"]
    for name, lengths, more in [("whole", (6,), []), ("halves", (3, 6), background)]:
        for length in lengths:
            directory = tmp_path / name
            flags = [*imitation_flags, "--num-rollout", length, "--save", directory, "--load", directory, *more]
            with TrainProcess(flags, tmp_path / f"{name}_{length}") as process:
                process.wait_for_success(300)
    assert sorted(path.name for path in (tmp_path / "whole").glob("*iter_*")) == ["iter_0000002", "iter_0000005"]
    assert sorted(path.name for path in (tmp_path / "halves").glob("*iter_*")) == ["iter_0000005"]
    whole, halves = (checkpoint_tensors(tmp_path / name / "iter_0000005") for name in ("whole", "halves"))
    assert whole.keys() == halves.keys() and any(name.startswith("/optimizer.state.param") for name in whole)
    assert [name for name in whole if whole[name] != halves[name]] == []
    for length, traced in {3: [2], 6: [3, 4]}.items():
        found = (tmp_path / f"halves_{length}" / "tensorboard").glob("*.pt.trace.json*")
        names = [f"actor_train_overall_rank_0.{rollout_id}.pt.trace.json.gz" for rollout_id in traced]
        assert sorted(path.name for path in found) == names
