"""A tiny random Qwen3.5 or Qwen3-VL with its vision tower, and the batch of `grpo_batch` with images in some of its prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from slime.utils.types import Sample
from tests.support.models.grpo_batch import make_samples
from tests.support.models.tiny_families import TINY_FAMILIES, VOCABULARY
from tests.support.models.tokenizer import build_tokenizer
from tests.support.models.vision import PLACEHOLDER, TEMPLATE

PROVIDER = "slime_plugins.models.qwen3_5_vl.get_qwen3_5_vl_model_provider"
DEEP_PROVIDER = "slime_plugins.models.qwen3_vl.get_qwen3_vl_model_provider"
# Ids for begin, feature, end, and frame of a video: the last ones of the vocabulary.
BEGIN, IMAGE, END, VIDEO = range(VOCABULARY - 4, VOCABULARY)
# Two by two patches become one feature.
MERGE = 2
# Index of a sample -> sizes of its images, (time, height, width) in patches. Other samples have only text. Samples 2 and 5 have
# the same image.
GRIDS = {2: [(1, 4, 6)], 4: [(1, 2, 2)], 5: [(1, 4, 6)], 7: [(1, 2, 4), (1, 6, 2)]}
_PATCH = 12


def write_seeing_model(
    directory: Path,
    model_type: str = "qwen3_5",
    vocab_size: int = VOCABULARY,
    marks: tuple[int, int, int, int] = (BEGIN, IMAGE, END, VIDEO),
) -> Any:
    """Save a random float32 model and return it as a model of transformers. In each head three pairs of channels are rotated by
    time, three by height and two by width; Qwen3.5 does not rotate the other half of the channels. In Qwen3-VL three of four
    layers get features of their own. `marks`: the ids of begin, feature, end and frame of a video."""
    family, is_deep = TINY_FAMILIES[model_type], model_type.startswith("qwen3_vl")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
    vision = {**family.entries["vision"], "depth": 2, "num_position_embeddings": 16, "spatial_merge_size": MERGE}
    entries = {**family.entries, "head_dim": 16, "rope_parameters": rope, "vision": vision}
    if is_deep:
        entries |= {"layers": 4, "vision": {**vision, "depth": 4, "deepstack_visual_indexes": [0, 1, 2]}}
    else:
        # Engines read the one beside the others.
        half = {"partial_rotary_factor": 0.5}
        entries |= {"head_dim": 32, "rope_parameters": {**rope, **half}, **half}
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
    whole = dict(zip(names, marks, strict=True))
    return family.write(directory, model_type=model_type, vocab_size=vocab_size, whole=whole, **entries)


# Qwen's image processor, inside a processor of texts and images that writes images into a prompt as Qwen's does and, unlike
# Qwen's, needs no processor of videos.
_PROCESSOR = """
from transformers.models.paddleocr_vl.processing_paddleocr_vl import PaddleOCRVLProcessor


class PictureProcessor(PaddleOCRVLProcessor):
    image_processor_class = "Qwen2VLImageProcessorPil"

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        tokenizer.image_token = "<|image_pad|>"
        tokenizer.image_token_id = tokenizer.convert_tokens_to_ids(tokenizer.image_token)
        super().__init__(image_processor, tokenizer, chat_template=chat_template, **kwargs)
"""


def write_chatting_model(directory: Path) -> Any:
    """`write_seeing_model` with a byte-level tokenizer, a chat template and Qwen's image processor. Images have at most 16
    patches.

    The processor is code in the checkpoint (`--trust-remote-code`).
    """
    names = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
    tokenizer = build_tokenizer(TEMPLATE.replace(PLACEHOLDER, "".join(names[:3])))
    tokenizer.add_special_tokens({"additional_special_tokens": list(names)})
    marks = tokenizer.convert_tokens_to_ids(list(names))
    model = write_seeing_model(directory, vocab_size=len(tokenizer), marks=tuple(marks))
    tokenizer.save_pretrained(str(directory))
    (directory / "picture_processor.py").write_text(_PROCESSOR)
    code = {"AutoProcessor": "picture_processor.PictureProcessor"}
    sizes = {"patch_size": 2, "temporal_patch_size": 1, "merge_size": MERGE, "min_pixels": 64, "max_pixels": 64}
    files = {
        "processor_config": {"processor_class": "PictureProcessor", "auto_map": code},
        "preprocessor_config": {"image_processor_type": "Qwen2VLImageProcessor", **sizes},
    }
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return model


def features_of(grid: tuple[int, int, int]) -> int:
    """The number of features that the tower makes of an image."""
    return int(np.prod(grid)) // MERGE**2


def processed(grids: list[tuple[int, int, int]], seed: int) -> dict[str, Any]:
    """The output of a processor for images of these grids."""
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
    is_trained = torch.ones(sample.response_length) if sample.loss_mask is None else torch.tensor(sample.loss_mask)
    generated = kinds[:, -sample.response_length :] * is_trained.int()
    if kinds[:, : -sample.response_length].sum() == inputs["image_grid_thw"].prod(-1).sum() // MERGE**2:
        generated = kinds[:, -sample.response_length :].clone()
    generated[:, sample.metadata.get("generated_and_masked", [])] = 1
    if not generated.any():
        return model(tokens, **inputs, mm_token_type_ids=kinds).logits[0]
    # Image tokens in the response were generated and are ordinary tokens; the class would take them for features.
    kinds[:, -sample.response_length :] -= generated
    embedded = model.get_input_embeddings()(tokens)
    features = model.get_image_features(**inputs)
    embedded = embedded.masked_scatter(kinds[..., None].bool(), torch.cat(features.pooler_output))
    positions, _ = model.model.get_rope_index(tokens, kinds, inputs["image_grid_thw"])
    deep = features.get("deepstack_features")
    of_layers = {"visual_pos_masks": kinds.bool(), "deepstack_visual_embeds": deep} if deep else {}
    seen = model.model.language_model(inputs_embeds=embedded, position_ids=positions, **of_layers)
    return model.lm_head(seen.last_hidden_state)[0]
