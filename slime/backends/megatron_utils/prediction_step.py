"""Multi-token prediction in one optimizer step: the term of the objective, and its metrics."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from slime.backends.megatron_utils.parameter_names import unwrap_model
from slime.backends.megatron_utils.prediction_layers import embed_tokens, embedding_weight, predict
from slime.training.micro_batch import Metrics, MicroBatch
from slime.training.multi_token_prediction import counted_predictions, prediction_loss, tokens_ahead


class PredictionStep:
    """What the steps of all micro-batches share. Collective over data-parallel ranks and pipeline stages.

    Args:
        model: this rank's wrapped chunks, whose layers are trained.
        positions: the step's samples in this rank's data.
        denominator: of the step; what `loss` returns is to be divided by it, as the sums of all losses are.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        model: list[torch.nn.Module],
        rollout_data: dict[str, Any],
        positions: Sequence[int],
        denominator: float,
    ) -> None:
        self._args = args
        self._model = unwrap_model(model[-1])
        self._embedding = embedding_weight(model)
        masks, totals = ([rollout_data[name][i] for i in positions] for name in ("loss_masks", "total_lengths"))
        data_group = parallel_state.get_data_parallel_group()
        counts = counted_predictions(masks, totals, args.mtp_num_layers, data_group)
        self._weights = [denominator / count for count in counts]

    def loss(self, batch: MicroBatch) -> tuple[torch.Tensor, Metrics]:
        """The term of the micro-batch that the model has just seen, `--mtp-loss-scaling-factor` times the mean over layers.

        Returns:
            (term, metrics without that factor: `mtp_{i}_loss` of each layer, and `mtp_loss`, their mean).
        """

        def embed(ahead: int) -> torch.Tensor:
            return embed_tokens(self._embedding, tokens_ahead(batch, ahead), self._model.config)

        tensor_group = parallel_state.get_tensor_model_parallel_group()
        losses = [
            prediction_loss(batch, logits, layer, tensor_group, self._args.log_probs_chunk_size) * weight
            for layer, (logits, weight) in enumerate(zip(predict(self._model, embed), self._weights, strict=True), 1)
        ]
        mean = torch.stack(losses).mean()
        metrics = {f"mtp_{layer}_loss": loss.detach() for layer, loss in enumerate(losses, 1)}
        return self._args.mtp_loss_scaling_factor * mean, {**metrics, "mtp_loss": mean.detach()}
