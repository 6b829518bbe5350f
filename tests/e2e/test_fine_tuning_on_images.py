"""`train.py` fine-tunes on chats with images, without engines: what it sees is what transformers sees in the same chats."""

from __future__ import annotations

import json

import pytest
import torch

from slime.utils.processing_utils import encode_with_images, load_processor
from tests.support.models.seen_batch import PROVIDER, write_chatting_model
from tests.support.models.vision import save_image
from tests.support.processes.train_process import TrainProcess

COLORS = ("red", "lime", "blue", "white")
QUESTION = "<|im_start|>user\n{}color?<|im_end|>\n<|im_start|>assistant\n"


def write_chats(directory):
    """Chats that name the colour of a picture, and one without a picture."""
    chats = [("<image>color?", color) for color in COLORS]
    rows = [
        {
            "messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": color}],
            "images": save_image(directory / f"{color}.png", color),
        }
        for asked, color in chats
    ]
    rows.append({"messages": [{"role": "user", "content": "color?"}, {"role": "assistant", "content": "none"}]})
    path = directory / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@torch.no_grad()
def loss_in_transformers(model, directory):
    """The mean of the negative log-probs of all trained tokens, before any step."""
    processor, losses = load_processor(str(directory / "model"), trust_remote_code=True), []
    for color in (*COLORS, None):
        image = "" if color is None else "<|vision_start|><|image_pad|><|vision_end|>"
        question = QUESTION.format(image)
        sources = [] if color is None else [str(directory / f"{color}.png")]
        encoded = [
            encode_with_images(processor, text, sources, add_special_tokens=False)
            if sources
            else (processor.tokenizer(text)["input_ids"], {}, [])
            for text in (question, question + f"{color or 'none'}<|im_end|>\n")
        ]
        (asked, *_), (whole, beside, _) = encoded
        tokens = torch.tensor([whole])
        rows = torch.log_softmax(model(tokens, **beside).logits[0], -1)[len(asked) - 1 : -1]
        losses.append(-rows.gather(1, tokens[0, len(asked) :, None]))
    return float(torch.cat(losses).mean())


@pytest.mark.slow
def test_a_run_learns_from_chats_with_images(tmp_path):
    model = write_chatting_model(tmp_path / "model")
    chats = write_chats(tmp_path)
    flags = [
        "--hf-checkpoint", tmp_path / "model", "--model-args-from-hf", "--custom-model-provider-path", PROVIDER,
        # Of the processor.
        "--trust-remote-code",
        "--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout", "--loss-type", "sft_loss",
        "--calculate-per-token-loss", "--debug-train-only", "--disable-compute-advantages-and-returns",
        "--prompt-data", chats, "--input-key", "messages", "--multimodal-keys", '{"image": "images"}',
        "--loss-mask-type", "qwen3_5", "--num-rollout", "6", "--rollout-batch-size", "5", "--num-steps-per-rollout", "1",
        "--actor-num-gpus-per-node", "1", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "64",
        "--lr", "3e-3", "--lr-decay-style", "constant",
    ]  # fmt: skip
    with TrainProcess(flags, tmp_path / "run") as process:
        process.wait_for_success(400)
    losses = process.scalars("train/loss")
    assert losses[0] == pytest.approx(loss_in_transformers(model, tmp_path), abs=1e-4)
    assert losses[5] < 0.8 * losses[0]
