"""The driver's side of `--rehearse`: it chooses ranks and samples, rehearses each rank in a process of its own, and reports."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pickle
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slime.arguments.config_files.role_config import CRITIC, critic_args
from slime.arguments.hf_config import spelling
from slime.arguments.rules.megatron import RECOMPUTED_BY_ENGINE
from slime.estimates.layout import ParallelLayout
from slime.estimates.training_memory import RankMemory, push_buffers
from slime.plan.batch import plan_batch
from slime.plan.critic_memory import planned_critic
from slime.plan.longest_batch import micro_batches
from slime.plan.setup import parallel_layout, shape_of, step_memory, tokens_of_stream, training_setup
from slime.rehearsal.report import Failure, Planned, Pushed, RankReport, Rehearsed, Saved, Task, render
from slime.rehearsal.stand_in import StandIn, find_or_build
from slime.utils.child_process import ChildProcess, describe_exit_status, environment_for_python
from slime.utils.errors import RunError, UserError
from slime.weights.verification import NamesDiffer, PushedNames

_RANK_SECONDS = 1800.0
# Flags that only Transformer Engine can serve; the rehearsal switches them off, and says so.
_NEED_KERNELS = dict.fromkeys(("fp8", "megatron_deepgemm_forward_layers", "megatron_deepgemm_moe_forward_layers"))
# Flags that Megatron-Core refuses without those.
_OF_KERNELS = dict.fromkeys(
    ("fp8_param_gather", "moe_router_padding_for_fp8", "moe_router_padding_for_quantization"), False
)
# Kernels of Transformer Engine, Apex and DeepEP do not go through fake tensors.
WITHOUT_KERNELS = {
    "transformer_impl": "local", "moe_grouped_gemm": False, "moe_permute_fusion": False, "moe_router_fusion": False,
    "moe_token_dispatcher_type": "alltoall", **_NEED_KERNELS, **_OF_KERNELS,
    # Fake tensors have no numbers to compare.
    "true_on_policy_mode": False,
}  # fmt: skip


def show_rehearsal(args: argparse.Namespace) -> None:
    """Rehearse the chosen ranks of a checked run, and print what they take beside what is planned for them.

    Raises:
        UserError: the run has nothing that can be rehearsed, or `--rehearse-ranks` names a rank that it does not have.
        RunError: a rank could not be rehearsed to its end; the results until then are printed.
    """
    _require_rehearsable(args)
    stand_in = find_or_build()
    reports, lost = [], None
    left_out = {f"{spelling(name)}: the rehearsal goes without": None for name in _NEED_KERNELS if vars(args)[name]}
    if modules := _recomputed_by_kernels(args):
        left_out[f"--recompute-modules {' '.join(modules)}: the rehearsal keeps what they made"] = None
    for of_role in _roles(args):
        layout = parallel_layout(of_role)
        ranks = _ranks(of_role, layout)
        batches = micro_batches(of_role, layout)
        if not batches:
            raise UserError(
                "--rehearse needs the size of a micro-batch: give --max-tokens-per-gpu with --use-dynamic-batch-size, or "
                "--rollout-max-context-len"
            )
        memory = planned(of_role, layout, len(batches))
        left_out |= dict.fromkeys(_left_out(of_role, layout, batches, stand_in))
        try:
            for rank in ranks:
                place = layout.place(rank)
                result = rehearse_rank(of_role, rank, batches, stand_in)
                reports.append(RankReport(of_role.role, place, batches, result, memory[place.pipeline]))
        except RunError as error:
            lost = error
            break
    push, names_differ = _pushed_together(reports, parallel_layout(args).pipeline)
    print(render(reports, push, tuple(left_out)))
    if lost is not None:
        raise lost
    stopped = [report for report in reports if report.result.failure is not None]
    if stopped:
        failure: Failure = stopped[0].result.failure
        raise RunError(f"the rehearsal of {stopped[0].name} stopped in the phase {failure.phase}: {failure.error}")
    if names_differ:
        raise RunError(push)


def _roles(args: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """The arguments of the actor and, if there is one, of the critic.

    Raises:
        UserError: one of them cannot be rehearsed.
    """
    of_roles = [args, critic_args(args)] if args.use_critic else [args]
    for of_role in of_roles:
        _require_layout(of_role)
    return map(_without_kernels, of_roles)


def _without_kernels(args: argparse.Namespace) -> argparse.Namespace:
    changed = dict(WITHOUT_KERNELS)
    if _recomputed_by_kernels(args):
        modules = [module for module in args.recompute_modules if module not in RECOMPUTED_BY_ENGINE]
        changed |= {"recompute_modules": modules} if modules else {"recompute_granularity": None}
    return argparse.Namespace(**{**vars(args), **changed})


def _recomputed_by_kernels(args: argparse.Namespace) -> list[str]:
    """The modules that the run recomputes with Transformer Engine."""
    modules = args.recompute_modules or () if args.recompute_granularity == "selective" else ()
    return [module for module in modules if module in RECOMPUTED_BY_ENGINE]


def rehearse_rank(
    args: argparse.Namespace,
    rank: int,
    batches: list[list[tuple[int, int]]],
    stand_in: StandIn,
    module: str = "slime.rehearsal.rank",
) -> Rehearsed:
    """Rehearse one rank in a process of its own.

    Args:
        args: the arguments of its role.
        batches: the samples of each micro-batch, as (tokens of the sample, tokens of its response).
        module: the module that the process runs.

    Raises:
        RunError: the process ended without an answer, or did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="slime-rehearsal-") as directory:
        task = Task(args, rank, stand_in.library, batches, Path(directory) / "answer.json")
        file = Path(directory) / "task.pickle"
        file.write_bytes(pickle.dumps(task))
        child = ChildProcess(
            f"the rehearsal of rank {rank}",
            [sys.executable, "-W", "ignore", "-m", module, str(file)],
            Path(directory) / "log",
            # A torch with CUDA must not find any GPU of the machine, because fake tensors are on none.
            {**environment_for_python(), "CUDA_VISIBLE_DEVICES": ""},
        )
        child.start()
        try:
            status = child.wait(_RANK_SECONDS)
        finally:
            child.terminate(0)
        if status is None:
            raise RunError(f"{child.name} did not end within {_RANK_SECONDS:.0f} s")
        if status:
            said = child.log_tail(1) if status > 0 else describe_exit_status(status)
            raise RunError(f"{child.name} failed: {said}")
        answer = json.loads(task.answer.read_text())
    for name, kind in {"failure": Failure, "pushed": Pushed, "saved": Saved}.items():
        answer[name] = kind(**answer[name]) if answer[name] is not None else None
    return Rehearsed(**answer)


