"""Rules about what must exist on disk. A plan can do without: under `--dry-run` their messages are notes."""

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slime.arguments import flag as flags
from slime.arguments.checkpoints import checkpoint_source
from slime.arguments.critic import critic_weights
from slime.arguments.groups import OWN_FLAGS
from slime.arguments.hf_config.reading import no_directory
from slime.arguments.initial_weights import source_of_actor
from slime.arguments.plug_ins import flag_of, missing_plug_ins
from slime.arguments.rules import Rule
from slime.arguments.rules.data import own_files
from slime.utils.data_files import parse_data_path, path_without_slice
from slime.utils.errors import UserError
from slime.utils.file_templates import existing_files

_WRITTEN = tuple(name for name, flag in OWN_FLAGS.items() if flag.path is flags.Path.WRITTEN)


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


FILE_RULES: tuple[Rule, ...] = (
    hf_checkpoint,
    data_files,
    rollout_dumps,
    other_models,
    initial_weights,
    missing_plug_ins,
    writable_places,
)
