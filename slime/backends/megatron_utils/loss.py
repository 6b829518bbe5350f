"""Losses and advantages for users' plug-ins: groups come from Megatron's parallel state.

The functions are those of `slime.training`, which the framework itself calls with its groups as arguments. If Megatron's groups
do not exist (or Megatron was never imported) there is one rank, which owns everything. Logits are [T, V / tensor-parallel size]
and may have a leading dimension of 1.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from slime.training import advantages as estimation
from slime.training import loss as losses
from slime.training.context_parallel import ContextParallel, told_place
from slime.training.custom_functions import batch_of_custom_loss, icepop_function, vanilla_tis_function
from slime.training.keep_set import OFFSETS, TOKEN_IDS
from slime.training.packed_stream import PackedStream, pack_stream
from slime.training.rollout_data import Metrics, MicroBatch, Reducer, RolloutData

__all__ = [
    "apply_opd_kl_to_advantages",
    "compute_advantages_and_returns",
    "get_log_probs_and_entropy",
    "get_values",
    "icepop_function",
    "loss_function",
    "policy_loss_function",
    "sft_loss_function",
    "value_loss_function",
    "vanilla_tis_function",
]

_PARALLEL_STATE = "megatron.core.parallel_state"


def __getattr__(name: str) -> Any:
    if name != "mpu":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron.core import parallel_state

    return parallel_state


def compute_advantages_and_returns(args: argparse.Namespace, rollout_data: dict[str, Any]) -> None:
    """Set `kl`, `advantages`, `returns` (and `opd_reverse_kl`) on this rank's data, as `slime.training.advantages` tells.

    Collective over context-parallel ranks, and with `--normalize-advantages` over data-parallel ones too.
    """
    parallel_state = _laid_out()
    group = None if parallel_state is None else parallel_state.get_data_parallel_group(with_context_parallel=True)
    with _as_rollout_data(args, rollout_data) as data:
        estimation.compute_advantages_and_returns(args, data, group)


def apply_opd_kl_to_advantages(
    args: argparse.Namespace,
    rollout_data: dict[str, Any],
    advantages: list[torch.Tensor],
    student_log_probs: Sequence[torch.Tensor] | None,
) -> None:
    """Distillation: change the list `advantages` in place and set `rollout_data["opd_reverse_kl"]`."""
    with _as_rollout_data(args, rollout_data) as data:
        estimation.apply_opd_kl_to_advantages(args, data, advantages, student_log_probs)


def loss_function(
    args: argparse.Namespace, batch: dict[str, Any], logits: torch.Tensor, *, role: str = "actor"
) -> tuple[torch.Tensor, Metrics]:
    """The un-normalised loss of a micro-batch by `--loss-type`, and its metrics; see `slime.training.loss`."""
    return losses.loss_function(args, *_typed(args, batch, logits), _tensor_group(), role=role)


def policy_loss_function(
    args: argparse.Namespace, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Reducer
) -> tuple[torch.Tensor, Metrics]:
    """The policy loss, for a custom loss that adds to it; it takes the same arguments as a custom loss."""
    return losses.policy_loss_function(args, *_typed(args, batch, logits), _tensor_group(), sum_of_sample_mean)


def value_loss_function(
    args: argparse.Namespace, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Reducer
) -> tuple[torch.Tensor, Metrics]:
    """The critic's loss; `logits` are its outputs [T, 1]."""
    return losses.value_loss_function(args, *_typed(args, batch, logits), sum_of_sample_mean)


def sft_loss_function(
    args: argparse.Namespace, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Reducer
) -> tuple[torch.Tensor, Metrics]:
    """The loss of supervised fine-tuning."""
    return losses.sft_loss_function(args, *_typed(args, batch, logits), _tensor_group(), sum_of_sample_mean)


def get_log_probs_and_entropy(
    logits: torch.Tensor,
    *,
    args: argparse.Namespace,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    with_entropy_grad: bool = True,
    rollout_top_p_token_ids: Sequence[torch.Tensor] | None = None,
    rollout_top_p_token_offsets: Sequence[torch.Tensor] | None = None,
) -> dict[str, list[torch.Tensor]]:
    """`log_probs` and, if asked for, `entropy`: per sample one float32 tensor for the response tokens that this rank owns.

    Args:
        logits: of the packed samples, without division by the rollout temperature, which happens inside.
        unconcat_tokens: whole sequences, one tensor per sample.
        rollout_top_p_token_ids, rollout_top_p_token_offsets: these columns of the samples, for log-probs within the sets of
            tokens that sampling kept. A custom loss need not give them: None takes them from its batch, if these are tokens of
            it, and if it has them.
    """
    rows = _rows(logits)
    stream = _stream(args, unconcat_tokens, response_lengths, rows)
    if rollout_top_p_token_offsets is None:
        sets = _sets_of(unconcat_tokens)
    else:
        sets = {TOKEN_IDS: rollout_top_p_token_ids, OFFSETS: rollout_top_p_token_offsets}
    lengths = {"total_lengths": total_lengths, "response_lengths": response_lengths}
    batch = MicroBatch({"stream": stream, **lengths, **sets}, stream.cp)
    log_probs, entropy = losses.response_log_probs(
        args, batch, rows, _tensor_group(), with_entropy=with_entropy, with_entropy_grad=with_entropy_grad
    )
    results = {"log_probs": stream.split(log_probs)}
    return results if entropy is None else {**results, "entropy": stream.split(entropy)}


