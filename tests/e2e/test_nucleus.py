"""Training on samples of a nucleus: the trainer's log-probs are those among the tokens that a real engine kept."""

from __future__ import annotations

import pytest
import torch

from slime.rollout.rollout_dump import load_rollout
from tests.support.processes.train_process import TrainProcess


@pytest.mark.slow
def test_log_probs_of_trainer_and_engine_are_those_within_the_nucleus(task, tmp_path):
    from transformers import AutoModelForCausalLM

    dumps = str(tmp_path / "samples" / "{rollout_id}.pt")
    flags = [
        *task.loop_flags, "--num-rollout", "3", "--rollout-top-p", "0.9", "--save-debug-rollout-data", dumps,
        "--eval-interval", "3", "--eval-prompt-data", "held_out", task.evaluation, "--eval-top-k", "-1",
    ]  # fmt: skip
    process = TrainProcess(flags, tmp_path / "run").finish(500)
    assert "the router drops return_sampling_mask; such requests go to its engines" in process.output()
    differences = process.scalars("train/train_rollout_logprob_abs_diff")
    assert sorted(differences) == [0, 1, 2]
    assert all(0 < difference <= 1e-5 for difference in differences.values()), differences

    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    for sample in load_rollout(dumps, 0):
        with torch.no_grad():
            logits = model(torch.tensor([sample.tokens[:-1]])).logits[0, -sample.response_length :].double()
        offsets, kept = sample.rollout_top_p_token_offsets, sample.rollout_top_p_token_ids
        for position, token in enumerate(sample.tokens[-sample.response_length :]):
            ids = [int(i) for i in kept[offsets[position] : offsets[position + 1]]]
            mass = logits[position].softmax(0)[ids]
            assert token in ids and mass.sum() >= 0.9 > mass.sum() - mass.min()
            within = logits[position][ids].log_softmax(0)[ids.index(token)]
            assert sample.rollout_log_probs[position] == pytest.approx(float(within), abs=1e-5)
