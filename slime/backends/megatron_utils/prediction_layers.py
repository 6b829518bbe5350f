"""Layers for multi-token prediction, on the last pipeline stage or before it, beside a model that knows nothing of them.

They are Megatron's (`MultiTokenPredictionBlock`), under the names that its checkpoints have: `mtp.layers.{i}`. Megatron's
`GPTModel` is not given them, since it would run them in every pass, train the embeddings and the whole model by their loss,
and average that per micro-batch. Here the model stays as it is, in every pass and for the critic. In a training pass its last
hidden states are kept, and the layers run on them as constants, with constant embeddings and output weights. So only the layers
learn from their loss.

A pipeline's layout may put them on an earlier stage, behind all layers of the decoder, and the final norm with them. In a
training pass that stage sends on the model's last hidden states and, behind their rows, those of each prediction layer; the
last stage takes them apart and computes the logits of all.

The model's own logits at position t of a sequence predict token t + 1. Prediction layer i = 1, 2, … has at position t the
state of the layer before it (of the model itself, for the first) and the embedding of token t + i, and predicts token
t + 1 + i (Gloeckle et al. 2024, arXiv 2404.19737; in this chained form DeepSeek-V3, arXiv 2412.19437).

A prediction counts if the predicted token is trained, that is, in the response with loss mask 1. The position from which it is
predicted does not matter: the last prompt positions count, and predictions past the end of a sequence do not. Only after a
prompt of i tokens or fewer is there a trained token that layer i cannot predict. The loss of a layer is the mean of −log p, at
temperature 1, over all counted predictions of the optimizer step, whatever their executions, micro-batches and ranks are: so
any split gives the same number.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
)
from megatron.core.transformer.spec_utils import build_module

from slime.algorithms.reduction import masked_sum
from slime.arguments.config_files.role_config import ACTOR
from slime.backends.megatron_utils.layer_spec import get_prediction_layer_spec
from slime.backends.megatron_utils.output_rows import logits_of
from slime.backends.megatron_utils.parameter_names import unwrap_model
from slime.estimates.layout import stage_of_predictions
from slime.training.log_probs import calculate_log_probs_and_entropy
from slime.training.metric_reduction import all_reduce_sum
from slime.training.packed_stream import PackedStream
from slime.training.rollout_data import Metrics, MicroBatch, RolloutData
from slime.utils.plugin_loader import load_module, split_path

# Keywords of the decoder that describe the stream, which a prediction layer needs, too.
_STREAM_OPTIONS = (
    "attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params", "sequence_len_offset",
)  # fmt: skip


@dataclass
class _Trunk:
    """The model's last hidden states of a micro-batch, and the keywords with which its decoder was called."""

    hidden: torch.Tensor
    options: dict[str, Any]