def _ranks(args: argparse.Namespace, layout: ParallelLayout) -> list[int]:
    """The ranks to rehearse: those of `--rehearse-ranks`, else the first of every pipeline stage."""
    if args.rehearse_ranks is None:
        return layout.first_of_stages
    absent = [rank for rank in args.rehearse_ranks if rank >= layout.world_size]
    if absent:
        raise UserError(
            f"--rehearse-ranks {absent[0]}: the run has {layout.world_size} training ranks, 0 to {layout.world_size - 1}"
        )
    return list(dict.fromkeys(args.rehearse_ranks))


def _require_rehearsable(args: argparse.Namespace) -> None:
    """Raise UserError for a run that cannot be rehearsed at all."""
    if args.dry_run_json is not None:
        raise UserError("--rehearse makes no plan: leave --dry-run-json out, or --rehearse")
    if not args.has_trainer:
        raise UserError("--rehearse rehearses training ranks, and this run has none")
    if args.num_rollout == 0:
        raise UserError("--rehearse rehearses a step of training, and with --num-rollout 0 none is taken")
    if shape_of(args) is None:
        raise UserError(
            "--rehearse needs the model's shape: give --model-args-from-hf, or source a file of scripts/models"
        )


def _require_layout(args: argparse.Namespace) -> None:
    """Raise UserError if the flags of one role cannot be rehearsed."""
    not_yet = {
        f"--train-backend {args.train_backend}": args.train_backend != "megatron",
        "--moe-expert-capacity-factor": bool(args.num_experts) and args.moe_expert_capacity_factor is not None,
    }
    for flag, is_asked_for in not_yet.items():
        if is_asked_for:
            raise UserError(f"--rehearse with {flag}: it cannot be rehearsed yet; leave one of them out")


def planned(args: argparse.Namespace, layout: ParallelLayout, count: int) -> tuple[Planned, ...]:
    """The plan for a rank of each pipeline stage with `count` micro-batches: its step, its push and its save."""
    if args.role == CRITIC:
        args = planned_critic(args)
    shape = shape_of(args)
    # A rehearsed push gives its tensors to nobody.
    setup = training_setup(args, layout, tokens_of_stream(args, layout), count)
    setup = dataclasses.replace(setup, push_lends=False)
    # The rehearsal's data are only those of its own micro-batches, and the driver's are not tensors.
    memories = step_memory(args, layout, setup.stream_tokens, count)
    return tuple(
        _parts(memory, push_buffers(shape, setup, stage)) for memory, stage in zip(memories, setup.stages, strict=True)
    )


def _pushed_together(reports: list[RankReport], stages: int) -> tuple[str, bool]:
    """(how the pushes of all stages fit together, in words; whether their names differ from those expected). The text is empty
    if a push is not known."""
    pushes = [report.result.pushed for report in reports if report.result.pushed is not None]
    # One rank of each stage pushes.
    if len(pushes) < stages:
        return "", False
    expected = pushes[0].expected
    names = PushedNames(None if expected is None else set(expected))
    try:
        for push in pushes:
            names.check_bucket(push.names)
        names.check_complete()
    except NamesDiffer as error:
        return str(error), True
    total = sum(len(push.names) for push in pushes)
    return f"weight push: {total:,} tensors, each by one stage" if stages > 1 else "", False


def _parts(memory: RankMemory, push: int) -> Planned:
    step = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations + memory.buffers,
        "logits": memory.logits,
    }
    return Planned(step, push, memory.moment, memory.saving)


def _left_out(
    args: argparse.Namespace, layout: ParallelLayout, batches: list[list[tuple[int, int]]], stand_in: StandIn
) -> Iterator[str]:
    """The things that no rank rehearses, in words."""
    if stand_in.library is None:
        yield f"branches for CUDA, and waits of the host: the tensors are fake CPU tensors, because {stand_in.why_none}"
    in_step = plan_batch(args, layout).micro_batches
    if in_step is not None and in_step > len(batches):
        yield f"{in_step - len(batches)} of the {in_step} micro-batches of a step"
    if args.use_critic:
        yield "actor and critic beside each other in the memory of one GPU: each has a process of its own"
    yield "layers of Transformer Engine: those of --transformer-impl local stand in for them"
    if args.num_experts:
        yield "the choice of experts: every expert gets equally many tokens"
        yield "kernels for all experts of a rank at once, and DeepEP: experts work one after the other, after an all-to-all"
    yield "compiled kernels of log-probs: the chunks stand in for them, with their operations and memory"
    yield "values: no loss, no overflow, no skipped step; what depends on them goes its usual way"
    yield "the file system that a checkpoint is written to"
    yield "what CUDA, NCCL and the allocator take beside the tensors"
    yield from (f"what the run would refuse: {note}" for note in args.plan_notes)
