"""How a tool ends: with the status of what it found, or with one message in place of a traceback."""

import gc
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from slime.utils import env
from slime.utils.errors import RunError, UserError


def run_tool(main: Callable[..., int | None], **options: Any) -> NoReturn:
    """End the process with what `main` returns; by an error of its own 2 where the input was bad, else 1; by Ctrl-C 130.

    With `SLIME_DEBUG=1` the traceback stays.
    """
    try:
        status = main(**options)
    except (UserError, RunError, OSError) as error:
        if env.debug_enabled():
            raise
        is_of_system = isinstance(error, OSError) and error.filename is not None
        print("error:", f"{error.filename}: {error.strerror}" if is_of_system else error, file=sys.stderr)
        status = getattr(error, "exit_status", 1)
    except KeyboardInterrupt:
        if env.debug_enabled():
            raise
        print("stopped by Ctrl-C", file=sys.stderr)
        status = 130
    # All of it goes: Python would look through it for cycles first, which takes half a second of many modules.
    gc.freeze()
    sys.exit(status)


def model_alone(parser: ArgumentParser) -> ArgumentParser:
    """As `add_custom_arguments` of `parse_args`: a run that builds its model and no optimizer.

    It is one with `--num-rollout 0`, of which whoever types it is warned.
    """
    parser.set_defaults(num_rollout=0)
    return parser


def require_directory(option: str, path: Path) -> None:
    """Raise UserError, naming the option, where `path` is no directory."""
    if not path.is_dir():
        raise UserError(f"{option} {path} is no directory; give that of a checkpoint")


def require_checkpoint(option: str, path: Path) -> None:
    """Raise UserError, naming the option, where `path` is no directory of a Hugging Face checkpoint."""
    require_directory(option, path)
    if not (path / "config.json").is_file():
        raise UserError(f"{option} {path} has no config.json; give the directory of a Hugging Face checkpoint")
