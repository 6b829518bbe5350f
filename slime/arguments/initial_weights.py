"""Where the weights come from at the start of a run, and what follows from that. A rule says why there are none."""

import argparse
from collections.abc import Callable

from slime.arguments.checkpoints import WeightSource, latest_iteration, resolve_initial_weights
from slime.arguments.critic import critic_weights
from slime.utils.errors import UserError


def derive_initial_weights(args: argparse.Namespace) -> None:
    """Set `initial_weights` and, in a run with a critic, `critic_initial_weights`; None where a source cannot be used."""
    args.initial_weights = None
    if args.has_trainer:
        args.initial_weights = _source_or_none(source_of_actor, args)
        _start_at_the_beginning(args)
    if args.use_critic and args.has_trainer:
        args.critic_initial_weights = None
        if args.initial_weights is not None:
            args.critic_initial_weights = _source_or_none(critic_weights, args)


def source_of_actor(args: argparse.Namespace) -> WeightSource:
    """The source of the actor's weights, with an iteration to resume from where it resumes.

    Raises:
        UserError: there is none that can be used.
    """
    source = resolve_initial_weights(args)
    if source.resume and source.step is None:
        latest_iteration(source.path)
    return source


def _source_or_none(
    find: Callable[[argparse.Namespace], WeightSource], args: argparse.Namespace
) -> WeightSource | None:
    try:
        return find(args)
    except UserError:
        return None


def _start_at_the_beginning(args: argparse.Namespace) -> None:
    """What follows for a run that does not resume."""
    source = args.initial_weights
    if source is None or source.resume:
        return
    args.no_load_optim = args.no_load_rng = args.finetune = True
    if source.step is not None:
        args.ckpt_step = source.step
    if args.start_rollout_id is None:
        args.start_rollout_id = 0
