"""The names under which a checkpoint holds its tensors. They are read first, so that a model asks for its tensors by them.

Checkpoints are written with the same names for all models of one shape, whatever their layers are made of. Older checkpoints,
and those of other programs, may differ in two ways, and are read all the same:

- A norm in front of a linear layer, which Transformer Engine keeps in that layer, may have either name.
- Layers that are all alike may be stacked in one tensor, or be kept apart, as Megatron does if `--moe-layer-freq` is a pattern,
  even one of nothing but ones.

Transformer Engine's layers have objects beside their weights, for FP8, which depend on its version, and which other layers do
not have. Those that a checkpoint lacks stay as they are in the model.

A checkpoint also notes what of its model does not follow from shapes: some sizes, and settings of what its weights compute.
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

from slime.arguments.hf_config import differing_flags
from slime.backends.megatron_utils.hf_conversion import tensor_sizes
from slime.utils.errors import UserError

# Parts of the names of norms: of one that is a module of its own, and of one in the linear layer behind it.
_NORMS = (
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
    (".self_attention.q_layernorm.", ".self_attention.linear_q_up_proj.layer_norm_"),
    (".self_attention.kv_layernorm.", ".self_attention.linear_kv_up_proj.layer_norm_"),
)
_OPTIMIZER = "optimizer."
_STATE_OF_WEIGHT = re.compile(r"^optimizer\.state\.([^.]+)\.")
_LAYER_APART = re.compile(r"^decoder\.layers\.\d+\.")
# Tensors whose rows are padded for the tensor-parallel ranks of a run.
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")

# What these say no weight has, but other weights would be learned: a model that has other values gives other log-probs.
_COMPUTATION = (
    "layernorm_epsilon", "layernorm_zero_centered_gamma", "position_embedding_type", "rotary_base", "rotary_percent",
    "rotary_interleaved", "use_rope_scaling", "rope_scaling_factor", "rope_type", "rotary_scaling_factor", "mscale",
    "mscale_all_dim", "original_max_position_embeddings", "beta_fast", "beta_slow", "rotary_seq_len_interpolation_factor",
    "softmax_scale", "dsa_indexer_topk", "dsa_indexer_rope_interleave", "moe_router_topk", "moe_router_score_function",
    "moe_router_pre_softmax", "moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk",
)  # fmt: skip


class Stored:
    """The contents of a torch_dist directory.

    Args:
        shapes: the shapes of its tensors, by name.
        objects: names of its other objects, each with its place.
        float32: names of its tensors of this dtype.
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
        """Whether the model was saved in float32. The embedding tells, since single weights of a 16-bit model may be
        float32."""
        return VOCABULARY[0] in self._float32

    @functools.cached_property
    def states(self) -> frozenset[str]:
        """Names of the optimizer states that it holds, such as `exp_avg`."""
        return frozenset(found[1] for found in map(_STATE_OF_WEIGHT.match, self.shapes) if found is not None)

    @functools.cached_property
    def optimized(self) -> frozenset[str]:
        """Names of the weights whose optimizer states it holds."""
        return frozenset(_STATE_OF_WEIGHT.sub("", name) for name in self.shapes if name.startswith(_OPTIMIZER))


def read_stored(directory: Path) -> Stored:
    """Read the contents of a torch_dist directory from its metadata.

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
    """Change a model's description so that it asks for its tensors by their stored `names`, and only for objects out of
    `objects`."""
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


def model_notes(args: argparse.Namespace) -> dict[str, Any]:
    """What a checkpoint notes of its model: how the rows of fused queries, keys and values are divided, which does not follow
    from their number; how many rows of the vocabulary are not padding; and settings of what the weights compute."""
    sizes = tensor_sizes(args)
    heads = {"num_attention_heads": sizes.num_attention_heads, "num_query_groups": sizes.num_query_groups}
    computation = {name: vars(args)[name] for name in _COMPUTATION if name in vars(args)}
    return {"attention_heads": heads, "vocab_size": args.vocab_size, "computation": computation}


def other_sizes(args: argparse.Namespace, common: Mapping[str, Any], stored: Stored) -> list[str]:
    """Lines that say how the sizes of a checkpoint's model differ from those of the flags.

    Args:
        common: the checkpoint's notes; in older ones the vocabulary, or everything, is missing.
    """
    own = model_notes(args)
    noted = {"vocab_size": common.get("vocab_size")}
    if not args.multi_latent_attention:
        # In latent attention heads simply follow each other, so their division needs no check.
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


def other_settings(args: argparse.Namespace, common: Mapping[str, Any]) -> list[str]:
    """Lines that say in which settings of what its weights compute a checkpoint differs from the flags.

    Args:
        common: the checkpoint's notes; older ones have no settings.
    """
    return [
        f"{flag} {there} in the checkpoint, and {here} by the flags"
        for flag, here, there in differing_flags(args, common.get("computation", {}))
    ]