class PredictionLayer(MultiTokenPredictionLayer):
    """Megatron's layer, which is given the embeddings of later tokens, since it cannot find them in contiguous parts of a
    stream."""

    def _get_embeddings(self, input_ids, position_ids, embedding, hidden_states, packed_seq_params=None):
        return input_ids, position_ids, embedding(self.layer_number), hidden_states

    def _checkpointed_forward(self, forward_func, *, hidden_states, decoder_input, **options):
        # Megatron's own method cannot recompute packed streams, because it tries to save their description like a tensor. Here
        # a layer is recomputed as a whole, whatever the decoder's layers do.
        def forward(hidden: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
            return forward_func(hidden_states=hidden, decoder_input=embeddings, **options)

        spread = self.config.distribute_saved_activations
        if self.config.fp8:
            # Megatron's own function would scale with what later micro-batches have brought.
            from megatron.core.extensions.transformer_engine import te_checkpoint

            tracker, group = tensor_parallel.get_cuda_rng_tracker, parallel_state.get_tensor_model_parallel_group()
            return te_checkpoint(forward, spread, tracker, group, hidden_states, decoder_input)
        return tensor_parallel.checkpoint(forward, spread, hidden_states, decoder_input)


def has_prediction_layers(args: Any) -> bool:
    """Whether the model of `args` has such layers; a critic has none."""
    return bool(args.mtp_num_layers) and args.role == ACTOR


def trains_prediction_layers(args: Any) -> bool:
    """Whether such layers are trained; otherwise they are only kept in checkpoints."""
    return has_prediction_layers(args) and args.enable_mtp_training


def stage_apart(args: Any) -> int | None:
    """The pipeline stage of the layers, counted from 0, if it is not the one of the output layer; else None."""
    stages = args.pipeline_model_parallel_size
    stage = stage_of_predictions(args.pipeline_model_parallel_layout, stages)
    return stage if has_prediction_layers(args) and stage < stages - 1 else None


def put_prediction_layers(args: Any, model: GPTModel, vp_stage: int | None) -> None:
    """Give a bare model chunk the layers, as `model.mtp`, if it is the one that shall have them. If another chunk has the
    output layer, make the two send and receive the layers' hidden states. A second call does nothing."""
    if not has_prediction_layers(args) or hasattr(model, "mtp") or hasattr(model, "predicted"):
        return
    model.predicted = None
    apart, is_last_chunk = stage_apart(args), vp_stage in (None, (args.virtual_pipeline_model_parallel_size or 1) - 1)
    if apart is None and model.post_process:
        _build_layers(args, model, vp_stage)
        if trains_prediction_layers(args):
            model.decoder.register_forward_hook(functools.partial(_remember, model), with_kwargs=True)
    elif apart is not None and model.post_process:
        model.decoder.final_layernorm = None
        model.decoder.register_forward_hook(functools.partial(_take_apart, model, _sent_states(args)))
    elif apart == parallel_state.get_pipeline_model_parallel_rank() and is_last_chunk:
        decoder, config = model.decoder, model.config
        decoder.final_layernorm = build_module(
            decoder.submodules.layer_norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )
        _build_layers(args, model, vp_stage)
        model.decoder.register_forward_hook(
            functools.partial(_predict_and_join, model, _sent_states(args)), with_kwargs=True
        )


def _sent_states(args: Any) -> int:
    return args.mtp_num_layers if trains_prediction_layers(args) else 0


def messages_with_states(args: Any) -> tuple[int, int]:
    """(stage, number): in a training pass, messages of this stage and those behind it have `number` further hidden states
    beside the model's. It is 0 if the layers are on the last stage, or not trained."""
    apart = stage_apart(args)
    return (0, 0) if apart is None else (apart, _sent_states(args))


def _build_layers(args: Any, model: GPTModel, vp_stage: int | None) -> None:
    spec = get_prediction_layer_spec(model.config)
    # A family with its own decoder layers has a function for prediction layers in the same module.
    file, module, _ = split_path(".".join(args.spec or ()))
    of_family = args.spec and getattr(load_module(file or module, "--spec"), "prediction_layer_spec", None)
    if of_family:
        spec.submodules.transformer_layer = of_family(spec.submodules.transformer_layer, args, model.config)
    spec.module = PredictionLayer
    submodules = MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * args.mtp_num_layers)
    model.mtp = MultiTokenPredictionBlock(model.config, submodules, vp_stage=vp_stage)
    model.mtp.trunk = model.mtp.embed = None


def _remember(
    model: GPTModel, decoder: torch.nn.Module, inputs: tuple, options: dict[str, Any], hidden: torch.Tensor
) -> None:
    if decoder.training and torch.is_grad_enabled():
        model.mtp.trunk = _Trunk(hidden.detach(), {name: options.get(name) for name in _STREAM_OPTIONS})


def _predict_and_join(
    model: GPTModel,
    states: int,
    decoder: torch.nn.Module,
    inputs: tuple,
    options: dict[str, Any],
    hidden: torch.Tensor,
) -> torch.Tensor:
    """The decoder's output, in training passes followed by that of the prediction layers."""
    joined = hidden
    if states and decoder.training and torch.is_grad_enabled():
        _remember(model, decoder, inputs, options, hidden)
        joined = torch.cat([hidden, *_states(model, model.mtp.embed)])
    # A stage that receives it expects the dtype of the residual stream, which the norm has rounded.
    return joined.to(model.config.pipeline_dtype)


def _take_apart(
    model: GPTModel, states: int, decoder: torch.nn.Module, inputs: tuple, received: torch.Tensor
) -> torch.Tensor:
    hidden = received.to(model.config.params_dtype)
    if states and decoder.training and torch.is_grad_enabled():
        hidden, *model.predicted = hidden.chunk(1 + states)
    return hidden


