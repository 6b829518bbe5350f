"""Rules about what must exist on disk, what is saved, and where dumps and exports go.

A plan can do without the files: under `--dry-run` the messages of `FILE_RULES` are notes.
"""

import argparse
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slime.arguments.checkpoints import POINTER, checkpoint_source, is_megatron_checkpoint
from slime.arguments.critic_arguments import DIRECTORY, critic_args, critic_weights
from slime.arguments.derivation import source_of_actor
from slime.arguments.flag import PathKind, flag_of
from slime.arguments.groups import OWN_FLAGS
from slime.arguments.hf_config import no_directory
from slime.arguments.paths import missing_plug_ins
from slime.arguments.rules import Rule
from slime.arguments.rules.data import own_files
from slime.utils.data_files import parse_data_path, path_without_slice
from slime.utils.errors import UserError
from slime.utils.filesystem import existing_files

_WRITTEN = tuple(name for name, flag in OWN_FLAGS.items() if flag.path is PathKind.WRITTEN)


def hf_checkpoint(args: argparse.Namespace) -> Iterator[str]:
    if args.hf_checkpoint is not None and not Path(args.hf_checkpoint).is_dir():
        yield no_directory("--hf-checkpoint", args.hf_checkpoint)


def data_files(args: argparse.Namespace) -> Iterator[str]:
    for file in own_files(args):
        if not os.path.isfile(path_without_slice(file.path)):
            try:
                parse_data_path(file.path, file.flag)
            except UserError as error:
                yield str(error)


def rollout_dumps(args: argparse.Namespace) -> Iterator[str]:
    """The first dump must be there before anything starts; which one is the first, a resume decides later."""
    template, first = args.load_debug_rollout_data, args.start_rollout_id or 0
    if template is None:
        return
    try:
        path = template.format(rollout_id=first)
    except (KeyError, IndexError, ValueError):
        return  # a rule about templates says so
    known = existing_files(template)
    if not os.path.isfile(path) and not (known and args.load is not None):
        there = f"there is {known[0]} … {known[-1]}; give --start-rollout-id" if known else "give the path of a dump"
        yield f"--load-debug-rollout-data {template}: {path} does not exist; {there}"


def other_models(args: argparse.Namespace) -> Iterator[str]:
    """Reference and teacher: each must be a checkpoint, with the iteration that is asked for."""
    models = (("--ref-load", args.ref_load, args.ref_ckpt_step, "--ref-ckpt-step"),)
    if args.use_opd and args.opd_type == "megatron":
        models += (
            ("--opd-teacher-load", args.opd_teacher_load, args.opd_teacher_ckpt_step, "--opd-teacher-ckpt-step"),
        )
    for flag, path, step, step_flag in models:
        if path is None:
            continue
        try:
            checkpoint_source(path, step, flag, step_flag)
        except UserError as error:
            yield str(error)


def initial_weights(args: argparse.Namespace) -> Iterator[str]:
    """Why the weights come from nowhere. The critic follows the actor."""
    if not args.has_trainer:
        return
    try:
        if args.initial_weights is None:
            source_of_actor(args)
        elif args.use_critic and args.critic_initial_weights is None:
            critic_weights(args)
    except UserError as error:
        yield str(error)


def writable_places(args: argparse.Namespace) -> Iterator[str]:
    """What is written during the run must not fail after the first hours of it."""
    for name in _WRITTEN:
        path = getattr(args, name)
        # What follows from --dump-details is told as that.
        if path is None or name not in args.typed_flags:
            continue
        there = existing_parent(path)
        if there == Path(path) and there.is_file():
            continue  # a dump without a placeholder, written again
        reason = unwritable(there)
        if reason is not None:
            yield f"{flag_of(name)} {path}: {there} {reason}; give a place where you may write"


def existing_parent(path: str) -> Path:
    """The nearest directory or file above or at `path` that exists; the part behind the first placeholder is open."""
    place = Path(path.partition("{")[0])
    while not os.path.lexists(place):
        place = place.parent
    return place


def unwritable(directory: Path) -> str | None:
    """Why nothing can be created in `directory`; None when it can. A file without a name is created to find out."""
    if not directory.is_dir():
        return "is a file, not a directory"
    try:
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return f"cannot be written ({error.strerror})"


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


FILE_RULES: tuple[Rule, ...] = (
    hf_checkpoint,
    data_files,
    rollout_dumps,
    other_models,
    initial_weights,
    missing_plug_ins,
    writable_places,
)
CHECKPOINT_RULES: tuple[Rule, ...] = (saving, saved_at_all, templates, subsample, critic)
