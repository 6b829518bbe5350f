"""One optimizer step over packed micro-batches with Megatron's schedules.

Losses and their metrics arise on the last pipeline stage, which tells them to the other stages in one small message. Whether
the step is good is decided once, on all ranks together, when losses and gradients are known and before the weights change.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slime.backends.megatron_utils.forward_passes import run_schedule
from slime.backends.megatron_utils.initialize import context_parallel
from slime.backends.megatron_utils.optimizer import update_weights
from slime.backends.megatron_utils.parameter_names import parameters_with_bad_gradient
from slime.backends.megatron_utils.pipeline_stages import broadcast_from_last_stage, is_last_stage
from slime.backends.megatron_utils.prediction_layers import PredictionStep, trains_prediction_layers
from slime.training.context_parallel import ContextParallel, slice_responses
from slime.training.loss import loss_function
from slime.training.loss_guard import LossGuard
from slime.training.metric_reduction import reduce_metrics, step_denominator
from slime.training.micro_batch import Metrics, MicroBatch
from slime.training.step_statistics import StepFacts, facts_of_step


def micro_batches_of_step(rollout_data: dict[str, Any], step: int) -> list[list[int]]:
    """Positions in the rank's data, per micro-batch of the optimizer step `step`."""
    counts = rollout_data["num_microbatches"]
    first = sum(counts[:step])
    return rollout_data["micro_batch_indices"][first : first + counts[step]]


def train_one_step(
    args: argparse.Namespace,
    model: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    rollout_data: dict[str, Any],
    rollout_id: int,
    step: int,
    *,
    role: str = "actor",
) -> dict[str, float]:
    """Forward, backward and one optimizer step over the micro-batches of `step`. Returns its metrics, equal on all ranks.

    `skipped_steps` is 1 when the weights and the schedule stayed as they were: the loss or the gradient was not finite, or the
    loss scale of float16 was too high and has been lowered.

    Raises:
        RunError: a loss or the gradient norm is not finite, and `check_for_nan_in_loss_and_grad` is on; on all ranks, with
            one message that names the step, the ranks and the samples.
    """
    data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    indices = micro_batches_of_step(rollout_data, step)
    global_batch_size = rollout_data["global_batch_sizes"][step]
    positions, cp = [i for batch in indices for i in batch], context_parallel(args)
    masks = _local_masks(rollout_data, positions, cp)
    denominator = step_denominator(masks, global_batch_size, args.calculate_per_token_loss, data_group)
    facts = StepFacts()
    if role == "actor" and is_last_stage():
        facts = facts_of_step(args, rollout_data, positions, cp, data_group)
    prediction = None
    if trains_prediction_layers(args):
        prediction = PredictionStep(args, model, rollout_data, positions, denominator)

    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    stops = getattr(args, "check_for_nan_in_loss_and_grad", True)
    place = f"rollout {rollout_id}, step {step}{' of the critic' if role == 'critic' else ''}"
    guard = LossGuard(place, stops, lambda: parameters_with_bad_gradient(model))
    loss = _loss_of_micro_batches(args, role, facts, prediction, guard)
    sums = _forward_backward(args, model, optimizer, rollout_data, indices, denominator, loss)
    metrics = _metrics_of_all_ranks(sums, facts.metrics, denominator, data_group)
    metrics |= {f"lr-pg_{i}": group["lr"] for i, group in enumerate(optimizer.param_groups)}
    update = update_weights(optimizer, guard.accepts)
    if update.taken:
        scheduler.step(increment=global_batch_size)
    if update.zeros is not None:
        metrics["num_zeros_in_grad"] = update.zeros
    return {
        **metrics,
        "grad_norm": update.grad_norm,
        "skipped_steps": float(not update.taken),
        "global_batch_size": global_batch_size,
    }


def _loss_of_micro_batches(
    args: argparse.Namespace, role: str, facts: StepFacts, prediction: PredictionStep | None, guard: LossGuard
) -> Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, Metrics]]:
    """A function of a micro-batch and its logits: the un-normalised loss and its metrics."""

    def loss(batch: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
        tensor_group = parallel_state.get_tensor_model_parallel_group()
        batch = {**batch, "step_statistics": facts.statistics}
        # Not by an index, whose backward pass copies the gradient into a second tensor of the logits' size.
        value, metrics = loss_function(args, batch, logits.squeeze(0), tensor_group, role=role)
        if prediction is not None:
            term, further = prediction.loss(batch)
            value, metrics = value + term, {**metrics, **further}
        guard.watch(value, logits, batch["sample_indices"])
        return value, metrics

    return loss


def _local_masks(rollout_data: dict[str, Any], positions: list[int], cp: ContextParallel) -> list[torch.Tensor]:
    columns = ("loss_masks", "total_lengths", "response_lengths")
    return slice_responses(*([rollout_data[name][i] for i in positions] for name in columns), cp)


def _forward_backward(
    args: argparse.Namespace,
    model: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    rollout_data: dict[str, Any],
    indices: list[list[int]],
    denominator: float,
    loss_function: Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, Metrics]],
) -> list[Metrics]:
    """Gradients in place. Returns the metrics per micro-batch; none before the last stage."""
    # Megatron divides by the number of micro-batches and averages gradients over data- and context-parallel ranks. All is
    # undone, because the denominator of the step already is the whole normalisation: the context-parallel size by its
    # schedule itself, which multiplies the loss by it, the other two here.
    scale = len(indices) * parallel_state.get_data_parallel_world_size() / denominator

    def make(batch: MicroBatch) -> Callable[..., tuple[torch.Tensor, Metrics]]:
        def loss(logits: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
            value, metrics = loss_function(batch, logits)
            return value * scale, metrics

        return loss

    _set_schedule_functions(args, model, optimizer)
    return run_schedule(args, model, rollout_data, indices, make, forward_only=False)


def _set_schedule_functions(
    args: argparse.Namespace, model: list[DistributedDataParallel], optimizer: MegatronOptimizer
) -> None:
    config = model[0].config
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if model[0].ddp_config.overlap_grad_reduce:
        # Only the backward pass of the last micro-batch starts reductions.
        functions = [chunk.no_sync for chunk in model]
        config.no_sync_func = functions if len(model) > 1 else functions[0]
        if getattr(args, "align_grad_reduce", True):
            # Read by the schedules of pipelines alone: all stages start their reductions at one time.
            functions = [chunk.start_grad_sync for chunk in model]
            config.grad_sync_func = functions if len(model) > 1 else functions[0]


def _metrics_of_all_ranks(
    sums: list[Metrics], others: dict[str, float], denominator: float, data_group: dist.ProcessGroup
) -> dict[str, float]:
    """The metrics of the last stage's ranks, on every rank; `others` are reduced already."""
    is_last = is_last_stage()
    return broadcast_from_last_stage(reduce_metrics(sums, denominator, data_group) | others if is_last else None)
