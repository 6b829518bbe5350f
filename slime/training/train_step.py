"""Micro-batches of a rank, the passes over them that only go forward, and one optimizer step, whichever backend takes it.

Every stage of a pipeline is given the same micro-batches: the first one embeds their tokens, all of them need their positions
and the lengths of their sequences. Results come out on the last stage, one tensor per sample. Losses and their metrics arise
there too; it tells them to the other stages in one small message. Whether the step is good is decided once, on all ranks
together, when losses and gradients are known and before the weights change (`slime.training.loss_guard`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from slime.models.shape_of_flags import calculate_fwd_flops
from slime.training.backend import Backend, Collect, OwnTerm, RankGroups, StepLoss, StepResult
from slime.training.loss import loss_function, response_log_probs, response_values
from slime.training.loss_guard import LossGuard
from slime.training.metric_reduction import all_reduce_sum, reduce_metrics, step_denominator
from slime.training.on_policy import OnPolicyProof, is_proved
from slime.training.packed_stream import rows_on_rank
from slime.training.reports import mismatch_of_step
from slime.training.rollout_data import Metrics, MicroBatch, RolloutData
from slime.training.step_statistics import statistics_for_correction


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """Some micro-batches of a rank's data; each pass over them packs their streams anew.

    Attributes:
        indices: positions in the rank's data, per micro-batch.
        pad_multiple: the length of every stream is a multiple of it.
    """

    data: RolloutData
    indices: Sequence[Sequence[int]]
    pad_multiple: int

    @property
    def samples(self) -> RolloutData:
        """The samples of all micro-batches, one after the other."""
        return self.data.take([position for batch in self.indices for position in batch])

    @property
    def stream_rows(self) -> list[int]:
        """Rows of this rank's stream of every micro-batch, known before it is packed."""
        lengths = [[len(self.data["tokens"][position]) for position in batch] for batch in self.indices]
        return [rows_on_rank(of_batch, self.pad_multiple, self.data.cp) for of_batch in lengths]

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[MicroBatch]:
        return (self.data.micro_batch(positions, self.pad_multiple) for positions in self.indices)


def micro_batches(args: argparse.Namespace, data: RolloutData, indices: Sequence[Sequence[int]]) -> MicroBatches:
    """The micro-batches `indices` of a rank's data, padded as the flags say."""
    return MicroBatches(data, indices, args.data_pad_size_multiplier * args.tensor_model_parallel_size)


