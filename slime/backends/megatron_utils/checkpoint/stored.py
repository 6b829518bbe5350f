"""What a checkpoint holds, and under which names: known before its tensors are read, so that a model asks for them by these.

What is written has the same names for all models of one shape, whatever their layers are made of. Older checkpoints, and those
of others, differ in two ways, and are read all the same:

- A norm in front of a linear layer, which Transformer Engine keeps in that layer, has the one name or the other.
- Layers that are all alike are one tensor, in which they are stacked; or they are kept apart, as Megatron does it where
  `--moe-layer-freq` is a pattern, even one of nothing but ones.

What layers of Transformer Engine keep beside weights, for FP8, other layers have not, and not every version of it has the same.
What a checkpoint lacks of that stays as it is in the model.

The sizes of its model that a checkpoint notes, because shapes do not tell them.
"""

from __future__ import annotations

import argparse
import functools
import pickle
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from slime.backends.megatron_utils.hf_conversion import tensor_sizes
from slime.utils.errors import UserError

# What names of norms begin with where they stand alone, and where they are part of the linear layer behind them.
_NORMS = (
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
    (".self_attention.q_layernorm.", ".self_attention.linear_q_up_proj.layer_norm_"),
    (".self_attention.kv_layernorm.", ".self_attention.linear_kv_up_proj.layer_norm_"),
)
_OPTIMIZER = "optimizer."
_STATE_OF_WEIGHT = re.compile(r"^optimizer\.state\.[^.]+\.")
_LAYER_APART = re.compile(r"^decoder\.layers\.\d+\.")
# Their rows are padded for the tensor-parallel ranks of a run.
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


class Stored:
    """What a torch_dist directory holds.

    Args:
        shapes: of its tensors, by name.
        objects: names of what it holds beside tensors, each with its place.
        float32: names of those of its tensors that have this dtype.
    """

    def __init__(
        self, shapes: Mapping[str, Sequence[int]], objects: Collection[str] = (), float32: Collection[str] = ()
    ) -> None:
        self.shapes, self.objects, self._float32 = shapes, frozenset(objects), frozenset(float32)

    @functools.cached_property
    def weights(self) -> frozenset[str]:
        """Names of the model's tensors."""
        return frozenset(name for name in self.shapes if not name.startswith(_OPTIMIZER))

    @property
    def has_float32_weights(self) -> bool:
        """Whether the model was saved in float32. Among weights of 16 bits some have it all the same, but not the embedding."""
        return VOCABULARY[0] in self._float32

    @functools.cached_property
    def optimized(self) -> frozenset[str]:
        """Names of the weights of which it holds what an optimizer keeps."""
        return frozenset(_STATE_OF_WEIGHT.sub("", name) for name in self.shapes if name.startswith(_OPTIMIZER))


def read_stored(directory: Path) -> Stored:
    """What the torch_dist directory holds.

    Raises:
        UserError: its metadata are missing or damaged.
    """
    try:
        entries = FileSystemReader(directory).read_metadata().state_dict_metadata
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = str(error) or "it is cut off"
        raise UserError(
            f"{directory / '.metadata'} cannot be read: {reason}; give a checkpoint that is whole"
        ) from error
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    shapes = {name: tuple(entry.size) for name, entry in tensors.items()}
    float32 = [name for name, entry in tensors.items() if entry.properties.dtype == torch.float32]
    return Stored(shapes, entries.keys() - shapes.keys(), float32)


def keeps_layers_apart(names: Collection[str]) -> bool:
    """Whether the layers of a model of these names are not stacked."""
    return any(map(_LAYER_APART.match, names))


def ask_by_stored_names(described: dict[str, Any], names: Collection[str], objects: Collection[str]) -> None:
    """Have a model's description ask for its tensors by those of the stored `names` that mean them, and for no other objects
    than `objects`."""
    for name, entry in described.items():
        if isinstance(entry, ShardedObject) and entry.unique_key not in objects:
            described[name] = LocalNonpersistentObject(entry.data)
        elif isinstance(entry, ShardedTensor | ShardedTensorFactory) and entry.key not in names:
            entry.key = next((other for other in _other_names(entry.key) if other in names), entry.key)


def _other_names(name: str) -> Iterator[str]:
    for alone, fused in _NORMS:
        for one, other in ((alone, fused), (fused, alone)):
            if one in name:
                yield name.replace(one, other)


def model_sizes(args: argparse.Namespace) -> dict[str, Any]:
    """What a checkpoint notes of its model: how the rows of fused queries, keys and values are divided, which their number does
    not tell, and how many rows of the vocabulary are no padding."""
    sizes = tensor_sizes(args)
    heads = {"num_attention_heads": sizes.num_attention_heads, "num_query_groups": sizes.num_query_groups}
    return {"attention_heads": heads, "vocab_size": args.vocab_size}


def other_sizes(args: argparse.Namespace, common: Mapping[str, Any], stored: Stored) -> list[str]:
    """What differs between the sizes of a checkpoint's model and those of the flags, in words.

    Args:
        common: what the checkpoint notes; older ones note no vocabulary, or nothing.
    """
    own = model_sizes(args)
    noted = {"vocab_size": common.get("vocab_size")}
    if not args.multi_latent_attention:
        # Its projections have the heads one behind the other.
        noted |= common.get("attention_heads", {})
    wanted = {**own["attention_heads"], "vocab_size": own["vocab_size"]}
    lines = [
        f"--{name.replace('_', '-')} {size} in the checkpoint, and {wanted[name]} by the flags"
        for name, size in noted.items()
        if size is not None and size != wanted[name]
    ]
    if noted["vocab_size"] is None:
        rows = {name: stored.shapes[name][0] for name in VOCABULARY if name in stored.shapes}
        lines += [
            f"{name} has {found} rows in the checkpoint, and --vocab-size {args.vocab_size} asks for more"
            for name, found in rows.items()
            if found < args.vocab_size
        ]
    return lines
