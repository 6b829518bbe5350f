"""Rules about what is saved, and where dumps and exports go."""

import argparse
import logging
from collections.abc import Iterator
from pathlib import Path

from slime.arguments.checkpoints import POINTER, is_megatron_checkpoint
from slime.arguments.critic import DIRECTORY, critic_args
from slime.arguments.flag import flag_of
from slime.arguments.groups import OWN_FLAGS
from slime.arguments.rules import Rule

logger = logging.getLogger(__name__)


def saving(args: argparse.Namespace) -> Iterator[str]:
    for name in ("save_interval", "keep_last", "save_hf"):
        # What follows from another flag is that flag's affair: --release-train needs --save by itself.
        value = getattr(args, name)
        if name in args.typed_flags and value is not None and args.save is None:
            yield f"{flag_of(name)} {value} needs --save, the directory of checkpoints, such as --save outputs/checkpoints"
    if args.save_hf is None:
        return
    if args.hf_checkpoint is None:
        yield "--save-hf needs --hf-checkpoint: config and tokenizer are copied from it"
    elif Path(args.save_hf).absolute() == Path(args.hf_checkpoint).absolute():
        yield f"--save-hf {args.save_hf} would overwrite --hf-checkpoint; give another directory"


def saved_at_all(args: argparse.Namespace) -> Iterator[str]:
    """Nothing is refused: what is written where no one expects it, or never, is worth a warning."""
    if args.save is None or not args.has_trainer or args.num_rollout == 0:
        return
    if args.save_interval is None:
        logger.warning(
            "--save %s without --save-interval: no checkpoint is written; give --save-interval N, which also writes one after "
            "the last rollout",
            args.save,
        )
        return
    source, save = args.initial_weights, Path(args.save).absolute()
    resumes = source is not None and source.resume and Path(source.path).absolute() == save
    if is_megatron_checkpoint(save) and not resumes:
        logger.warning(
            "--save %s holds the checkpoint of rollout %s, and this run does not go on from it: it writes its own among those "
            "of the earlier run; give --load %s to go on, or another --save",
            args.save, (save / POINTER).read_text().strip(), args.save,
        )  # fmt: skip
    yield from ()


def templates(args: argparse.Namespace) -> Iterator[str]:
    for name, flag in OWN_FLAGS.items():
        template, placeholders = getattr(args, name, None), flag.placeholders
        if template is None or not placeholders:
            continue
        try:
            template.format(**dict.fromkeys(placeholders, 0))
        except KeyError as error:
            yield f"{flag_of(name)} {template}: nothing fills in {{{error.args[0]}}}; {_filled_in(placeholders)}"
        except (IndexError, ValueError, AttributeError) as error:
            yield f"{flag_of(name)} {template}: {error}; {_filled_in(placeholders)}, and {{{{ stands for one brace"
    if args.save_debug_rollout_data is not None and "{" not in args.save_debug_rollout_data:
        logger.warning(
            "--save-debug-rollout-data %s: every rollout writes over the one before; put {rollout_id} into the name to "
            "keep them",
            args.save_debug_rollout_data,
        )
    if args.save_debug_rollout_data is not None and args.save_debug_rollout_data == args.save_debug_train_data:
        yield (
            f"--save-debug-rollout-data and --save-debug-train-data name the same file {args.save_debug_rollout_data}; give "
            "two, or --dump-details DIRECTORY"
        )


def _filled_in(placeholders: tuple[str, ...]) -> str:
    known = [f"{{{placeholder}}}" for placeholder in placeholders]
    return f"only {' '.join(known)} {'is' if len(known) == 1 else 'are'} filled in"


def subsample(args: argparse.Namespace) -> Iterator[str]:
    fraction = args.load_debug_rollout_data_subsample
    if fraction is None:
        return
    if not 0 < fraction <= 1:
        yield f"--load-debug-rollout-data-subsample {fraction}: it must be above 0 and at most 1"
    if args.load_debug_rollout_data is None:
        yield f"--load-debug-rollout-data-subsample {fraction} needs --load-debug-rollout-data, the dump to take it from"


def critic(args: argparse.Namespace) -> Iterator[str]:
    if args.use_critic and args.save is not None and critic_args(args).save == args.save:
        yield (
            f"{args.megatron_config_path}, role critic: save {args.save}: the actor's checkpoints go there; drop it, and those "
            f"of the critic go to {Path(args.save) / DIRECTORY}"
        )


CHECKPOINT_RULES: tuple[Rule, ...] = (saving, saved_at_all, templates, subsample, critic)
