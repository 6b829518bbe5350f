"""Micro-batches of a rank, the passes over them that only go forward, and one optimizer step, whichever backend takes it.

Every stage of a pipeline is given the same micro-batches: the first one embeds their tokens, all of them need their positions
and the lengths of their sequences. Results come out on the last stage, one tensor per sample. Losses and their metrics arise
there too; it tells them to the other stages in one small message. Whether the step is good is decided once, on all ranks
together, when losses and gradients are known and before the weights change.

A loss or a gradient that is not finite is seen by one rank, and all ranks have to act on it together: one that stopped alone
would leave the others waiting in a collective. So no rank says anything while a step computes. Each only remembers its losses,
and whether the gradient that comes back to the logits is finite; no number is brought to the host. When the gradients are
summed, one all-reduce of two numbers tells all ranks whether the step is good. Only if it is not, they exchange what they
remember, and every rank stops, or skips the update, with the same message.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from slime.models.shape_of_flags import calculate_fwd_flops
from slime.training.backend import Backend, Collect, OwnTerm, RankGroups, StepLoss, StepResult
from slime.training.loss import loss_function, response_log_probs, response_values
from slime.training.metric_reduction import all_reduce_sum, reduce_metrics, step_denominator
from slime.training.on_policy import OnPolicyProof, is_proved
from slime.training.packed_stream import rows_on_rank
from slime.training.reports import mismatch_of_step
from slime.training.rollout_data import Metrics, MicroBatch, RolloutData
from slime.training.step_statistics import statistics_for_correction
from slime.utils.errors import RunError

logger = logging.getLogger(__name__)

_NAMES_SHOWN = 5


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
        temperature: None takes that of the rollout.
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


@dataclasses.dataclass(frozen=True)
class BadMicroBatch:
    """A micro-batch whose loss is not finite or, with a finite loss, whose gradient at the logits is not."""

    samples: tuple[int, ...]
    loss: float


@dataclasses.dataclass(frozen=True)
class Report:
    """What one rank found.

    parameters: global names of those whose gradient is not finite.
    """

    rank: int
    micro_batches: tuple[BadMicroBatch, ...]
    parameters: tuple[str, ...]


class LossGuard:
    """Watches one optimizer step of one rank.

    Args:
        place: where the step is in the run, for messages.
        stops: whether a bad step ends the run, or is skipped.
        bad_parameters: tells the names of this rank's parameters whose gradient is not finite; called only if the norm is not.
        group: all ranks that train together; None: the world.
    """

    def __init__(
        self,
        place: str,
        stops: bool,
        bad_parameters: Callable[[], Sequence[str]] = tuple,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._place = place
        self._stops = stops
        self._bad_parameters = bad_parameters
        self._group = dist.group.WORLD if group is None else group
        self._samples: list[tuple[int, ...]] = []
        self._losses: list[torch.Tensor] = []
        self._gradients_finite: dict[int, torch.Tensor] = {}

    def watch(self, loss: torch.Tensor, logits: torch.Tensor, samples: Sequence[int]) -> None:
        """Remember a micro-batch, before its backward pass.

        Args:
            loss: scalar.
            logits: what it is computed from; any shape.
            samples: the micro-batch's sample indices.
        """
        index = len(self._losses)
        self._samples.append(tuple(samples))
        self._losses.append(loss.detach())
        if logits.requires_grad and logits.numel():

            def look(gradient: torch.Tensor) -> None:
                # Two numbers instead of a mask of the logits' shape; NaN and infinity go through to them.
                self._gradients_finite[index] = torch.stack(gradient.detach().aminmax()).isfinite().all()

            logits.register_hook(look)

    def accepts(self, grad_norm: float, overflowed: bool = False) -> bool:
        """Whether to update the weights, the same answer on all ranks. Collective.

        Args:
            grad_norm: over all ranks.
            overflowed: the loss scale of float16 was too high; gradients are then not finite in the normal course of things.

        Raises:
            RunError: a bad step, and the guard stops at one; on all ranks, with one message.
        """
        loss_is_bad = bool(self._losses) and not bool(torch.stack(self._losses).isfinite().all())
        gradient_is_bad = not (overflowed or math.isfinite(grad_norm))
        flags = torch.tensor([float(loss_is_bad), float(gradient_is_bad)])
        losses_bad, gradients_bad = (count > 0 for count in all_reduce_sum(flags, self._group).tolist())
        if not (losses_bad or gradients_bad):
            return True
        message = f"{self._place}: {describe(self._reports(gradients_bad), grad_norm)}"
        if self._stops:
            raise RunError(f"{message}. The weights are not saved; --save-debug-train-data shows the samples")
        if dist.get_rank(self._group) == 0:
            logger.warning("%s. No weights are updated in this step", message)
        return False

    def _reports(self, gradients_bad: bool) -> list[Report]:
        """What all ranks found. Collective."""
        found = []
        for index, (samples, loss) in enumerate(zip(self._samples, self._losses, strict=True)):
            value = float(loss)
            if not (math.isfinite(value) and bool(self._gradients_finite.get(index, True))):
                found.append(BadMicroBatch(samples, value))
        parameters = tuple(self._bad_parameters()) if gradients_bad else ()
        own = Report(dist.get_rank(self._group), tuple(found), parameters)
        reports: list[Report] = [own] * dist.get_world_size(self._group)
        dist.all_gather_object(reports, own, group=self._group)
        return reports


def describe(reports: Sequence[Report], grad_norm: float) -> str:
    """What went wrong, in which micro-batches of which ranks; one line.

    Losses come first: a gradient follows from its loss, and one bad gradient spoils the norm of all.
    """
    bad = [(report.rank, batch) for report in reports for batch in report.micro_batches]
    losses = [(rank, batch) for rank, batch in bad if not math.isfinite(batch.loss)]
    if losses:
        values = dict.fromkeys(str(batch.loss) for _, batch in losses)
        return "; ".join(
            f"the loss is {value} {_where([(rank, batch.samples) for rank, batch in losses if str(batch.loss) == value])}"
            for value in values
        )
    norm = f"the gradient norm is {grad_norm}"
    if bad:
        places = _where([(rank, batch.samples) for rank, batch in bad])
        return f"{norm}; losses are finite, but the gradient at the logits is not {places}"
    names = sorted({name for report in reports for name in report.parameters})
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    shown = f"; gradients that are not finite: {', '.join(names[:_NAMES_SHOWN])}{more}" if names else ""
    return f"{norm}; losses and their gradients at the logits are finite, so it arose inside the model{shown}"


def _where(found: Sequence[tuple[int, tuple[int, ...]]]) -> str:
    """Micro-batches and the ranks that share them: those of a model-parallel group have the same samples."""
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, samples in found:
        ranks.setdefault(samples, []).append(rank)
    return ", ".join(
        f"on rank{'s' if len(of_batch) > 1 else ''} {', '.join(map(str, of_batch))} in the micro-batch with samples "
        f"[{_numbers(samples)}]"
        for samples, of_batch in ranks.items()
    )


def _numbers(samples: Sequence[int]) -> str:
    """Ascending, three or more in a row as a range: "3, 7, 10–12"."""
    runs: list[list[int]] = []
    for sample in sorted(samples):
        if runs and sample == runs[-1][-1] + 1:
            runs[-1].append(sample)
        else:
            runs.append([sample])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
