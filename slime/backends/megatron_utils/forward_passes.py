"""Passes over packed micro-batches with Megatron's schedules, and the passes that only go forward.

Invariants
- A function of the logits runs on the last pipeline stage only, once per micro-batch, in the order of the micro-batches;
  the other stages get nothing back.
- Every stage is given the same micro-batches: the first one embeds their tokens, all of them need their positions and the
  lengths of their sequences.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func

from slime.backends.megatron_utils.attention import packed_seq_params
from slime.backends.megatron_utils.initialize import context_parallel
from slime.backends.megatron_utils.replaying_router import routing_replay_of
from slime.training.micro_batch import MicroBatch, response_log_probs
from slime.training.packed_stream import PackedStream, pack_stream
from slime.training.rollout_batch import NOT_PER_SAMPLE

# Of the batch that it is made for: what Megatron's schedule calls with the logits [1, T, V / tensor-parallel size].
LogitsFunction = Callable[[MicroBatch], Callable[..., Any]]


def forward_log_probs(
    args: argparse.Namespace, model: list[DistributedDataParallel], rollout_data: dict[str, Any], *, with_entropy: bool
) -> dict[str, list[torch.Tensor]]:
    """Log-probs of every response token under the live weights, without gradient and without dropout.

    Returns:
        On the last pipeline stage `log_probs` (and `entropy`): one float32 tensor per sample, in the order of the data,
        for the response tokens that this context-parallel rank owns. On other stages nothing.
    """
    tensor_group = parallel_state.get_tensor_model_parallel_group()

    def make(batch: MicroBatch) -> Callable[..., dict[str, list[torch.Tensor]]]:
        stream: PackedStream = batch["stream"]

        def collect(logits: torch.Tensor, non_loss_data: bool = True) -> dict[str, list[torch.Tensor]]:
            rows = logits.squeeze(0)
            log_probs, entropy = response_log_probs(args, batch, rows, tensor_group, with_entropy=with_entropy)
            collected = {"log_probs": stream.split(log_probs)}
            return collected if entropy is None else {**collected, "entropy": stream.split(entropy)}

        return collect

    return forward_per_sample(args, model, rollout_data, make)


def forward_per_sample(
    args: argparse.Namespace,
    model: list[DistributedDataParallel],
    rollout_data: dict[str, Any],
    make: LogitsFunction,
) -> dict[str, list[torch.Tensor]]:
    """A pass without gradient and without dropout, which collects tensors per sample.

    Args:
        make: of a micro-batch, a function of its logits that returns lists with one tensor per sample, by name.

    Returns:
        On the last pipeline stage the lists of all micro-batches, in the order of the data. On other stages nothing.
    """
    indices = rollout_data["micro_batch_indices"]
    with torch.no_grad(), _evaluating(model):
        outputs = run_schedule(args, model, rollout_data, _fill_last_group(model, indices), make, forward_only=True)
    return _scatter_to_samples(outputs[: len(indices)], indices) if outputs else {}


def run_schedule(
    args: argparse.Namespace,
    model: list[DistributedDataParallel],
    rollout_data: dict[str, Any],
    indices: Sequence[Sequence[int]],
    make_logits_function: LogitsFunction,
    *,
    forward_only: bool,
) -> list[Any]:
    """One pass over the micro-batches `indices` (positions in the rank's data, per micro-batch).

    Returns:
        On the last pipeline stage what the logits functions returned (forward only) or the second part of it (their
        first being the loss), per micro-batch; on other stages an empty list.
    """

    replay = routing_replay_of(model)

    def forward_step(batches: Iterator[MicroBatch], chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        batch = next(batches)
        with replay.forward(model.index(chunk), batch):
            output = _forward(chunk, batch["stream"])
        return output, make_logits_function(batch)

    # One iterator for each virtual stage: they come to the same micro-batch at different times.
    iterators = [_iterate(args, rollout_data, indices) for _ in model]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators,
        model=model,
        num_microbatches=len(indices),
        # Streams differ in length; Megatron reads this only to size pipeline messages of fixed-length batches.
        seq_length=args.seq_length or 1,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _fill_last_group(model: list[DistributedDataParallel], indices: list[list[int]]) -> list[list[int]]:
    """`indices`, the last one repeated until the count is what the interleaved schedule can do."""
    if len(model) == 1:
        return indices
    missing = -len(indices) % model[0].config.microbatch_group_size_per_vp_stage
    return [*indices, *[indices[-1]] * missing]


@contextlib.contextmanager
def _evaluating(model: list[DistributedDataParallel]) -> Iterator[None]:
    for chunk in model:
        chunk.eval()
    try:
        yield
    finally:
        for chunk in model:
            chunk.train()


def _forward(chunk: torch.nn.Module, stream: PackedStream) -> torch.Tensor:
    """Logits [1, T, V / tensor-parallel size] of the stream; before the last stage hidden states [T, 1, hidden]."""
    # In 16 bits Megatron's wrapper would copy all logits to float32; the loss does that chunk by chunk.
    options = {"fp32_output": False} if chunk.config.bf16 or chunk.config.fp16 else {}
    return chunk(
        input_ids=stream.tokens[None],
        position_ids=stream.position_ids[None],
        attention_mask=None,
        packed_seq_params=packed_seq_params(stream),
        **options,
    )


def _iterate(
    args: argparse.Namespace, rollout_data: dict[str, Any], indices: Sequence[Sequence[int]]
) -> Iterator[MicroBatch]:
    multiple = args.data_pad_size_multiplier * args.tensor_model_parallel_size
    cp = context_parallel(args)
    for positions in indices:
        batch: MicroBatch = {
            name: [column[i] for i in positions] for name, column in rollout_data.items() if name not in NOT_PER_SAMPLE
        }
        batch["positions"] = list(positions)
        batch["stream"] = pack_stream(batch["tokens"], batch["response_lengths"], multiple, cp=cp)
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
