"""Qwen3.5 that is trained on texts and images; its tower gives decoder layers no features of their own."""

from typing import Any

from megatron.core.models.gpt import GPTModel

from slime_plugins.models.sight import seeing_model


def get_qwen3_5_vl_model_provider(
    pre_process: bool, post_process: bool, vp_stage: int | None = None, *, args: Any
) -> GPTModel:
    """The model of the checkpoint, which takes images, as `--custom-model-provider-path` asks for it."""
    return seeing_model(args, pre_process, post_process, vp_stage, sections=(11, 11, 10))
