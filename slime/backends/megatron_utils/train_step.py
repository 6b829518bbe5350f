"""Passes over packed micro-batches with Megatron's schedules: forward only, and one optimizer step."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from slime.training.loss import MicroBatch, loss_function, response_log_probs
from slime.training.metric_reduction import reduce_metrics, step_denominator
from slime.training.packed_stream import PackedStream, pack_stream
from slime.training.rollout_batch import NOT_PER_SAMPLE
from slime.utils.errors import RunError


def micro_batches_of_step(rollout_data: dict[str, Any], step: int) -> list[list[int]]:
    """Positions in the rank's data, per micro-batch of the optimizer step `step`."""
    counts = rollout_data["num_microbatches"]
    first = sum(counts[:step])
    return rollout_data["micro_batch_indices"][first : first + counts[step]]


def forward_log_probs(
    args: argparse.Namespace, model: list[DistributedDataParallel], rollout_data: dict[str, Any], *, with_entropy: bool
) -> dict[str, list[torch.Tensor]]:
    """Log-probs of every response token under the live weights, without gradient and without dropout.

    Returns:
        `log_probs` (and `entropy`): one float32 tensor [response length] per sample, in the order of the data.
    """
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    indices = rollout_data["micro_batch_indices"]

    def forward_step(batches: Iterator[MicroBatch], chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        batch = next(batches)
        stream: PackedStream = batch["stream"]

        def collect(logits: torch.Tensor, non_loss_data: bool = True) -> dict[str, list[torch.Tensor]]:
            log_probs, entropy = response_log_probs(args, stream, logits[0], tensor_group, with_entropy=with_entropy)
            collected = {"log_probs": stream.split(log_probs)}
            return collected if entropy is None else {**collected, "entropy": stream.split(entropy)}

        return _forward(chunk, stream), collect

    with torch.no_grad(), _evaluating(model):
        outputs = _run_schedule(
            args, model, forward_step, _iterate(args, rollout_data, indices), len(indices),
            forward_only=True, collect_non_loss_data=True,
        )  # fmt: skip
    return _scatter_to_samples(outputs, indices)


def train_one_step(
    args: argparse.Namespace,
    model: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    rollout_data: dict[str, Any],
    rollout_id: int,
    step: int,
) -> dict[str, float]:
    """Forward, backward and one optimizer step over the micro-batches of `step`. Returns its metrics, equal on all ranks.

    Raises:
        RunError: a loss or the gradient norm is not finite; names the step, the rank and the samples.
    """
    data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    indices = micro_batches_of_step(rollout_data, step)
    global_batch_size = rollout_data["global_batch_sizes"][step]
    masks = [rollout_data["loss_masks"][i] for batch in indices for i in batch]
    denominator = step_denominator(masks, global_batch_size, args.calculate_per_token_loss, data_group)

    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    sums = _forward_backward(args, model, optimizer, rollout_data, indices, denominator, (rollout_id, step))
    metrics = reduce_metrics(sums, denominator, data_group)
    learning_rates = {f"lr-pg_{i}": group["lr"] for i, group in enumerate(optimizer.param_groups)}
    success, grad_norm, zeros_in_grad = optimizer.step()
    if not success:
        # Float16 only: the loss scale was too high; the optimizer lowered it and took no step.
        return {**metrics, **learning_rates, "skipped_steps": 1, "global_batch_size": global_batch_size}
    if getattr(args, "check_for_nan_in_loss_and_grad", True) and not torch.isfinite(torch.as_tensor(grad_norm)):
        raise RunError(
            f"rollout {rollout_id}, step {step}: the gradient norm is {grad_norm}; the weights are not saved"
        )
    scheduler.step(increment=global_batch_size)
    if zeros_in_grad is not None:
        metrics["num_zeros_in_grad"] = float(zeros_in_grad)
    return {**metrics, **learning_rates, "grad_norm": float(grad_norm), "global_batch_size": global_batch_size}


def _forward_backward(
    args: argparse.Namespace,
    model: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    rollout_data: dict[str, Any],
    indices: list[list[int]],
    denominator: float,
    place: tuple[int, int],
) -> list[dict[str, torch.Tensor]]:
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    # Megatron divides by the number of micro-batches and averages gradients over data-parallel ranks; both are undone
    # here, because the denominator of the step already is the whole normalisation.
    scale = len(indices) * parallel_state.get_data_parallel_world_size() / denominator

    def forward_step(batches: Iterator[MicroBatch], chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        batch = next(batches)

        def loss(logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            value, metrics = loss_function(args, batch, logits[0], tensor_group)
            if getattr(args, "check_for_nan_in_loss_and_grad", True):
                _require_finite(value, batch, place)
            return value * scale, metrics

        return _forward(chunk, batch["stream"]), loss

    config = model[0].config
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if model[0].ddp_config.overlap_grad_reduce:
        # Only the backward pass of the last micro-batch starts reductions.
        config.no_sync_func = model[0].no_sync
    batches = _iterate(args, rollout_data, indices)
    return _run_schedule(args, model, forward_step, batches, len(indices), forward_only=False)


@contextlib.contextmanager
def _evaluating(model: list[DistributedDataParallel]) -> Iterator[None]:
    for chunk in model:
        chunk.eval()
    try:
        yield
    finally:
        for chunk in model:
            chunk.train()


def _run_schedule(
    args: argparse.Namespace,
    model: list[DistributedDataParallel],
    forward_step: Callable,
    batches: Iterator[MicroBatch],
    count: int,
    **options: Any,
) -> list[Any]:
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=model,
        num_microbatches=count,
        # Streams differ in length; Megatron reads this only to size pipeline messages of fixed-length batches.
        seq_length=args.seq_length or 1,
        micro_batch_size=1,
        **options,
    )


def _forward(chunk: torch.nn.Module, stream: PackedStream) -> torch.Tensor:
    """Logits [1, T, V / tensor-parallel size] of the stream."""
    longest = max(stream.sequence_lengths)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=stream.cu_seqlens,
        cu_seqlens_kv=stream.cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    # In 16 bits Megatron's wrapper would copy all logits to float32; the loss does that chunk by chunk.
    options = {"fp32_output": False} if chunk.config.bf16 or chunk.config.fp16 else {}
    return chunk(
        input_ids=stream.tokens[None],
        position_ids=stream.position_ids[None],
        attention_mask=None,
        packed_seq_params=packed,
        **options,
    )


def _iterate(
    args: argparse.Namespace, rollout_data: dict[str, Any], indices: Sequence[Sequence[int]]
) -> Iterator[MicroBatch]:
    multiple = args.data_pad_size_multiplier * args.tensor_model_parallel_size
    for positions in indices:
        batch: MicroBatch = {
            name: [column[i] for i in positions] for name, column in rollout_data.items() if name not in NOT_PER_SAMPLE
        }
        batch["stream"] = pack_stream(batch["tokens"], batch["response_lengths"], multiple)
        yield batch


def _scatter_to_samples(
    outputs: list[dict[str, list[torch.Tensor]]], indices: Sequence[Sequence[int]]
) -> dict[str, list[torch.Tensor]]:
    """Results per micro-batch back into the order of the rank's samples."""
    count = sum(len(positions) for positions in indices)
    results: dict[str, list[torch.Tensor]] = {}
    for output, positions in zip(outputs, indices, strict=True):
        for name, tensors in output.items():
            column = results.setdefault(name, [torch.empty(0)] * count)
            for position, tensor in zip(positions, tensors, strict=True):
                column[position] = tensor
    return results


def _require_finite(loss: torch.Tensor, batch: MicroBatch, place: tuple[int, int]) -> None:
    if not torch.isfinite(loss):
        rank = torch.distributed.get_rank()
        raise RunError(
            f"rollout {place[0]}, step {place[1]}, rank {rank}: the loss is {float(loss)} in the micro-batch with samples "
            f"{batch['sample_indices']}; dump the batch with --save-debug-train-data to look at it"
        )
