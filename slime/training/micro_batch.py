"""What every loss is made of: a micro-batch, the log-probs of its responses, and the one reducer of all terms.

A micro-batch is a dict with one entry per sample under every key (`tokens`, `loss_masks`, `advantages`, …) plus `stream`, the
packed stream that the logits belong to. Under context parallelism `tokens` and `loss_masks` are whole; what is computed per
response token (`log_probs`, `advantages`, …) is this rank's part, as the loss's own terms are.

Masked tokens hold 0 in all that a loss is made of, from the columns of the batch to the new log-probs, whatever was there: no
ratio or weight is formed of them, so that NaN and infinity reach neither value nor gradient.

Per rollout, a term is reduced to the sum over samples of masked means with the denominators of whole executions; per token, to
the masked sum. The caller divides by the step's denominator (rollouts, or trained tokens) and by nothing else, so splitting a
step over micro-batches and ranks changes neither loss nor gradient.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch

from slime.algorithms.reduction import masked_sum, sum_of_sample_mean, zero_masked_tokens
from slime.training.context_parallel import slice_responses
from slime.training.keep_set import kept_tokens
from slime.training.log_probs import calculate_log_probs_and_entropy
from slime.training.packed_stream import PackedStream
from slime.training.rollout_batch import PER_RESPONSE_TOKEN
from slime.utils.errors import UserError

MicroBatch = dict[str, Any]
Reducer = Callable[[torch.Tensor], torch.Tensor]
Metrics = dict[str, torch.Tensor]


def response_log_probs(
    args: argparse.Namespace,
    batch: MicroBatch,
    logits: torch.Tensor,
    tensor_group: torch.distributed.ProcessGroup | None,
    *,
    with_entropy: bool,
    with_entropy_grad: bool = False,
    temperature: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs (and entropy) of this rank's response tokens, float32 [their number].

    Args:
        logits: [T, V / tensor-parallel size], divided by the temperature inside. Where the batch has the sets of tokens that
            top-p sampling kept, log-probs are those within the sets; the entropy is always that of the whole distribution.
        temperature: unless set that of the rollout; 1 in supervised fine-tuning, whose tokens nobody sampled.
    """
    stream: PackedStream = batch["stream"]
    if temperature is None:
        temperature = 1.0 if args.loss_type == "sft_loss" else args.rollout_temperature
    log_probs, entropy = calculate_log_probs_and_entropy(
        logits,
        stream.next_tokens,
        tensor_group,
        with_entropy=with_entropy,
        chunk_size=args.log_probs_chunk_size,
        log_prob_keep_mask=kept_tokens(batch),
        with_entropy_grad=with_entropy_grad,
        temperature=temperature,
    )
    return stream.responses(log_probs), None if entropy is None else stream.responses(entropy)


def without_masked_tokens(batch: MicroBatch) -> MicroBatch:
    """The batch with 0 at masked tokens in its per-token columns; columns of the user's own stay as they are."""
    columns = {name: batch[name] for name in PER_RESPONSE_TOKEN if name in batch}
    return {**batch, **zero_masked_tokens(columns, local_loss_masks(batch))}


def where_trained(batch: MicroBatch, *per_token: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What is `per_token`, each flat over this rank's response tokens, with 0 and no gradient at masked ones."""
    masks = local_loss_masks(batch)
    if not masks:
        return per_token
    trained = (torch.cat(masks) != 0).to(per_token[0].device)
    return tuple(torch.where(trained, values, 0.0) for values in per_token)


def response_values(stream: PackedStream, outputs: torch.Tensor) -> torch.Tensor:
    """A critic's value before every response token of this rank, float32 [their number], from its outputs [T, 1].

    The value of a token is what was predicted before it was chosen, like its log-prob. No temperature scales it.
    """
    return stream.responses(outputs.squeeze(-1).float())


def make_reducer(
    args: argparse.Namespace, batch: MicroBatch, loss_masks: Sequence[torch.Tensor] | None = None
) -> Reducer:
    """Reduce a flat tensor over this rank's response tokens of `batch` to the sum that the step's denominator divides.

    Args:
        loss_masks: whole responses, instead of those of the batch. They change what is summed, never what it is divided by.
    """
    masks = local_loss_masks(batch, loss_masks)
    if args.calculate_per_token_loss:
        return lambda values: masked_sum(values, masks)
    return lambda values: sum_of_sample_mean(values, masks, batch["rollout_mask_sums"])


def local_loss_masks(batch: MicroBatch, loss_masks: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """Per sample the mask of the response tokens that this context-parallel rank owns."""
    masks = batch["loss_masks"] if loss_masks is None else loss_masks
    return slice_responses(masks, batch["total_lengths"], batch["response_lengths"], batch["stream"].cp)


def per_token_column(batch: MicroBatch, name: str, needed_by: str) -> torch.Tensor:
    """A column of the batch, flat over this rank's response tokens.

    Raises:
        UserError: the batch has none, though `needed_by` (a flag) needs it.
    """
    if name not in batch:
        raise UserError(f"{needed_by} needs `{name}`, and the samples of this rollout have none")
    return torch.cat(list(batch[name]))
