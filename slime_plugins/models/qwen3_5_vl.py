"""Qwen3.5 with a vision tower: the language model is trained, on text.

The tower's weights (`model.visual.*`) are no parameters here. Engines keep those of their checkpoint, whose answers to images
therefore follow the trained language model, and exports copy them from the origin.
"""

from typing import Any

from megatron.core.models.gpt import GPTModel

from slime.backends.megatron_utils.model_provider import get_model_provider_func


def get_qwen3_5_vl_model_provider(
    pre_process: bool, post_process: bool, vp_stage: int | None = None, *, args: Any
) -> GPTModel:
    """The language model of the checkpoint (`model.language_model.*`), as `--custom-model-provider-path` asks for it."""
    return get_model_provider_func(args)(pre_process, post_process, vp_stage)