def forward_log_probs(
    args: argparse.Namespace,
    backend: Backend,
    data: RolloutData,
    *,
    with_entropy: bool,
    temperature: float | None = None,
    prefix: str = "",
) -> dict[str, list[torch.Tensor]]:
    """Log-probs of every response token under the live weights, without gradient and without dropout.

    Args:
        temperature: as in `response_log_probs`; None is as the rollout sampled.
        prefix: what the names of the results begin with; it tells whose weights are live.

    Returns:
        On the last pipeline stage `{prefix}log_probs` (and `{prefix}entropy`): one float32 tensor per sample, in their order,
        for the response tokens that this context-parallel rank owns. On other stages nothing.
    """

    def collect(batch: MicroBatch, logits: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        log_probs, entropy = response_log_probs(
            args, batch, logits, backend.groups.tensor_group, with_entropy=with_entropy, temperature=temperature
        )
        split = batch.stream.split
        found = {"log_probs": log_probs} | ({} if entropy is None else {"entropy": entropy})
        return {f"{prefix}{name}": split(values) for name, values in found.items()}

    return forward_per_sample(args, backend, data, collect, prefix)


def forward_values(args: argparse.Namespace, backend: Backend, data: RolloutData) -> dict[str, list[torch.Tensor]]:
    """Values of every response token under the live weights of a critic, without gradient and without dropout.

    Returns:
        On the last pipeline stage `values`: one float32 tensor per sample, in the order of the data, for the response tokens
        that this context-parallel rank owns. On other stages nothing.
    """

    def collect(batch: MicroBatch, outputs: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        return {"values": batch.stream.split(response_values(batch.stream, outputs))}

    return forward_per_sample(args, backend, data, collect)


def forward_per_sample(
    args: argparse.Namespace, backend: Backend, data: RolloutData, collect: Collect, prefix: str = ""
) -> dict[str, list[torch.Tensor]]:
    """A pass without gradient and without dropout, which collects tensors per sample.

    Returns:
        On the last pipeline stage the lists of all micro-batches, in the order of the data. On other stages nothing.
    """
    batches = micro_batches(args, data, data["micro_batch_indices"])
    outputs = backend.forward(batches, collect, prefix)
    results: dict[str, list[torch.Tensor]] = {}
    for output, positions in zip(outputs, batches.indices if outputs else (), strict=True):
        for name, tensors in output.items():
            column = results.setdefault(name, [torch.empty(0)] * sum(map(len, batches.indices)))
            for position, tensor in zip(positions, tensors, strict=True):
                column[position] = tensor
    return results


def micro_batches_of_step(data: RolloutData, step: int) -> list[list[int]]:
    """Positions in the rank's data, per micro-batch of the optimizer step `step`."""
    counts = data["num_microbatches"]
    first = sum(counts[:step])
    return data["micro_batch_indices"][first : first + counts[step]]


def train_one_step(
    args: argparse.Namespace,
    backend: Backend,
    data: RolloutData,
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
            one message that names the step, the ranks and the samples; or, with `--true-on-policy-mode`, engine and trainer
            differ (`slime.training.on_policy`). The weights are as they were.
    """
    groups, start = backend.groups, time.perf_counter()
    batches = micro_batches(args, data, micro_batches_of_step(data, step))
    global_batch_size = data["global_batch_sizes"][step]
    samples, per_token = batches.samples, args.calculate_per_token_loss
    denominator = step_denominator(samples.local_masks, global_batch_size, per_token, groups.token_group)
    statistics, mismatch = None, {}
    if role == "actor" and groups.is_last_stage and args.loss_type != "sft_loss":
        statistics = statistics_for_correction(args, samples, groups.token_group)
        mismatch = mismatch_of_step(samples, groups.token_group) if args.get_mismatch_metrics else {}
    place = f"rollout {rollout_id}, step {step}{' of the critic' if role == 'critic' else ''}"
    guard = LossGuard(place, args.check_for_nan_in_loss_and_grad, backend.bad_gradients)
    proof = OnPolicyProof(args, place, groups, data, batches.indices) if is_proved(args, role) else None

    def accepts(grad_norm: float, overflowed: bool) -> bool:
        is_good = guard.accepts(grad_norm, overflowed)
        # Also for a step that is skipped: a loss that is not finite is no excuse for being off policy.
        if proof is not None:
            proof.require()
        return is_good

    result = backend.step(
        batches,
        step_loss(args, role, statistics, groups.tensor_group, guard, proof),
        denominator=denominator,
        accepts=accepts,
        rollouts=global_batch_size,
        place=(rollout_id, step),
        followed=step + 1 < len(data["num_microbatches"]),
    )
    of_loss = None
    if groups.is_last_stage:
        of_loss = reduce_metrics(result.metrics, denominator, groups.host_token_group) | mismatch
    metrics = backend.broadcast(of_loss) | _metrics_of_update(args, result)
    if proof is not None:
        metrics["mismatch_max_abs"] = proof.largest
    if args.log_throughput:
        metrics["tflops_per_gpu"] = throughput(args, samples, groups, time.perf_counter() - start)
    return {**metrics, "global_batch_size": global_batch_size}


def _metrics_of_update(args: argparse.Namespace, result: StepResult) -> dict[str, float]:
    """What a step tells of its update; equal on all ranks."""
    update = result.update
    metrics = {f"lr-pg_{i}": rate for i, rate in enumerate(result.learning_rates)} | result.measured
    if update.zeros is not None:
        metrics["num_zeros_in_grad"] = update.zeros
    if args.log_world_size_to_tensorboard:
        metrics["world_size"] = float(dist.get_world_size())
    return {**metrics, "grad_norm": update.grad_norm, "skipped_steps": float(not update.taken)}


def throughput(args: argparse.Namespace, samples: RolloutData, groups: RankGroups, seconds: float) -> float:
    """10¹² floating-point operations per second and device of a step that took `seconds`: three times those of a forward pass
    over the samples, whatever is recomputed. Collective; of all samples, and of the mean time of the ranks."""
    of_rank = calculate_fwd_flops(samples["total_lengths"], args) / 1e12
    flops = float(all_reduce_sum(torch.tensor(of_rank, dtype=torch.float64), groups.sample_group))
    seconds = float(all_reduce_sum(torch.tensor(seconds, dtype=torch.float64), dist.group.WORLD))
    return 3 * flops / seconds


def step_loss(
    args: argparse.Namespace,
    role: str,
    statistics: dict[str, torch.Tensor] | None,
    tensor_group: dist.ProcessGroup | None,
    guard: LossGuard,
    proof: OnPolicyProof | None = None,
) -> StepLoss:
    """The loss of the step's micro-batches, watched by `guard`, and compared by `proof`. With `--recompute-loss-function` all
    that a micro-batch keeps for it until its backward pass is the logits: what the loss is made of is made once more there."""
    compute = functools.partial(loss_function, role=role)
    if args.recompute_loss_function:
        # The reentrant kind repeats the whole function on every rank. The other kind would stop early on a rank whose loss
        # needs nothing again, while other ranks wait for the function's collectives.
        compute = functools.partial(checkpoint, compute, use_reentrant=True)

    def loss(batch: MicroBatch, logits: torch.Tensor, own_term: OwnTerm | None = None) -> tuple[torch.Tensor, Metrics]:
        batch = batch.with_columns(step_statistics=statistics, on_policy_proof=proof)
        value, metrics = compute(args, batch, logits, tensor_group)
        if own_term is not None:
            term, further = own_term(batch)
            value, metrics = value + term, {**metrics, **further}
        guard.watch(value, logits, batch["sample_indices"])
        return value, metrics

    return loss
