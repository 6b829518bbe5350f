"""Where the initial weights come from, decided from flags and directories before anything starts.

`--load` with a Megatron checkpoint in it is a resume; everything else starts at rollout 0 from the first of: `--load` as
Hugging Face directory, `--initial-megatron-checkpoint`, `--ref-load`, random weights with `--random-init`, or
`--hf-checkpoint`. A path that exists but is no checkpoint is an error, never a silent start from scratch.

This module also names the sets of weights that a training rank holds, and says which of them a run needs, both for the trainer,
which loads them, and for the plan, which counts their memory.
"""

import argparse
import fnmatch
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slime.arguments.hf_config import is_hf_checkpoint
from slime.arguments.paths import WRITTEN
from slime.utils.checkpoint_directory import (
    POINTER,
    is_megatron_checkpoint,
    iteration_directory,
    newest_whole,
    why_no_directory,
)
from slime.utils.errors import UserError

# Files that a run which ended before its first checkpoint leaves in its directory, beside hidden temporary directories.
_OWN_LEFTOVERS = ("rollout", "critic", "args.json", "tensorboard", "logs")


@dataclass(frozen=True)
class WeightSource:
    """A place to load weights from: `kind`, `path`, and the iteration to take (None: the latest)."""

    kind: Literal["megatron", "hf", "random"]
    path: str | None = None
    step: int | None = None
    resume: bool = False

    def __str__(self) -> str:
        # FSDP has checkpoints in the layout of Megatron's, too.
        kind = "checkpoint" if self.kind == "megatron" else "Hugging Face directory"
        return "random weights" if self.kind == "random" else f"{self.path} ({kind})"


def resolve_initial_weights(args: argparse.Namespace) -> WeightSource:
    """The source of the actor's weights.

    Raises:
        UserError: `--load` is something else than a checkpoint or an empty directory equal to `--save`, or such a directory
            with `--exit-on-missing-checkpoint`; another source does not exist or is no checkpoint; there is no source at all.
    """
    if args.load is not None:
        source = _source_of_load(args)
        if source is not None:
            return source
    if args.initial_megatron_checkpoint is not None:
        return checkpoint_source(args.initial_megatron_checkpoint, None, "--initial-megatron-checkpoint")
    if args.ref_load is not None:
        return source_of_reference(args)
    if args.random_init:
        return WeightSource("random")
    if args.hf_checkpoint is None:
        raise UserError("no initial weights: give --load, --ref-load, --hf-checkpoint, or --random-init")
    return WeightSource("hf", args.hf_checkpoint)


def source_of_reference(args: argparse.Namespace) -> WeightSource:
    """`--ref-load` as a source; raises as `checkpoint_source`."""
    return checkpoint_source(args.ref_load, args.ref_ckpt_step, "--ref-load", "--ref-ckpt-step")


def source_of_teacher(args: argparse.Namespace) -> WeightSource:
    """`--opd-teacher-load` as a source; raises as `checkpoint_source`."""
    step = args.opd_teacher_ckpt_step
    return checkpoint_source(args.opd_teacher_load, step, "--opd-teacher-load", "--opd-teacher-ckpt-step")


def checkpoint_source(directory: str, step: int | None, flag: str, step_flag: str | None = None) -> WeightSource:
    """The checkpoint that `flag` names, Megatron or Hugging Face, as a source; `step` is the iteration to take.

    Raises:
        UserError: it does not exist, is no checkpoint, or lacks that iteration.
    """
    path = Path(directory)
    if not path.is_dir():
        raise UserError(f"{flag} {path}: {why_no_directory(path)}; give a Megatron or Hugging Face checkpoint")
    if is_megatron_checkpoint(path):
        _require_iteration(path, step, step_flag or flag)
        return WeightSource("megatron", str(path), step)
    if is_hf_checkpoint(path):
        return WeightSource("hf", str(path))
    _refuse_headless_checkpoint(path, flag)
    raise UserError(
        f"{flag} {path} is no checkpoint: it has neither {POINTER} nor the config.json of a known model; "
        "give a Megatron or Hugging Face checkpoint"
    )


def _source_of_load(args: argparse.Namespace) -> WeightSource | None:
    """`--load` as a source; None when it is the still empty `--save` directory of a first launch."""
    path = Path(args.load)
    if is_megatron_checkpoint(path):
        _require_iteration(path, args.ckpt_step, "--ckpt-step")
        return WeightSource("megatron", str(path), args.ckpt_step, resume=not args.finetune)
    if path.is_dir() and is_hf_checkpoint(path):
        return WeightSource("hf", str(path))
    _refuse_headless_checkpoint(path, "--load")
    contents = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    # What flags such as --dump-details put there may be older than the first checkpoint.
    written = [Path(os.path.relpath(vars(args)[name], path)).parts[:1] for name in WRITTEN if vars(args)[name]]
    own = (".*", *_OWN_LEFTOVERS, *(re.sub(r"{.*?}", "*", name) for [name] in filter(None, written)))
    visible = [name for name in contents if not any(fnmatch.fnmatch(name, one) for one in own)]
    same_as_save = args.save is not None and path.absolute() == Path(args.save).absolute()
    if same_as_save and not visible and not path.is_file():
        if args.exit_on_missing_checkpoint:
            raise UserError(f"--load {path} holds no checkpoint; for a first launch drop --exit-on-missing-checkpoint")
        return None
    nothing = "is a file" if path.is_file() else "is missing or empty"
    state = f"holds {', '.join(visible[:5])} but no checkpoint" if visible else nothing
    raise UserError(
        f"--load {path} {state}; give a Megatron directory (with {POINTER}) or a Hugging Face directory. "
        "A directory that does not exist yet is allowed only when --save names it too"
    )


def _refuse_headless_checkpoint(path: Path, flag: str) -> None:
    if path.is_dir() and any(path.glob("iter_*")):
        raise UserError(f"{flag} {path} holds iter_* directories but no {POINTER}; {newest_whole(path)}")


def _require_iteration(path: Path, step: int | None, flag: str) -> None:
    if step is not None and not iteration_directory(path, step).is_dir():
        raise UserError(f"{flag} {step}: {iteration_directory(path, step)} does not exist")


ACTOR = "actor"
REFERENCE = "ref"
TEACHER = "teacher"
OLD_ACTOR = "old_actor"
# The state with the weights that the engines got last; at the next push the old actor becomes these.
ROLLOUT_ACTOR = "rollout_actor"


def other_model_states(args: argparse.Namespace) -> tuple[str, ...]:
    """Names of the states beside the actor's, in the order in which they are loaded."""
    states = []
    if args.use_kl_loss or args.kl_coef:
        states.append(REFERENCE)
    if args.use_opd and args.opd_type == "megatron":
        states.append(TEACHER)
    if args.keep_old_actor:
        states += [OLD_ACTOR, ROLLOUT_ACTOR] if lags_one_push(args) else [OLD_ACTOR]
    return tuple(states)


def lags_one_push(args: argparse.Namespace) -> bool:
    """Whether the old actor has the weights that the engines had before the last push, not those that it brought."""
    return args.update_weights_interval == 1
