"""Rules about trained parameters, the transport of weights, and the optimizer's states."""

import argparse
import logging
import re
from collections.abc import Iterator

from slime.arguments.plug_ins import flag_of
from slime.arguments.rules import Rule

logger = logging.getLogger(__name__)


def parameter_names(args: argparse.Namespace) -> Iterator[str]:
    names = ("only_train_params_name_list", "freeze_params_name_list")
    if all(getattr(args, name) for name in names):
        yield (
            "--only-train-params-name-list and --freeze-params-name-list exclude each other: each says which parameters are "
            "trained; keep one"
        )
    for name in names:
        for pattern in getattr(args, name) or []:
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"{flag_of(name)} {pattern}: it is no regular expression ({error}); write one such as 'layers\\.0\\.'"


def transport(args: argparse.Namespace) -> Iterator[str]:
    if args.update_weight_transport == "disk" and args.update_weight_disk_dir is None:
        yield "--update-weight-transport disk needs --update-weight-disk-dir, a directory that trainer and engines share"
    if args.update_weight_mode != "delta":
        return
    if args.colocate:
        yield (
            "--update-weight-mode delta with --colocate: weights are handed over in memory there; give "
            "--update-weight-mode full"
        )
        return
    if args.update_weight_transport != "disk":
        yield (
            f"--update-weight-mode delta with --update-weight-transport {args.update_weight_transport}: deltas travel as "
            "files; give --update-weight-transport disk"
        )
    if args.update_weight_local_checkpoint_dir is None:
        yield (
            "--update-weight-mode delta needs --update-weight-local-checkpoint-dir, a directory on every engine host to which "
            "the deltas are applied"
        )


def released_trainer(args: argparse.Namespace) -> Iterator[str]:
    if not args.release_train:
        return
    reason = "--release-train recreates the trainer from a checkpoint for each step"
    if args.train_backend != "megatron":
        yield f"--release-train with --train-backend {args.train_backend}: only megatron can; drop it"
    if args.use_critic:
        yield "--release-train with --advantage-estimator ppo: the critic would be lost; drop it"
    if args.keep_old_actor:
        yield "--release-train with --keep-old-actor: the copy would be lost; drop one"
    if args.save is None:
        yield f"{reason}; give --save"
    if args.save_interval not in (None, 1):
        yield f"{reason}, so --save-interval {args.save_interval} must be 1"
    if (args.update_weight_mode, args.update_weight_transport) != ("full", "disk"):
        yield (
            f"{reason} and hands weights over as files: give --update-weight-mode full --update-weight-transport disk instead "
            f"of {args.update_weight_mode} over {args.update_weight_transport}"
        )


def stateless_adam(args: argparse.Namespace) -> Iterator[str]:
    if not args.use_stateless_adam:
        return
    if args.optimizer != "adam":
        yield f"--use-stateless-adam with --optimizer {args.optimizer}: give --optimizer adam"
    if not args.decoupled_weight_decay:
        yield "--use-stateless-adam with --no-decoupled-weight-decay: its decay is decoupled; drop one of them"
    if not args.no_save_optim:
        yield "--use-stateless-adam has no optimizer state to save: add --no-save-optim"


def old_actor(args: argparse.Namespace) -> Iterator[str]:
    """Warns; yields nothing."""
    is_read = args.loss_type == "policy_loss" and not args.use_rollout_logprobs
    if args.keep_old_actor and is_read and not args.asynchronous and not args.debug_train_only:
        logger.warning(
            "--keep-old-actor without train_async.py: a rollout trains on the weights that generated it, and the old log-probs "
            "come from those before"
        )
    yield from ()


WEIGHT_RULES: tuple[Rule, ...] = (parameter_names, transport, released_trainer, stateless_adam, old_actor)
