"""The loss of layers that predict further tokens: what each of them predicts, and how it is averaged.

The model's own logits at position t of a sequence predict token t + 1. Prediction layer i = 1, 2, … has at position t the
state of the layer before it (of the model itself, for the first) and the embedding of token t + i, and predicts token
t + 1 + i (Gloeckle et al. 2024, arXiv 2404.19737; in this chained form DeepSeek-V3, arXiv 2412.19437).

A prediction counts if the predicted token is trained: in the response, with loss mask 1. Where it is made does not matter:
the last prompt positions count, predictions past the end of a sequence do not, and only after prompts of i tokens or fewer is
there a trained token that layer i cannot predict. The loss of a layer is the mean of −log p, at temperature 1, over all
predictions of the optimizer step that count. Executions, micro-batches and ranks weigh nothing, so that any split gives the
same number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from slime.algorithms.reduction import masked_sum
from slime.training.log_probs import calculate_log_probs_and_entropy
from slime.training.metric_reduction import all_reduce_sum
from slime.training.micro_batch import MicroBatch


def tokens_ahead(batch: MicroBatch, shift: int) -> torch.Tensor:
    """Per row of this rank's stream the token `shift` positions later in the same sequence, int64 [T]; 0 past its end."""
    return batch["stream"].rows_of([tokens[shift:] for tokens in batch["tokens"]])


def counted_rows(batch: MicroBatch, layer: int) -> torch.Tensor:
    """Per row of this rank's stream whether the prediction of layer `layer` (from 1) counts: 1 or 0, [T]."""
    masks = zip(batch["loss_masks"], batch["total_lengths"], batch["response_lengths"], strict=True)
    return batch["stream"].rows_of([F.pad(mask, (total - response, 0))[1 + layer :] for mask, total, response in masks])


def counted_predictions(
    loss_masks: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    layers: int,
    data_group: dist.ProcessGroup | None,
) -> list[float]:
    """How many predictions of each layer count in an optimizer step, over all ranks; at least 1. Collective over `data_group`.

    Args:
        loss_masks: of whole responses, one per sample of the step that this rank has.
        data_group: data-parallel ranks, without those of context parallelism, which have the same samples.
    """
    counts = torch.zeros(layers, dtype=torch.float64)
    for mask, total in zip(loss_masks, total_lengths, strict=True):
        prompt = total - len(mask)
        for layer in range(1, layers + 1):
            counts[layer - 1] += float(mask[max(1 + layer - prompt, 0) :].sum())
    return all_reduce_sum(counts, data_group).clamp(min=1.0).tolist()


def prediction_loss(
    batch: MicroBatch,
    logits: torch.Tensor,
    layer: int,
    tensor_group: dist.ProcessGroup | None,
    chunk_size: int = -1,
) -> torch.Tensor:
    """Sum of −log p over the predictions of layer `layer` (from 1) that count on this rank, a float32 scalar.

    Args:
        logits: [T, V / tensor-parallel size], the layer's, for the rows of `batch["stream"]`.
        chunk_size: rows per float32 chunk; 0 or less: by device.
    """
    labels = tokens_ahead(batch, 1 + layer)
    log_probs, _ = calculate_log_probs_and_entropy(logits, labels, tensor_group, chunk_size=chunk_size)
    return masked_sum(-log_probs, counted_rows(batch, layer))
