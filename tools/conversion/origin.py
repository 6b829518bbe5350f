"""Checks that a Megatron checkpoint and the Hugging Face directory that it came from are of the same model.

Rows of fused layers are told apart by numbers of heads, so a checkpoint that is read with another model's numbers would become
wrong weights of the right shapes. Everything that both sides know is compared: the sizes that the checkpoint notes of its
model, the shapes that `config.json` implies and, if the directory has weights, their names and shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slime.models.family import Family
from slime.models.tensor_layouts import QueryKeyValue, TensorSizes
from slime.utils.errors import UserError
from slime.weights.quantised_checkpoint import open_checkpoint

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EMBEDDING = "embedding.word_embeddings.weight"
_QKV = ".linear_qkv.weight"
_NAMED = 10

# Shapes of a model's parameters, by global Megatron name.
Shapes = Mapping[str, Sequence[int]]


def require_same_model(
    checkpoint: Path,
    origin: Path,
    shapes: Shapes,
    noted: Mapping[str, int],
    family: Family,
    sizes: TensorSizes,
    flags: Mapping[str, Any],
) -> None:
    """Compare the sizes of a checkpoint with those of the config of `origin`.

    Args:
        noted: sizes of the model that the checkpoint has noted, by flag; that of the vocabulary is always there.
        sizes: numbers of heads of `origin`, and the rows that the vocabulary is to have.
        flags: the model's flags by the config of `origin`.

    Raises:
        UserError: they are of different models, or the vocabulary has fewer rows than are asked for.
    """
    rows = shapes[_EMBEDDING][0] if _EMBEDDING in shapes else sizes.vocab_size
    if sizes.vocab_size > rows:
        raise UserError(
            f"{checkpoint} has {rows} rows of vocabulary, and --vocab-size (without it config.json of {origin}) asks for "
            f"{sizes.vocab_size}"
        )
    differences = [
        f"{what} {found} in the checkpoint, {expected} by config.json"
        for what, found, expected in _comparisons(shapes, noted, family, sizes, flags)
        if found != expected
    ]
    if differences:
        raise UserError(
            f"{checkpoint} and --origin-hf-dir {origin} are of different models: {'; '.join(differences[:_NAMED])}"
        )


def _comparisons(
    shapes: Shapes, noted: Mapping[str, int], family: Family, sizes: TensorSizes, flags: Mapping[str, Any]
) -> Iterator[tuple[str, int, int]]:
    """(what is compared, size in the checkpoint, size by the config)."""
    layers = {int(match[1]) for name in shapes if (match := _LAYER.match(name))}
    yield "number of layers", max(layers, default=-1) + 1, flags["num_layers"]
    yield "vocab_size", noted["vocab_size"], flags["vocab_size"]
    if _EMBEDDING in shapes:
        yield "hidden size", shapes[_EMBEDDING][1], flags["hidden_size"]
    heads, groups = sizes.num_attention_heads, sizes.num_query_groups
    width = flags.get("kv_channels") or flags["hidden_size"] // heads
    for name, shape in shapes.items():
        layout = family.find(name)[0].layout
        if not isinstance(layout, QueryKeyValue):
            continue
        if name.endswith(_QKV):
            for flag, expected in (("num_attention_heads", heads), ("num_query_groups", groups)):
                yield f"{flag} of {name}", noted.get(flag, expected), expected
            attention = name.removesuffix(_QKV)
            projection, norm = (shapes.get(f"{attention}.{part}.weight") for part in ("linear_proj", "q_layernorm"))
            if projection is not None:
                yield f"columns of {attention}.linear_proj.weight", projection[1], heads * width
            if norm is not None:
                expected = heads * width if family.qk_norm_spans_heads else width
                yield f"channels of {attention}.q_layernorm.weight", norm[0], expected
        yield f"rows of {name}", shape[0], (layout.heads_per_query * heads + 2 * groups) * width


def require_same_tensors(
    checkpoint: Path, origin: Path, shapes: Shapes, family: Family, sizes: TensorSizes, *, ignores_rows: bool
) -> set[str]:
    """Compare the Hugging Face tensors that a checkpoint makes with those of `origin`; returns their names.

    Args:
        ignores_rows: numbers of rows of embedding and head may differ, because the caller asks for its own.

    Raises:
        UserError: `origin` has weights, and lacks a tensor of the checkpoint, or has it in another shape.
    """
    made: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        rule, hf_names = family.find(name)
        try:
            parts = rule.layout.split(torch.empty(tuple(shape), device="meta"), sizes)
        except RuntimeError as error:
            raise UserError(f"{checkpoint}: {name} of {list(shape)} does not fit the config of {origin}") from error
        made |= {hf_name: tuple(part.shape) for hf_name, part in zip(hf_names, parts, strict=True)}
    if not any(origin.glob("*.safetensors")):
        return set(made)
    opened = open_checkpoint(origin)
    surplus = sorted(made.keys() - opened.names())
    if surplus:
        raise UserError(
            f"{checkpoint} has {len(surplus)} tensors that {origin} has not: {', '.join(surplus[:_NAMED])}; "
            "give the directory that the checkpoint came from"
        )
    vocabulary = {hf_name for name in (_EMBEDDING, "output_layer.weight") for hf_name in family.find(name)[1]}
    differences = []
    for hf_name, shape in sorted(made.items()):
        stored, first = tuple(opened.tensor(hf_name).shape), ignores_rows and hf_name in vocabulary
        if stored[first:] != shape[first:]:
            differences.append(f"{hf_name} is {list(shape)}, and {list(stored)} there")
    if differences:
        raise UserError(
            f"{checkpoint} and --origin-hf-dir {origin} are of different models: {'; '.join(differences[:_NAMED])}"
        )
    return set(made)
