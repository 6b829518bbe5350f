"""What a critic adds to the memory of the actor's ranks, on whose devices and hosts it is."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from slime.arguments.config_files.role_config import critic_args
from slime.estimates.layout import ParallelLayout
from slime.estimates.training_memory import RankMemory, training_memory
from slime.plan.placement import has_critic
from slime.plan.setup import parallel_layout, shape_of, tokens_of_stream, trainer_sleeps, training_setup


@dataclass(frozen=True)
class CriticMemory:
    """For each stage of the actor, the bytes that a rank needs for the critic: `device` on top of the actor's peak, `host` on
    top of the actor's host memory."""

    device: tuple[int, ...]
    host: tuple[int, ...]


def critic_memory(
    args: argparse.Namespace, layout: ParallelLayout, actors: tuple[RankMemory, ...], micro_batches: int | None
) -> CriticMemory:
    """The memory of the critic, nothing if there is none.

    Either the critic rests at the actor's peak, or the critic works and the peak is its own, if that is higher. It sleeps where
    the actor does. The critic may have other stages than the actor: then the largest part of the critic on any rank of the
    actor's stage counts.

    Args:
        actors: the actor's memory on a rank of every stage of `layout`.

    Raises:
        UserError: the critic's sizes do not divide the number of ranks, or its layers cannot be split.
    """
    device, host = [0] * len(actors), [0] * len(actors)
    if has_critic(args):
        critic = planned_critic(critic_args(args))
        own = parallel_layout(critic)
        setup = training_setup(critic, own, tokens_of_stream(critic, own), micro_batches)
        memories = training_memory(shape_of(critic), replace(setup, sleeps=trainer_sleeps(args)))
        for rank in range(layout.world_size):
            stage, memory = layout.place(rank).pipeline, memories[own.place(rank).pipeline]
            beside = max(memory.persistent, memory.total + actors[stage].persistent - actors[stage].total)
            device[stage], host[stage] = max(device[stage], beside), max(host[stage], memory.host)
    return CriticMemory(tuple(device), tuple(host))


def planned_critic(critic: argparse.Namespace) -> argparse.Namespace:
    """The flags of `critic_args` with those changes that memory is planned with."""
    # A critic never pushes, keeps no other set of weights, and has no layers that predict further tokens.
    changed = {"has_engines": False, "offload_train": False, "mtp_num_layers": None}
    return argparse.Namespace(**{**vars(critic), **changed})
