"""A tiny random Qwen3.5 with a vision tower, and the batch of `grpo_batch` with images in some of its prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from slime.utils.types import Sample
from tests.support.models.grpo_batch import make_samples
from tests.support.models.tiny_families import TINY_FAMILIES, VOCABULARY
from tests.support.models.tiny_model import write_tiny_delta_net

PROVIDER = "slime_plugins.models.qwen3_5_vl.get_qwen3_5_vl_model_provider"
# Begin, feature, end, frame of a video: the last ones of the vocabulary.
BEGIN, IMAGE, END, VIDEO = range(VOCABULARY - 4, VOCABULARY)
# Two patches by two are a feature.
MERGE = 2
# (time, height, width) in patches of the images of a sample, by its index; others are texts. Sample 5 shares those of 2.
GRIDS = {2: [(1, 4, 6)], 4: [(1, 2, 2)], 5: [(1, 4, 6)], 7: [(1, 2, 4), (1, 6, 2)]}
_PATCH = 12


def write_seeing_model(directory: Path, model_type: str = "qwen3_5") -> Any:
    """Save a random float32 model and return it in transformers: half of a head's channels are rotated, three pairs by time,
    three by height and two by width."""
    family = TINY_FAMILIES[model_type]
    entries = {
        **family.entries,
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2],
        },
        "vision": {**family.entries["vision"], "depth": 2, "num_position_embeddings": 16, "spatial_merge_size": MERGE},
    }  # fmt: skip
    whole = {
        "vision_start_token_id": BEGIN, "image_token_id": IMAGE, "vision_end_token_id": END, "video_token_id": VIDEO,
    }  # fmt: skip
    return write_tiny_delta_net(directory, model_type=model_type, vocab_size=VOCABULARY, whole=whole, **entries)


def features_of(grid: tuple[int, int, int]) -> int:
    """How many features the tower makes of an image."""
    return int(np.prod(grid)) // MERGE**2


def processed(grids: list[tuple[int, int, int]], seed: int) -> dict[str, Any]:
    """What a processor gives for images of these grids."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    patches = sum(int(np.prod(grid)) for grid in grids)
    return {"pixel_values": torch.randn(patches, _PATCH, generator=generator), "image_grid_thw": torch.tensor(grids)}


def make_seen_samples(vocab_size: int = VOCABULARY) -> list[Sample]:
    """The samples of `grpo_batch`, with the images of `GRIDS` before the second token of their prompts."""
    samples = make_samples(vocab_size)
    for sample in samples:
        sample.tokens = [token % BEGIN for token in sample.tokens]
        if (grids := GRIDS.get(sample.index)) is None:
            continue
        placeholders = [token for grid in grids for token in (BEGIN, *[IMAGE] * features_of(grid), END)]
        sample.tokens[1:1] = placeholders
        sample.multimodal_train_inputs = processed(grids, sample.index)
    samples[5].multimodal_train_inputs = dict(samples[2].multimodal_train_inputs)
    return samples


def seen_alone(model: Any, sample: Sample) -> Any:
    """Logits [tokens, vocabulary] that the model in transformers gives for one sample."""
    import torch

    tokens = torch.tensor([sample.tokens])
    inputs = sample.multimodal_train_inputs
    if not inputs:
        return model(tokens).logits[0]
    kinds = (tokens == IMAGE).int()
    if not kinds[:, -sample.response_length :].any():
        return model(tokens, **inputs, mm_token_type_ids=kinds).logits[0]
    # It was generated, and is a token like others. The class itself takes all of them for features.
    kinds[:, -sample.response_length :] = 0
    embedded = model.get_input_embeddings()(tokens)
    features = torch.cat(model.get_image_features(**inputs).pooler_output)
    embedded = embedded.masked_scatter(kinds[..., None].bool(), features)
    positions, _ = model.model.get_rope_index(tokens, kinds, inputs["image_grid_thw"])
    seen = model.model.language_model(inputs_embeds=embedded, position_ids=positions)
    return model.lm_head(seen.last_hidden_state)[0]
