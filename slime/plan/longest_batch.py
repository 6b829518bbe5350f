"""The longest micro-batches that a run may have, before it has any: what a rehearsal goes through on fake devices, and the
memory probe on those of the run.

Dynamic micro-batches hold at most the token budget, `--max-tokens-per-gpu` of every context-parallel rank, but for a sample
that is longer and makes one of its own. Static ones hold `--micro-batch-size` samples. How long a sample may be the flags of
generation say. And what the probe found, in words, beside what is planned.
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
from slime.plan.memory import planned_critic
from slime.plan.setup import parallel_layout, planned_sample, prompt_is_limited, shape_of, step_memory
from slime.plan.structure import GIB

# Of each sample its tokens, and those of its response.
Lengths = list[tuple[int, int]]

# Of a step, unless a pipeline holds more at once: in the second one the activations of the first are gone, and its gradients
# are added to what is there.
_MICRO_BATCHES = 2
# By whom an execution may become several samples.
_MAKERS_OF_SAMPLES = (
    "custom_generate_function_path", "custom_convert_samples_to_train_data_path", "load_debug_rollout_data",
    "load_forge_rollout_data",
)  # fmt: skip


def micro_batches(args: argparse.Namespace, layout: ParallelLayout) -> list[Lengths]:
    """Full micro-batches of samples as long as they may be, none above the budget. There are as many as the first stage of a
    pipeline holds at once, two at least. None at all where no flag says how large one is."""
    sample, plan = planned_sample(args), plan_batch(args, layout)
    budget = plan.token_budget or (args.micro_batch_size * sample if sample else None)
    if budget is None:
        return []
    longest = min(sample or budget, budget)
    return [_answers(_filled(budget, longest))] * _at_once(args, layout, plan.micro_batches)


def longest_micro_batches(args: argparse.Namespace) -> list[Lengths]:
    """The same for one step of a run: a sample above the budget is alone and whole, and a micro-batch has no more samples than
    a step leaves for it. None at all where no flag says how large one is."""
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
    """Samples with a token of a prompt: nothing needs the logits of a longer one."""
    return [(length, length - 1) for length in lengths]


def _filled(budget: int, longest: int) -> list[int]:
    lengths = [longest] * (budget // longest)
    # What is left of the budget holds a shorter sample.
    return [*lengths, budget % longest] if budget % longest > 1 else lengths


def _most_samples(args: argparse.Namespace, layout: ParallelLayout) -> int:
    """In a micro-batch of a step in which the others of its ranks have one sample at least."""
    is_own = args.rollout_function_path.startswith("slime.rollout.")
    if not is_own or any(vars(args)[name] is not None for name in _MAKERS_OF_SAMPLES):
        # An execution may be many samples then, and the budget alone counts.
        return args.max_tokens_per_gpu * layout.context if args.use_dynamic_batch_size else args.micro_batch_size
    return max(1, args.global_batch_size - layout.data * micro_batches_at_a_time(args) + 1)


def _at_once(args: argparse.Namespace, layout: ParallelLayout, of_step: int | None) -> int:
    wanted = max(_MICRO_BATCHES, layout.pipeline)
    if layout.virtual_pipeline > 1:
        # After one group of micro-batches a stage would still be going forward; after two it has been as full as it gets.
        wanted = 2 * (args.microbatch_group_size_per_vp_stage or layout.pipeline)
    return min(of_step or wanted, wanted)


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
        before: of tensors that were there before it.
        to_come: that the optimizer will take in its first update, and a model beside it. They were held meanwhile.
        peaks: the most that tensors took at once, what was held among it, by phase; None: the device counts none.
        free, device: what nobody had in use when the passes were done, but nothing of theirs was given back; and all there is.
    """

    before: int
    to_come: int
    peaks: dict[str, int] | None
    free: int
    device: int


def probe_line(args: argparse.Namespace, batches: Sequence[Lengths], probed: Sequence[ProbedMemory]) -> str:
    """What the probe found on the rank with the highest peak, in one line, beside the plan's figure.

    Args:
        probed: of every rank of the role of `args`.
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
    """What the plan says of the tensors of a step of these micro-batches, on the stage with most; None: it says nothing."""
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
    """The error of a rank whose memory ran out in the probe: what it did, what it had, and which flags lower what.

    Args:
        place: which rank, and in which phase.
        numbers: what was measured.
    """
    if not args.use_dynamic_batch_size:
        lower = "--micro-batch-size, --rollout-max-response-len"
    elif len(batches[0]) == 1 and longest_sample(args) is not None:
        # Of a sample that is above the budget a smaller one changes nothing.
        lower = "--rollout-max-response-len"
    else:
        lower = "--max-tokens-per-gpu"
    more = ["a larger --context-parallel-size"]
    if args.train_backend == "fsdp":
        more += ["--gradient-checkpointing"] * (not args.gradient_checkpointing)
        more += ["--fsdp-cpu-offload"] * (not args.fsdp_cpu_offload)
    else:
        if args.recompute_granularity != "full":
            more.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
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