def predict(model: GPTModel, stream: PackedStream, embed: Callable[[int], torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the logits of one layer after the other, for the stream that `model` has just seen: [R, V / tensor-parallel size]
    for the R rows that predict something; for one row if none does.

    Args:
        model: the bare chunk with the output layer; the layers are trained.
        embed: from i = 1, 2, … to the embeddings of the tokens i positions after each row, as `embed_tokens` gives them. It is
            not called if another stage has the layers.
    """
    weight = model.output_layer.weight
    if model.share_embeddings_and_output_weights:
        weight = model.shared_embedding_or_output_weight()
    received, model.predicted = model.predicted, None
    for number, hidden in enumerate(_states(model, embed) if received is None else received, 1):
        with logits_of(stream.rows_predicting(1 + number).one_at_least(), model.output_layer):
            logits, _ = model.output_layer(hidden, weight=weight.detach())
        yield logits.squeeze(1)


def _states(model: GPTModel, embed: Callable[[int], torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the hidden states of one layer after the other, from those that the model's decoder has just computed."""
    trunk, model.mtp.trunk = model.mtp.trunk, None
    # A layer that is recomputed in the backward pass gets a gradient only if its input asks for one.
    hidden = trunk.hidden.requires_grad_()
    for layer in model.mtp.layers:
        hidden, _, _ = layer(input_ids=None, position_ids=None, hidden_states=hidden, embedding=embed, **trunk.options)
        yield hidden


@torch.no_grad()
def embedding_weight(model: list[torch.nn.Module], apart: int | None = None) -> torch.Tensor | None:
    """This tensor-parallel rank's part of the embedding's weight, a constant, on the first pipeline stage and on that of the
    prediction layers; on others None.

    Collective over these two. The latter gets a copy if it has no embedding; the copy is out of date after an update, so call
    this in every optimizer step.

    Args:
        model: this rank's wrapped chunks.
        apart: that stage, if it is not the last one.
    """
    first, last = unwrap_model(model[0]), unwrap_model(model[-1])
    if parallel_state.is_pipeline_first_stage(ignore_virtual=True):
        weight = first.embedding.word_embeddings.weight.detach()
    elif apart == parallel_state.get_pipeline_model_parallel_rank():
        rows = last.vocab_size // parallel_state.get_tensor_model_parallel_world_size()
        norm = last.decoder.final_layernorm.weight
        weight = norm.new_empty(rows, last.config.hidden_size, dtype=last.config.params_dtype)
    elif apart is None and parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        weight = last.output_layer.weight.detach()
    else:
        return None
    if apart is not None:
        group = parallel_state.get_pipeline_model_parallel_group()
        if apart > 0 and group.rank() == 0:
            dist.send(weight, group=group, group_dst=apart)
        elif apart > 0:
            dist.recv(weight, group=group, group_src=0)
        return weight
    # Megatron keeps both copies of tied weights equal.
    if parallel_state.get_pipeline_model_parallel_world_size() == 1 or last.share_embeddings_and_output_weights:
        return weight
    if not parallel_state.is_pipeline_first_stage(ignore_virtual=True):
        weight = torch.empty_like(weight)
    source = parallel_state.get_pipeline_model_parallel_first_rank()
    dist.broadcast(weight, src=source, group=parallel_state.get_embedding_group())
    return weight


@torch.no_grad()
def embed_tokens(weight: torch.Tensor, tokens: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    """Embeddings [T (with sequence parallelism: this rank's part of T), 1, hidden] of tokens [T], constants.

    Args:
        weight: this rank's part of the vocabulary, from `embedding_weight`.
    """
    local = tokens - parallel_state.get_tensor_model_parallel_rank() * len(weight)
    elsewhere = (local < 0) | (local >= len(weight))
    rows = F.embedding(local.masked_fill(elsewhere, 0), weight).masked_fill_(elsewhere[:, None], 0)[:, None]
    if config.fp32_residual_connection:
        rows = rows.float()
    if config.sequence_parallel:
        return tensor_parallel.reduce_scatter_to_sequence_parallel_region(rows)
    return tensor_parallel.reduce_from_tensor_model_parallel_region(rows)


def tokens_ahead(batch: MicroBatch, shift: int) -> torch.Tensor:
    """For each row of this rank's stream the token `shift` positions later in the same sequence, int64 [T]; 0 past its end."""
    return batch.stream.rows_of([tokens[shift:] for tokens in batch["tokens"]])


def counted_rows(batch: MicroBatch, layer: int) -> torch.Tensor:
    """For each row of this rank's stream whether the prediction of layer `layer` (from 1) counts: 1 or 0, [T]."""
    masks = zip(batch["loss_masks"], batch.prompt_lengths, strict=True)
    return batch.stream.rows_of([F.pad(mask, (prompt, 0))[1 + layer :] for mask, prompt in masks])


def counted_predictions(data: RolloutData, layers: int, data_group: dist.ProcessGroup | None) -> list[float]:
    """How many predictions of each layer count in an optimizer step, over all ranks; at least 1. Collective over `data_group`.

    Args:
        data: the samples of the step that this rank has.
        data_group: data-parallel ranks, without those of context parallelism, which have the same samples.
    """
    counts = torch.zeros(layers, dtype=torch.float64)
    if data["loss_masks"]:
        masks = list(zip(data["loss_masks"], data.prompt_lengths, strict=True))
        of_layers = [[mask[max(1 + layer - prompt, 0) :] for mask, prompt in masks] for layer in range(1, layers + 1)]
        counts = torch.stack([torch.cat(counted).sum() for counted in of_layers]).double()
    return [max(count, 1.0) for count in all_reduce_sum(counts, data_group).tolist()]


def prediction_loss(
    batch: MicroBatch,
    logits: torch.Tensor,
    layer: int,
    tensor_group: dist.ProcessGroup | None,
    chunk_size: int = -1,
) -> torch.Tensor:
    """Sum of −log p over the predictions of layer `layer` (from 1) that count on this rank, a float32 scalar.

    Args:
        logits: [T, V / tensor-parallel size], the layer's, for the rows of `batch.stream`, or for those alone that predict
            something.
        chunk_size: rows per float32 chunk; 0 or less: by device.
    """
    # Only rows whose predicted token is of a response can count.
    rows = batch.stream.rows_predicting(1 + layer)
    labels, counted = (of_rows[rows.index] for of_rows in (tokens_ahead(batch, 1 + layer), counted_rows(batch, layer)))
    log_probs, _ = calculate_log_probs_and_entropy(
        logits, labels, tensor_group, chunk_size=chunk_size, rows=rows.within(logits)
    )
    return masked_sum(-log_probs, counted)


class PredictionStep:
    """What the steps of all micro-batches share. Collective over data-parallel ranks and pipeline stages.

    Args:
        model: this rank's wrapped chunks, whose layers are trained.
        step_data: the step's samples that this rank has.
        denominator: of the step; what `loss` returns is to be divided by it, as the sums of all losses are.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        model: list[torch.nn.Module],
        step_data: RolloutData,
        denominator: float,
    ) -> None:
        self._args = args
        # The prediction layers, or the output layer, are in the last chunk of a rank.
        self._model = unwrap_model(model[-1])
        self._embedding = embedding_weight(model, stage_apart(args))
        counts = counted_predictions(step_data, args.mtp_num_layers, parallel_state.get_data_parallel_group())
        self._weights = [denominator / count for count in counts]

    @contextlib.contextmanager
    def forward(self, batch: MicroBatch) -> Iterator[None]:
        """Around a pass of the micro-batch through a chunk: layers before the last stage compute in it."""
        has_layers = hasattr(self._model, "mtp")
        if has_layers:
            self._model.mtp.embed = self._embed(batch)
        yield
        if has_layers:
            self._model.mtp.embed = None

    def _embed(self, batch: MicroBatch) -> Callable[[int], torch.Tensor]:
        return lambda ahead: embed_tokens(self._embedding, tokens_ahead(batch, ahead), self._model.config)

    def loss(self, batch: MicroBatch) -> tuple[torch.Tensor, Metrics]:
        """The term of the micro-batch that the model has just seen, `--mtp-loss-scaling-factor` times the mean over layers.

        Returns:
            (term, metrics without that factor: `mtp_{i}_loss` of each layer, and `mtp_loss`, their mean).
        """
        tensor_group = parallel_state.get_tensor_model_parallel_group()
        losses = [
            prediction_loss(batch, logits, layer, tensor_group, self._args.log_probs_chunk_size) * weight
            for layer, (logits, weight) in enumerate(
                zip(predict(self._model, batch.stream, self._embed(batch)), self._weights, strict=True), 1
            )
        ]
        mean = torch.stack(losses).mean()
        metrics = {f"mtp_{layer}_loss": loss.detach() for layer, loss in enumerate(losses, 1)}
        return self._args.mtp_loss_scaling_factor * mean, {**metrics, "mtp_loss": mean.detach()}
