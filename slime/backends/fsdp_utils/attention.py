"""The attention of transformers' models over packed streams: which kernel computes it, and which models let it.

A model of transformers asks for its attention by a name. Under the name here it gets attention in which each sequence of a
stream sees itself alone, even if context-parallel ranks hold parts of it: see `slime.training.stream_attention`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from slime.models.fsdp import FLASH_ATTENTION
from slime.training.packed_stream import PackedStream
from slime.training.stream_attention import (
    Kernel,
    attend_over_context,
    attend_to_each_sequence,
    causal_varlen_attention,
    flash_attention,
)
from slime.utils.device import get_accelerator
from slime.utils.errors import UserError

# The name under which this attention is registered with transformers.
_OF_STREAMS = "slime_streams"


def kernel_of(args: argparse.Namespace) -> Callable[[], Kernel]:
    """A function that returns the kernel of `--attn-implementation` for streams of 16-bit types on CUDA.

    Raises:
        UserError: its package is missing on this machine, or has nothing to compute on.
    """
    named = args.attn_implementation
    has_kernels = args.bf16 and not get_accelerator().shares_host_memory
    for name in FLASH_ATTENTION if named == "auto" and has_kernels else {named} & FLASH_ATTENTION.keys():
        module, package = FLASH_ATTENTION[name]
        try:
            kernel = flash_attention(module)
        except ImportError as error:
            if named == "auto":
                continue
            raise UserError(
                f"--attn-implementation {name} needs the package {package}, which cannot be imported here ({error}); "
                "install it, or give --attn-implementation auto"
            ) from error
        if not has_kernels:
            raise UserError(
                f"--attn-implementation {name} computes on GPUs and in 16 bits alone; give --attn-implementation auto, "
                "or --bf16 on a GPU"
            )
        return lambda: kernel
    return causal_varlen_attention


def attend_to_streams(model: torch.nn.Module, args: argparse.Namespace) -> bool:
    """Give a model this attention; returns whether it takes it. If not, transformers' own computes, with a mask of the whole
    stream.

    Raises:
        UserError: it does not take it, and the flags ask for what transformers' own attention cannot do.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    named = args.attn_implementation
    if named == "eager":
        return False
    # A model that supports flash attention passes all that this attention needs: its masks are causal, or windows.
    if model._supports_flash_attn and model._can_set_attn_implementation():
        ALL_ATTENTION_FUNCTIONS.register(_OF_STREAMS, attend)
        model.set_attn_implementation(_OF_STREAMS)
        return True
    flags = [f"--context-parallel-size {args.context_parallel_size}"] * (args.context_parallel_size > 1)
    flags += [f"--attn-implementation {named}"] * (named in FLASH_ATTENTION)
    if flags:
        raise UserError(
            f"{', '.join(flags)}: {type(model).__name__} has attention that knows neither packed streams nor flash "
            "attention; drop it"
        )
    return False


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    packed_stream: PackedStream | None = None,
    stream_kernel: Callable[[], Kernel] | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of this rank's rows, in the interface that transformers has for it. Collective over a context-parallel group.

    Args:
        query: [1, heads, T, dim]; key, value: [1, groups, T, dim].
        packed_stream, stream_kernel: keywords with which the model was called.
        sliding_window: how many keys a row sees, its own among them.

    Returns:
        [1, T, heads, dim of a value], and no weights.

    Raises:
        UserError: the model does not pass its keywords on, caps scores or has sinks.
    """
    if packed_stream is None or softcap is not None or s_aux is not None:
        raise UserError(
            f"{type(module).__name__} has attention with more than a packed stream, causal masks and windows; give "
            "--attn-implementation eager, without --context-parallel-size"
        )
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    longest = max(packed_stream.sequence_lengths)
    window = sliding_window if sliding_window is not None and sliding_window < longest else None
    has_kernel = query.is_cuda and query.dtype != torch.float32
    if packed_stream.cp.size == 1 and window is None and not has_kernel:
        output = attend_to_each_sequence(query, key, value, packed_stream.sequence_lengths, scale)
    else:
        output = attend_over_context(query, key, value, packed_stream, scale, kernel=stream_kernel, window=window)
    return output.unflatten(-1, (query.shape[1], -1))[None], None