def get_values(
    logits: torch.Tensor,
    *,
    args: argparse.Namespace,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> dict[str, list[torch.Tensor]]:
    """`values`: a critic's outputs [T, 1] cut to responses, float32; arguments as in `get_log_probs_and_entropy`."""
    rows = _rows(logits)
    stream = _stream(args, unconcat_tokens, response_lengths, rows)
    return {"values": stream.split(losses.response_values(stream, rows))}


def _sets_of(tokens: Sequence[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """The columns of kept sets of these samples of the user's loss that runs; nothing where it has none, or the tokens are not
    its batch's."""
    batch = batch_of_custom_loss.get()
    if batch is None or OFFSETS not in batch:
        return {}
    place_of = {id(row): place for place, row in enumerate(batch["tokens"])}
    places = [place_of.get(id(row)) for row in tokens]
    if None in places:
        # Copies. Only for them the device has to be waited for.
        own, given = torch.cat(list(batch["tokens"])), torch.cat(list(tokens))
        if list(map(len, tokens)) != list(batch["total_lengths"]) or not torch.equal(own, given.to(own)):
            return {}
        places = list(range(len(tokens)))
    return {name: [batch[name][place] for place in places] for name in (TOKEN_IDS, OFFSETS)}


@contextlib.contextmanager
def _as_rollout_data(args: argparse.Namespace, rollout_data: dict[str, Any]) -> Iterator[RolloutData]:
    """`rollout_data` with the rank's place. Changes to it are carried over to `rollout_data` afterwards."""
    data = RolloutData(rollout_data, _context_parallel(args))
    yield data
    rollout_data.clear()
    rollout_data.update(data)


def _typed(args: argparse.Namespace, batch: dict[str, Any], logits: torch.Tensor) -> tuple[MicroBatch, torch.Tensor]:
    """The batch and the rows of its logits. It may be a plain dict, made of the batch that the user's function was given, or of
    the columns of samples whose logits these are: then it gets the stream that their tokens make."""
    rows = _rows(logits)
    stream = batch.get("stream") or _stream(args, batch["tokens"], batch["response_lengths"], rows)
    return MicroBatch({**batch, "stream": stream}, stream.cp), rows


def _rows(logits: torch.Tensor) -> torch.Tensor:
    return logits.squeeze(0) if logits.dim() == 3 else logits


def _stream(
    args: argparse.Namespace, tokens: Sequence[torch.Tensor], response_lengths: Sequence[int], rows: torch.Tensor
) -> PackedStream:
    """The stream that the logits `rows` belong to, however it was padded at its end."""
    cp = _context_parallel(args)
    # A contiguous part is cut where the padded whole is, so there the padding must be that of the logits.
    stream = pack_stream(list(tokens), list(response_lengths), len(rows) if cp.all_gather else 1, cp=cp)
    missing = len(rows) - len(stream.tokens)
    if missing < 0:
        raise ValueError(f"{len(rows)} rows of logits for samples that take {len(stream.tokens)}")
    return dataclasses.replace(
        stream, tokens=F.pad(stream.tokens, (0, missing)), next_tokens=F.pad(stream.next_tokens, (0, missing))
    )


def _laid_out() -> Any:
    """Megatron's parallel state, or None where it has no groups."""
    parallel_state = globals().get("mpu") or sys.modules.get(_PARALLEL_STATE)
    if parallel_state is None or not (dist.is_available() and dist.is_initialized()):
        return None
    return parallel_state if parallel_state.model_parallel_is_initialized() else None


def _context_parallel(args: argparse.Namespace) -> ContextParallel:
    if _laid_out() is None:
        return told_place()
    from slime.backends.megatron_utils.initialize import context_parallel

    return context_parallel(args)


def _tensor_group() -> dist.ProcessGroup | None:
    parallel_state = _laid_out()
    return None if parallel_state is None else parallel_state.get_tensor_model_parallel_group()
