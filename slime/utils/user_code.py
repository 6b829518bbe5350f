"""Errors of functions that users supply: flag, path and what they were called for, with the user's part of the traceback."""

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from slime.utils.errors import RunError, UserError

_PACKAGE = f"{Path(__file__).resolve().parents[1]}/"


@contextlib.contextmanager
def calling_user_code(flag: str, path: str, subject: str) -> Iterator[None]:
    """Turn an exception that the block raises into the error of `user_function_error`.

    Args:
        subject: what the function was called for, for example `rollout 3`.
    """
    try:
        yield
    except Exception as error:
        raise user_function_error(flag, path, subject, error) from error


def user_function_error(flag: str, path: str, subject: str, error: Exception) -> Exception:
    """What a raising plug-in becomes: an error that names flag, path and subject and holds the original traceback.

    Errors that already carry a message for the user pass unchanged.
    """
    if isinstance(error, UserError | RunError):
        return error
    text = "".join(traceback.format_exception(type(error), error, _users_part(error.__traceback__))).rstrip()
    return UserError(f"{flag} {path} raised {type(error).__name__} for {subject}: {error}\n{text}")


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame that is not ours; the whole one when all are (a function of this package)."""
    part = trace
    while part is not None and part.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        part = part.tb_next
    return part or trace
