"""The memory of the machine that a run starts its processes on, against what the plan says they take.

On a machine without GPUs every engine and every rank is processes with their tensors in its memory, and any number of
them can be asked for. On GPUs the host holds what ranks put there; what engines keep beside it is not known.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from slime.plan.placement import EnginePart
from slime.plan.structure import MemoryPlan
from slime.utils.errors import UserError

logger = logging.getLogger(__name__)

GIB = 2**30

# Processes without their tensors, on CPU: the pages that each has for itself after a rollout, with torch 2.13, sglang
# 0.5.21, megatron-core 0.16, Ray 2.60 and a model of 0.1 M parameters. Of an engine 0.68 GiB, rounded up: its Ray actor,
# HTTP server, scheduler and detokenizer; a further tensor-parallel rank is a scheduler more. Of a run: driver, manager,
# router and Ray (0.8 GiB), and once the libraries that all of them share (0.5 GiB).
ENGINE_BYTES = round(0.75 * GIB)
FURTHER_SCHEDULER_BYTES = round(0.3 * GIB)
RANK_BYTES = round(0.3 * GIB)
RUN_BYTES = round(1.3 * GIB)

_LIMITS_OF_CONTAINERS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class HostShare:
    """`count` parts of a run and the host memory of each, in bytes, which is a mean where they differ.

    `flag` lowers the count, and what each of the others takes stays as it is; empty where that is not so: fewer training
    ranks hold larger shards.
    """

    name: str
    count: int
    each: int
    flag: str = ""
    per_count: int = 1

    @property
    def total(self) -> int:
        return self.count * self.each


def host_shares(
    args: argparse.Namespace,
    memory: MemoryPlan | None,
    ranks: int,
    engines: Sequence[EnginePart],
    *,
    on_gpus: bool,
) -> tuple[HostShare, ...]:
    """What a run on one machine takes of its memory, as far as the plan knows.

    Args:
        memory: estimates; None where the model's shape is not known, and only the processes count.
        ranks: training ranks; a critic's come on top.
    """
    training = memory.training if memory is not None else None
    if on_gpus:
        host = _mean(training.stage_hosts) if training is not None else 0
        return (HostShare("training rank", ranks, host),) if ranks and host else ()
    shares = [HostShare("Ray, driver, manager and router", 1, RUN_BYTES)]
    if ranks:
        # Actor and critic are processes of their own; the estimate holds the tensors of both.
        processes = RANK_BYTES * (2 if args.use_critic else 1)
        # Pipeline stages differ, and each has as many ranks as another.
        tensors = _mean(training.stage_totals) + _mean(training.stage_hosts) if training is not None else 0
        shares.append(HostShare("training rank", ranks, processes + tensors))
    tensors = memory.serving.total if memory is not None and memory.serving is not None else 0
    for part in engines:
        each = ENGINE_BYTES + (part.per_engine - 1) * FURTHER_SCHEDULER_BYTES + part.per_engine * tensors
        shares.append(HostShare("engine", part.count // part.per_engine, each, "--rollout-num-gpus", part.per_engine))
    return tuple(shares)


def host_memory_problem(shares: Sequence[HostShare], machine: int) -> str | None:
    """What is wrong where the shares are more than `machine` bytes, with both numbers and a way out; else None."""
    needed = sum(share.total for share in shares)
    if needed <= machine:
        return None
    listed = ", ".join(
        f"{share.count} {share.name}{'s' if share.count > 1 else ''} of {share.each / GIB:.1f} GiB"
        if share.count > 1 or share.flag
        else f"{share.name} {share.total / GIB:.1f} GiB"
        for share in sorted(shares, key=lambda share: -share.total)
    )
    return (
        f"the run needs about {needed / GIB:.1f} GiB of memory ({listed}), but this machine has {machine / GIB:.1f} GiB; "
        f"{_way_out(shares, needed - machine)}"
    )


def require_host_memory(shares: Sequence[HostShare], *, on_gpus: bool) -> None:
    """Raise UserError where the run needs more memory than this machine has; on GPUs, whose hosts hold but a part of the
    run, an estimate of that part is worth a warning."""
    problem = host_memory_problem(shares, machine_memory())
    if problem is None:
        return
    if not on_gpus:
        raise UserError(problem)
    logger.warning("%s", problem)


def machine_memory() -> int:
    """Bytes of memory that processes of this machine may use: all of it, or the limit of the container they are in."""
    limits = [psutil.virtual_memory().total]
    for file in _LIMITS_OF_CONTAINERS:
        try:
            limits.append(int(Path(file).read_text()))
        except (OSError, ValueError):
            continue  # not there, or "max"
    return min(limits)


def _mean(sizes: Sequence[int]) -> int:
    return -(-sum(sizes) // len(sizes))


def _way_out(shares: Sequence[HostShare], missing: int) -> str:
    elsewhere = "or join a cluster by RAY_ADDRESS"
    countable = [share for share in shares if share.flag]
    if len(countable) == 1:
        (share,) = countable
        fits = share.count - -(-missing // share.each)
        if fits >= 1:
            return f"{share.flag} {fits * share.per_count} would fit, {elsewhere}"
    return f"take a smaller model or fewer of its parts, {elsewhere}"
