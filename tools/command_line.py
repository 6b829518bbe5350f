"""The end of a tool, with its exit status or with one message instead of a traceback; and checks of its paths."""

import gc
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from slime.utils import env
from slime.utils.errors import RunError, UserError


def run_tool(main: Callable[..., int | None], **options: Any) -> NoReturn:
    """End the process with the status that `main` returns. After an error it is 2 if the input was bad, else 1; after Ctrl-C
    it is 130.

    With `SLIME_DEBUG=1` the traceback is shown.
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
    # The process ends, so all objects may stay. Otherwise Python would search them for cycles, which takes half a second.
    gc.freeze()
    sys.exit(status)


def model_alone(parser: ArgumentParser) -> ArgumentParser:
    """An `add_custom_arguments` of `parse_args` for a run that builds its model and no optimizer.

    The default is `--num-rollout 0`; it is not typed, because a typed one draws a warning.
    """
    parser.set_defaults(num_rollout=0)
    return parser


def require_directory(option: str, path: Path) -> None:
    """Raise UserError, which names the option, if `path` is not a directory."""
    if not path.is_dir():
        raise UserError(f"{option} {path} is no directory; give that of a checkpoint")


def require_checkpoint(option: str, path: Path) -> None:
    """Raise UserError, which names the option, if `path` is not the directory of a Hugging Face checkpoint."""
    require_directory(option, path)
    if not (path / "config.json").is_file():
        raise UserError(f"{option} {path} has no config.json; give the directory of a Hugging Face checkpoint")
