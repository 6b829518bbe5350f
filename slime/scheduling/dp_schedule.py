"""Distribute the samples of a rollout over optimizer steps, micro-batches and data-parallel ranks.

Micro-batches are formed from all samples of a step, without regard to ranks, and only then dealt to the ranks.

Invariants
- Each sample of a full step is in exactly one micro-batch of one rank; samples of one execution stay within one step.
- In every step all ranks have the same number of micro-batches, a multiple of the group size of a virtual pipeline.
- `micro_batch_indices` of a rank, flattened, is 0 … n−1: positions in that rank's partition.
- Dynamic micro-batches hold at most the token budget, except for a single sample that is longer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slime.estimates.flops import FlopsModel
from slime.scheduling.packing import (
    balance_by_swaps,
    best_fit_pack,
    expand_bins_by_splitting,
    first_fit_pack,
    karmarkar_karp,
    split_bins_over_capacity,
)
from slime.utils.errors import UserError

Bins = list[list[int]]


@dataclass(frozen=True)
class DPSchedule:
    """Which rank trains which samples, and when. `dropped` counts the executions of the incomplete last step.

    partitions[rank]: positions of the rank's samples among the given ones, in the order in which it trains them.
    micro_batch_indices[rank]: its micro-batches over all steps, as positions in its partition.
    num_microbatches[step]: micro-batches per rank. global_batch_sizes[step]: executions over all ranks.
    """

    partitions: Bins
    micro_batch_indices: list[Bins]
    num_microbatches: list[int]
    global_batch_sizes: list[int]
    dropped: int


@dataclass(frozen=True)
class BatchingRule:
    """How the samples of a step become micro-batches.

    packing: `static` (runs of `micro_batch_size` neighbours), or under `token_budget` tokens: `first-fit`, `best-fit`,
    or `flops` (parts of nearly equal FLOPs, those over the budget split).
    flops_model: needed by `flops`. If given, ranks are dealt nearly equal FLOPs (Karmarkar–Karp, then swaps while a rank is
    more than 1 % above the mean); else micro-batch number k goes to rank k mod dp.
    """

    packing: str
    token_budget: int | None = None
    micro_batch_size: int | None = None
    flops_model: FlopsModel | None = None


def build_schedule(
    total_lengths: Sequence[int],
    execution_ids: Sequence[int],
    rule: BatchingRule,
    *,
    global_batch_size: int,
    dp_size: int,
    microbatch_group_size: int = 1,
) -> DPSchedule:
    """Schedule samples of `total_lengths` tokens (prompt and response) that belong to executions `execution_ids`.

    Executions are taken in the order in which they first occur, `global_batch_size` to a step; an incomplete last step is
    dropped. Each rank gets a multiple of `microbatch_group_size` micro-batches per step.
    Raises UserError if not even one step is full, or if a step's micro-batches cannot be made a multiple of dp × group size.
    """
    lengths = [int(length) for length in total_lengths]
    # Elements of a tensor are objects with hashes of their own: as keys, two equal ones would count as different executions.
    execution_ids = [each.item() if hasattr(each, "item") else each for each in execution_ids]
    steps, dropped = _cut_steps(lengths, execution_ids, global_batch_size)
    partitions: Bins = [[] for _ in range(dp_size)]
    micro_batch_indices: list[Bins] = [[] for _ in range(dp_size)]
    num_microbatches = []
    for samples in steps:
        step_lengths = [lengths[sample] for sample in samples]
        micro_batches = _form_micro_batches(step_lengths, rule)
        micro_batches = _even_the_count(micro_batches, step_lengths, rule, dp_size * microbatch_group_size)
        num_microbatches.append(len(micro_batches) // dp_size)
        for rank, numbers in enumerate(_deal(micro_batches, step_lengths, rule, dp_size)):
            for number in numbers:
                start = len(partitions[rank])
                partitions[rank] += [samples[item] for item in micro_batches[number]]
                micro_batch_indices[rank].append(list(range(start, len(partitions[rank]))))
    return DPSchedule(partitions, micro_batch_indices, num_microbatches, [global_batch_size] * len(steps), dropped)


def _cut_steps(lengths: list[int], execution_ids: Sequence[int], global_batch_size: int) -> tuple[list[list[int]], int]:
    """Samples of each full step, in order of position, and the number of executions left over."""
    if len(lengths) != len(execution_ids):
        raise ValueError(f"one rollout index per sample: got {len(execution_ids)} for {len(lengths)} samples")
    if global_batch_size < 1:
        raise UserError(f"--global-batch-size must be at least 1, got {global_batch_size}")
    step_of_rollout = {
        rollout: number // global_batch_size for number, rollout in enumerate(dict.fromkeys(execution_ids))
    }
    num_rollouts = len(step_of_rollout)
    num_steps, dropped = divmod(num_rollouts, global_batch_size)
    if num_steps == 0:
        raise UserError(
            f"num_rollouts = {num_rollouts} is less than one optimizer step of --global-batch-size {global_batch_size}: "
            "lower --global-batch-size, or generate more (--rollout-batch-size, --n-samples-per-prompt)"
        )
    steps: list[list[int]] = [[] for _ in range(num_steps + 1)]
    for sample, rollout in enumerate(execution_ids):
        steps[step_of_rollout[rollout]].append(sample)
    return steps[:num_steps], dropped


def _form_micro_batches(lengths: list[int], rule: BatchingRule) -> Bins:
    if rule.packing == "static":
        starts = range(0, len(lengths), rule.micro_batch_size)
        return [list(range(start, min(start + rule.micro_batch_size, len(lengths)))) for start in starts]
    if rule.packing == "first-fit":
        return first_fit_pack(lengths, rule.token_budget)
    if rule.packing == "best-fit":
        return best_fit_pack(lengths, rule.token_budget)
    if rule.packing == "flops":
        flops = [rule.flops_model.forward_flops(length) for length in lengths]
        part_count = min(math.ceil(sum(lengths) / rule.token_budget), len(lengths))
        parts = [part for part in karmarkar_karp(flops, max(part_count, 1)) if part]
        return split_bins_over_capacity(parts, lengths, rule.token_budget)
    raise UserError(f"--packing {rule.packing}: unknown; choose best-fit or first-fit")


def _even_the_count(micro_batches: Bins, lengths: list[int], rule: BatchingRule, multiple: int) -> Bins:
    if len(micro_batches) % multiple == 0:
        return micro_batches
    if rule.packing == "static":
        raise UserError(_static_sizes_message(len(lengths), len(micro_batches), rule.micro_batch_size, multiple))
    target = math.ceil(len(micro_batches) / multiple) * multiple
    if target > len(lengths):
        raise UserError(
            f"a step of {len(lengths)} samples cannot be cut into {target} micro-batches, the next multiple of {multiple} "
            "(data-parallel ranks × micro-batches that the virtual pipeline takes at a time): "
            "raise --global-batch-size or use fewer data-parallel ranks"
        )
    return expand_bins_by_splitting(micro_batches, lengths, target)


def most_micro_batches(packing: str, token_budget: int, count: int, longest: int) -> int:
    """An upper bound for the number of dynamic micro-batches of `count` samples of at most `longest` tokens, before their
    number is made a multiple for the ranks."""
    together = token_budget // longest
    if together < 2:
        return count
    if packing == "flops":
        # There are ceil(tokens / budget) parts at first. A part above the budget is split into two of nearly equal size, each
        # of which is at least half of the budget, less one sample.
        tokens = count * longest
        return min(count, math.ceil(tokens / token_budget) + 2 * tokens // (token_budget - longest))
    # A bin is opened only when no other has room for a sample, and then each of the others holds `together` samples or more.
    return math.ceil(count / together)


def _static_sizes_message(sample_count: int, micro_batch_count: int, micro_batch_size: int, multiple: int) -> str:
    fitting = [size for size in range(1, sample_count + 1) if math.ceil(sample_count / size) % multiple == 0]
    advice = (
        f"sizes that fit: {', '.join(map(str, fitting))}"
        if fitting
        else "no size fits: raise --global-batch-size or use fewer data-parallel ranks"
    )
    return (
        f"--micro-batch-size {micro_batch_size} makes {micro_batch_count} micro-batches of {sample_count} samples, "
        f"which is not a multiple of {multiple} "
        f"(data-parallel ranks × micro-batches that the virtual pipeline takes at a time); {advice}"
    )


def _deal(micro_batches: Bins, lengths: list[int], rule: BatchingRule, dp_size: int) -> Bins:
    """For each rank the numbers of its micro-batches, ascending."""
    if rule.flops_model is None:
        return [list(range(rank, len(micro_batches), dp_size)) for rank in range(dp_size)]
    flops = [sum(rule.flops_model.forward_flops(lengths[item]) for item in members) for members in micro_batches]
    return balance_by_swaps(karmarkar_karp(flops, dp_size, equal_size=True), flops)
