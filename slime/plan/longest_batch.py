"""The longest micro-batches that a run may have, computed before it has any. A rehearsal runs them on fake devices, the memory
probe on the devices of the run.

Dynamic micro-batches hold at most the token budget, which is `--max-tokens-per-gpu` times the context-parallel ranks; only a
sample that is longer makes a micro-batch of its own. Static ones hold `--micro-batch-size` samples. The flags of generation
limit how long a sample may be.

This file also words what the probe found, next to the plan's figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from slime.arguments.config_files.role_config import CRITIC
from slime.arguments.sizes import longest_sample, micro_batches_at_a_time
from slime.estimates.layout import ParallelLayout
from slime.estimates.training_memory import worst_rank
from slime.plan.batch import plan_batch
from slime.plan.critic_memory import planned_critic
from slime.plan.setup import (
    parallel_layout,
    planned_sample,
    prompt_is_limited,
    recomputing_all,
    shape_of,
    step_memory,
)
from slime.plan.structure import GIB

# A micro-batch as (tokens of the sample, response tokens among them) per sample.
Lengths = list[tuple[int, int]]

# How many micro-batches show the memory of a step, unless a pipeline holds more at once: two, since the second one adds its
# gradients to those of the first.
_MICRO_BATCHES = 2
# Flags with which an execution may become several samples.
_MAKERS_OF_SAMPLES = (
    "custom_generate_function_path", "custom_convert_samples_to_train_data_path", "load_debug_rollout_data",
    "load_forge_rollout_data",
)  # fmt: skip


def micro_batches(args: argparse.Namespace, layout: ParallelLayout) -> list[Lengths]:
    """Full micro-batches of samples of the longest allowed length, but none above the budget.

    There are as many as the first stage of a pipeline holds at once, and at least two; none if no flag says how large one is.
    """
    sample, plan = planned_sample(args), plan_batch(args, layout)
    budget = plan.token_budget or (args.micro_batch_size * sample if sample else None)
    if budget is None:
        return []
    longest = min(sample or budget, budget)
    return [_answers(_filled(budget, longest))] * _at_once(args, layout, plan.micro_batches)


def longest_micro_batches(args: argparse.Namespace) -> list[Lengths]:
    """As `micro_batches`, but of a step that can really occur: a sample above the budget is alone and whole, and a micro-batch
    has no more samples than the other micro-batches of the step leave for it."""
    layout = parallel_layout(args)
    plan, longest = plan_batch(args, layout), longest_sample(args)
    if plan.token_budget is None:
        sample = planned_sample(args)
        lengths = [sample] * min(args.micro_batch_size, _most_samples(args, layout)) if sample else []
    elif longest is not None and longest >= plan.token_budget:
        lengths = [longest]
    else:
        lengths = _filled(plan.token_budget, longest or plan.token_budget)[: _most_samples(args, layout)]
    return [_answers(lengths)] * _at_once(args, layout, plan.micro_batches) if lengths else []


def _answers(lengths: Sequence[int]) -> Lengths:
    """Samples whose prompt has one token: response tokens cost most, since only they need logits."""
    return [(length, length - 1) for length in lengths]


def _filled(budget: int, longest: int) -> list[int]:
    lengths = [longest] * (budget // longest)
    # What is left of the budget holds a shorter sample.
    return [*lengths, budget % longest] if budget % longest > 1 else lengths


def _most_samples(args: argparse.Namespace, layout: ParallelLayout) -> int:
    """The most samples that one micro-batch of a step can have, since every other one has at least one sample."""
    is_own = args.rollout_function_path.startswith("slime.rollout.")
    if not is_own or any(vars(args)[name] is not None for name in _MAKERS_OF_SAMPLES):
        # An execution may become many samples then, and only the budget limits them.
        return args.max_tokens_per_gpu * layout.context if args.use_dynamic_batch_size else args.micro_batch_size
    return max(1, args.global_batch_size - layout.data * micro_batches_at_a_time(args) + 1)


def _at_once(args: argparse.Namespace, layout: ParallelLayout, micro_batches_of_step: int | None) -> int:
    wanted = max(_MICRO_BATCHES, layout.pipeline)
    if layout.virtual_pipeline > 1:
        # After one group of micro-batches a stage has run forward only; after two it has held as much as it ever does.
        wanted = 2 * (args.microbatch_group_size_per_vp_stage or layout.pipeline)
    return min(micro_batches_of_step or wanted, wanted)


def described(args: argparse.Namespace, batches: Sequence[Lengths]) -> str:
    """The micro-batches of a probe, in words."""
    longest = max(total for total, _ in batches[0])
    tokens = sum(total for total, _ in batches[0])
    samples = f"{len(batches[0])} samples" if len(batches[0]) > 1 else "a sample"
    without = "" if prompt_is_limited(args) or longest_sample(args) is None else ", prompts not counted"
    of_ranks = args.context_parallel_size
    shared = f" on {of_ranks} context-parallel ranks" if of_ranks > 1 else ""
    return f"{len(batches)} micro-batches of {tokens} tokens{shared} ({samples}, the longest {longest}{without})"


@dataclass(frozen=True)
class ProbedMemory:
    """What the memory probe found on one rank; bytes of its device.

    Attributes:
        before: taken by tensors before the probe.
        to_come: to be taken by the optimizer in its first update, and by models beside it. The probe held so much meanwhile.
        peaks: by phase, the most that tensors took at once, `to_come` included; None if the device does not count peaks.
        free: not in use by anyone after the passes, before their memory was given back.
        device: all memory of the device.
    """

    before: int
    to_come: int
    peaks: dict[str, int] | None
    free: int
    device: int


def probe_line(args: argparse.Namespace, batches: Sequence[Lengths], probed: Sequence[ProbedMemory]) -> str:
    """One line with what the probe found on the rank with the highest peak, and what the plan says.

    Args:
        probed: one entry for every rank of the role of `args`.
    """
    peaks = [max(found.peaks.values()) if found.peaks else found.before for found in probed]
    rank = max(range(len(probed)), key=peaks.__getitem__)
    found = probed[rank]
    if found.peaks is None:
        of_phases = "the device counts no peaks of tensors"
    else:
        of_phases = ", ".join(f"{name} {peak / GIB:.2f} GiB" for name, peak in found.peaks.items())
        of_phases = f"peak of tensors {of_phases} ({found.before / GIB:.2f} GiB before it"
        held = f"; {found.to_come / GIB:.2f} GiB held for optimizer state to come" if found.to_come else ""
        of_phases += f"{held})"
    planned = planned_peak(args, batches)
    beside = "no plan" if planned is None else f"planned {planned / GIB:.2f} GiB"
    least = min(found.free for found in probed)
    return (
        f"memory probe of the {args.role}, {described(args, batches)}: rank {rank}: {of_phases}; {beside}; "
        f"free at least {least / GIB:.2f} of {found.device / GIB:.2f} GiB on the device of a rank"
    )


def planned_peak(args: argparse.Namespace, batches: Sequence[Lengths]) -> int | None:
    """The planned peak, in bytes, of a step of these micro-batches on the stage with most; None if it is not planned."""
    if args.train_backend != "megatron" or args.use_megatron_fsdp or shape_of(args) is None:
        return None
    if args.role == CRITIC:
        args = planned_critic(args)
    layout = parallel_layout(args)
    tokens = -(-sum(total for total, _ in batches[0]) // layout.context)
    return worst_rank(step_memory(args, layout, tokens, len(batches))).total


def out_of_memory(
    args: argparse.Namespace, place: str, batches: Sequence[Lengths], numbers: str, error: Exception
) -> str:
    """The error message for a rank whose memory ran out in the probe: where, with which numbers, and which flags would help.

    Args:
        place: words for the rank and the phase.
        numbers: words for what was measured.
    """
    if not args.use_dynamic_batch_size:
        lower = "--micro-batch-size, --rollout-max-response-len"
    elif len(batches[0]) == 1 and longest_sample(args) is not None:
        # A sample above the budget is as long with a smaller budget.
        lower = "--rollout-max-response-len"
    else:
        lower = "--max-tokens-per-gpu"
    more = ["a larger --context-parallel-size"]
    if args.train_backend == "fsdp":
        more += ["--gradient-checkpointing"] * (not args.gradient_checkpointing)
        more += ["--fsdp-cpu-offload"] * (not args.fsdp_cpu_offload)
    else:
        if args.recompute_granularity != "full":
            more.append(recomputing_all(args))
        more += [
            "a larger --tensor-model-parallel-size",
            *["--optimizer-cpu-offload"] * (not args.optimizer_cpu_offload),
        ]
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return (
        f"--memory-probe: memory ran out on {place}, with {described(args, batches)}, the longest that the flags allow: "
        f"{numbers}. Such a step would end the run on the day it comes. Lower {lower}; or give "
        f"{', '.join(more)}; or go on without knowing by --no-memory-probe ({first})"
    )
