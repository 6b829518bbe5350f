"""Rules about what must exist on disk. A plan can do without: under `--dry-run` their messages are notes."""

import argparse
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from slime.arguments.checkpoints import checkpoint_source, latest_iteration, resolve_initial_weights
from slime.arguments.plug_ins import missing_files
from slime.arguments.rules import Rule
from slime.arguments.rules.data import own_files
from slime.utils.data_files import parse_data_path, path_without_slice
from slime.utils.errors import UserError
from slime.utils.file_templates import existing_files

logger = logging.getLogger(__name__)


def hf_checkpoint(args: argparse.Namespace) -> Iterator[str]:
    if args.hf_checkpoint is not None and not Path(args.hf_checkpoint).is_dir():
        yield f"--hf-checkpoint {args.hf_checkpoint}: no such directory; give a Hugging Face checkpoint directory"


def data_files(args: argparse.Namespace) -> Iterator[str]:
    for path, _, _, flag in own_files(args):
        if not os.path.isfile(path_without_slice(path)):
            try:
                parse_data_path(path, flag)
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
            source = checkpoint_source(path, step, flag, step_flag)
        except UserError as error:
            yield str(error)
        else:
            if flag == "--ref-load" and source.kind != "megatron":
                logger.info("--ref-load %s is no Megatron checkpoint: it is loaded as Hugging Face directory", path)


def initial_weights(args: argparse.Namespace) -> Iterator[str]:
    """Decide where the weights come from, and set what follows from that."""
    args.initial_weights = None
    if not args.has_trainer:
        return
    try:
        source = resolve_initial_weights(args)
        if source.resume and source.step is None:
            latest_iteration(source.path)
    except UserError as error:
        yield str(error)
        return
    args.initial_weights = source
    if not source.resume:
        args.no_load_optim = args.no_load_rng = args.finetune = True
        if source.path is not None and source.path == args.ref_load:
            args.ckpt_step = source.step
        if args.start_rollout_id is None:
            args.start_rollout_id = 0


FILE_RULES: tuple[Rule, ...] = (hf_checkpoint, data_files, rollout_dumps, other_models, initial_weights, missing_files)
