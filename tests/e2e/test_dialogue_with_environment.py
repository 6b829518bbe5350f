"""`examples/geo3k_vlm_multi_turn` with texts, through real engines: three turns, and what of them is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.geo3k_vlm_multi_turn.env_geo3k import NEITHER
from slime.utils.processing_utils import load_tokenizer
from tests.support.processes.train_process import TrainProcess

EXAMPLE = Path(__file__).parents[2] / "examples/geo3k_vlm_multi_turn"
ROLLOUTS = range(2)


def read_samples(path):
    return torch.load(path, weights_only=True)["samples"]


def untrained(sample):
    """The response tokens with mask 0."""
    if sample["loss_mask"] is None:
        return []
    response = sample["tokens"].tolist()[-sample["response_length"] :]
    return [token for token, mask in zip(response, sample["loss_mask"].tolist(), strict=True) if not mask]


@pytest.mark.slow
def test_turns_with_an_environment_are_trained_but_for_what_it_says(task, tmp_path):
    flags = [flag for flag in task.loop_flags if flag != "--apply-chat-template"]
    place = flags.index("--custom-rm-path")
    flags[place : place + 2] = ["--rm-type", "math"]
    flags += [
        "--custom-generate-function-path", f"{EXAMPLE}/geo3k_multi_turn.py:generate",
        "--custom-config-path", EXAMPLE / "geo3k.yaml",
        # Of random weights hardly any turn ends by itself.
        "--rollout-stop", *"aeiou", "--rollout-max-response-len", "700", "--max-tokens-per-gpu", "1024",
        "--num-rollout", len(ROLLOUTS), "--save-debug-rollout-data", tmp_path / "{rollout_id}.pt",
    ]  # fmt: skip
    with TrainProcess(flags, tmp_path) as process:
        process.wait_for_success(500)
    assert max(process.scalars("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    tokenizer = load_tokenizer(str(task.model))
    reply = tokenizer.encode(
        f"<|im_end|>\n<|im_start|>user\n{NEITHER}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )
    samples = [sample for rollout_id in ROLLOUTS for sample in read_samples(tmp_path / f"{rollout_id}.pt")]
    turns = [sample["metadata"]["round_number"] for sample in samples if "round_number" in sample["metadata"]]
    assert len(samples) == 2 * 16 and max(turns) == 3
    for sample in samples:
        masked, replies = untrained(sample), 0
        while masked:
            # A model that ends its turn itself has written the mark.
            written = reply if masked[0] == reply[0] else reply[1:]
            assert masked[: len(written)] == written
            masked, replies = masked[len(written) :], replies + 1
        rounds = sample["metadata"].get("round_number", 0)
        # One whose last turn was cut has had a reply before it.
        assert replies == (rounds - 1 if sample["status"] == "completed" else rounds)
        assert sample["metadata"]["environment"] == {"looks": 0, "right": False}
