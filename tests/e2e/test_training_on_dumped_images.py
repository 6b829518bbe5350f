"""`train.py` on a dump of samples with images: it trains on what the processor made of them, and exports the tower as it is."""

from __future__ import annotations

import pytest
import torch

from slime.rollout.rollout_dump import save_rollout
from slime.weights.hf_reader import SafetensorsDirectory
from tests.support.models.seen_batch import DEEP_PROVIDER, PROVIDER, make_seen_samples, seen_alone, write_seeing_model
from tests.support.models.tiny_checkpoint import make_tiny_tokenizer
from tests.support.processes.train_process import TrainProcess

ROLLOUTS = range(2)


@torch.no_grad()
def dump(model, directory):
    """Two rollouts of two groups, texts among them, with the log-probs of the model in transformers."""
    samples = make_seen_samples()[:8]
    for sample in samples:
        sample.rollout_id = sample.loss_mask = None
        sample.prompt = "p"
        rows = torch.log_softmax(seen_alone(model, sample), -1)[:-1]
        own = rows.gather(1, torch.tensor(sample.tokens[1:])[:, None])[-sample.response_length :, 0]
        sample.rollout_log_probs = own.tolist()
    for rollout in ROLLOUTS:
        save_rollout(f"{directory}/{{rollout_id}}.pt", rollout, samples)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "provider", "layout"),
    [
        ("qwen3_5", PROVIDER, []),
        ("qwen3_5", PROVIDER, ["--context-parallel-size", "2"]),
        ("qwen3_vl_moe", DEEP_PROVIDER, ["--pipeline-model-parallel-size", "2"]),
    ],
)
def test_a_run_trains_on_a_dump_with_images(tmp_path, model_type, provider, layout):
    model = write_seeing_model(tmp_path / "model", model_type)
    make_tiny_tokenizer(tmp_path / "model")
    dump(model, tmp_path)
    flags = [
        "--hf-checkpoint", tmp_path / "model", "--model-args-from-hf", "--custom-model-provider-path", provider,
        "--load-debug-rollout-data", tmp_path / "{rollout_id}.pt",
        "--save-debug-train-data", tmp_path / "train_{rollout_id}.pt",
        "--num-rollout", len(ROLLOUTS), "--rollout-batch-size", "2", "--n-samples-per-prompt", "4",
        "--actor-num-gpus-per-node", "2" if layout else "1", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "64",
        "--data-pad-size-multiplier", "8", "--lr", "1e-3", "--lr-decay-style", "constant",
        "--save", tmp_path / "saved", "--save-interval", "1", "--save-hf", tmp_path / "exported_{rollout_id}", *layout,
    ]  # fmt: skip
    with TrainProcess(flags, tmp_path / "run") as process:
        process.wait_for_success(400)
    differences = process.scalars("train/train_rollout_logprob_abs_diff")
    # The samples are those of the weights at the start.
    assert 0 < differences[0] <= 1e-5 < differences[1]
    assert process.scalars("train/grad_norm").keys() == set(ROLLOUTS)
    samples = torch.load(tmp_path / "train_0.pt", weights_only=True)["samples"]
    assert len(samples) == 8 and not any("multimodal_train_inputs" in sample for sample in samples)
    before, after = (SafetensorsDirectory(path) for path in (tmp_path / "model", tmp_path / "exported_1"))
    assert before.names() == after.names()
    same = {name for name in before.names() if torch.equal(before.tensor(name)[...], after.tensor(name)[...])}
    assert same >= {name for name in before.names() if name.startswith("model.visual.")}
    assert "model.language_model.embed_tokens.weight" not in same
