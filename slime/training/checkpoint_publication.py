"""Publishing checkpoints: from a directory that was written whole to the one that a resume takes.

A checkpoint is written under a hidden name. Publishing it, when the data state is on disk too, renames it to
`{save}/iter_{rollout_id:07d}/` and only then replaces the pointer file that names the newest one. So the pointer never names
what is not there, whenever the process ends.
"""

from __future__ import annotations

import argparse
import logging
import re
import shutil
from pathlib import Path

from slime.utils.checkpoint_directory import POINTER, iteration_directory
from slime.utils.errors import RunError
from slime.utils.filesystem import replace_directory, write_text_atomically

logger = logging.getLogger(__name__)


def publish_checkpoint(args: argparse.Namespace, iteration: int) -> None:
    """Make the checkpoint of rollout `iteration` the newest one and delete those that `--keep-last` lets go.

    Raises:
        RunError: the disk refuses; the message names the path.
    """
    show_checkpoint(args, iteration)
    forget_checkpoints(args, iteration)


def show_checkpoint(args: argparse.Namespace, iteration: int) -> None:
    """Make the checkpoint of rollout `iteration` the newest one, and keep all older ones.

    Raises:
        RunError: the disk refuses; the message names the path.
    """
    final = iteration_directory(args.save, iteration)
    try:
        replace_directory(unpublished(final), final)
        write_text_atomically(Path(args.save) / POINTER, str(iteration))
    except OSError as error:
        raise RunError(
            f"checkpoint {final} could not be published: {error}. Older checkpoints are untouched"
        ) from error


def forget_checkpoints(args: argparse.Namespace, iteration: int) -> None:
    """Delete the checkpoints up to `iteration` that `--keep-last` lets go.

    Raises:
        RunError: the disk refuses; the message names the path.
    """
    if args.keep_last is None:
        return
    found = [path for path in Path(args.save).glob("iter_*") if re.fullmatch(r"iter_\d{7}", path.name)]
    older = sorted(path for path in found if int(path.name.removeprefix("iter_")) <= iteration)
    for directory in older[: -args.keep_last or None]:
        try:
            _forget(args, directory)
        except OSError as error:
            raise RunError(f"the old checkpoint {directory} could not be deleted: {error}") from error


def unpublished(final: Path) -> Path:
    """The hidden name of the checkpoint that will be `final`."""
    return final.with_name(f".{final.name}.writing")


def _forget(args: argparse.Namespace, directory: Path) -> None:
    """Delete a checkpoint with its data state and, where every save has an export of its own, its export."""
    iteration = int(directory.name.removeprefix("iter_"))
    shutil.rmtree(directory)
    shutil.rmtree(Path(args.save) / "rollout" / f"global_dataset_state_dict_{iteration}", ignore_errors=True)
    if args.save_hf is not None and "{rollout_id" in args.save_hf:
        shutil.rmtree(args.save_hf.format(rollout_id=iteration), ignore_errors=True)
    logger.info("deleted %s (--keep-last)", directory)
