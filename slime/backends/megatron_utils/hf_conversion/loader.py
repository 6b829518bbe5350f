"""Hugging Face checkpoint -> this rank's Megatron parameters.

Tensors are streamed: each is read, arranged, cut and copied into its parameter before the next, so the memory needed
beside the model is that of the largest parameter. Names are compared first; nothing is loaded from a checkpoint whose
names do not fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from slime.arguments.hf_config import read_hf_config
from slime.backends.megatron_utils.hf_conversion.family import Family, Rule, strip_wrappers
from slime.backends.megatron_utils.hf_conversion.layouts import ModelShape
from slime.backends.megatron_utils.hf_conversion.registry import family_of_directory
from slime.backends.megatron_utils.hf_conversion.safetensors_directory import SafetensorsDirectory
from slime.utils.errors import UserError

_LISTED = 20


@torch.no_grad()
def load_hf_weights(args: Any, model_chunks: Iterable[torch.nn.Module], hf_dir: str | Path) -> int:
    """Fill the parameters of `model_chunks` from the HF directory `hf_dir`, converted to the parameters' dtype.

    Returns:
        0, the iteration at which such a run starts.

    Raises:
        UserError: unsupported `model_type`; tensors missing or surplus (all are listed); a shape that the flags
        contradict.
    """
    from megatron.core import parallel_state

    family = family_of_directory(hf_dir)
    source = SafetensorsDirectory(hf_dir)
    plan = _plan(family, model_chunks)
    _check_names(plan, source, family, hf_dir)
    shape = ModelShape.from_args(args)
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    for name, parameter, rule, hf_names in plan:
        tensors = [source.tensor(hf_name) for hf_name in hf_names]
        shard = rule.layout.shard(rule.layout.merge(tensors, shape), rank, size)
        if shard.shape != parameter.shape:
            raise UserError(
                f"{hf_dir}: {', '.join(hf_names)} of shape {[list(tensor.shape) for tensor in tensors]} give "
                f"{list(shard.shape)} for {strip_wrappers(name)}, but the model flags ask for {list(parameter.shape)}; "
                "make the shape flags agree with the checkpoint's config.json"
            )
        parameter.copy_(shard)
    return 0


def expected_hf_names(hf_dir: str | Path) -> set[str]:
    """Names of the tensors that the export of a model of this directory has: those on disk, a tied head and buffers
    without weights left out.

    Raises:
        UserError: unsupported `model_type`, or no safetensors files.
    """
    names = SafetensorsDirectory(hf_dir).names()
    family = family_of_directory(hf_dir)
    return {name for name in names if not _may_be_ignored(name, family, hf_dir)}


def _plan(
    family: Family, model_chunks: Iterable[torch.nn.Module]
) -> list[tuple[str, torch.nn.Parameter, Rule, tuple[str, ...]]]:
    named = [item for chunk in model_chunks for item in chunk.named_parameters()]
    return [(name, parameter, *family.find(name)) for name, parameter in named]


def _check_names(plan: list, source: SafetensorsDirectory, family: Family, hf_dir: str | Path) -> None:
    needed = {hf_name for *_, hf_names in plan for hf_name in hf_names}
    present = source.names()
    missing = sorted(needed - present)
    surplus = sorted(name for name in present - needed if not _may_be_ignored(name, family, hf_dir))
    problems = [
        f"{len(names)} {what}: {', '.join(names[:_LISTED])}{', ...' if len(names) > _LISTED else ''}"
        for what, names in (("missing", missing), ("not in the model", surplus))
        if names
    ]
    if problems:
        raise UserError(
            f"{hf_dir} does not fit the model flags (layers, tied or untied embeddings, biases, norms): "
            f"{'; '.join(problems)}"
        )


def _may_be_ignored(name: str, family: Family, hf_dir: str | Path) -> bool:
    if name == "lm_head.weight":
        return bool(read_hf_config(hf_dir, flag="checkpoint").get("tie_word_embeddings", False))
    return family.ignored.search(name) is not None
