"""argparse value types shared by the flag groups."""

import argparse
import json
import re
from fractions import Fraction
from typing import Any

from slime.models.layer_pattern import read_pattern
from slime.observability.run_record import REDACTED, mentions_secret, redacted_text
from slime.utils.misc import without_repetition

_SUFFIXES = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip


def json_object(text: str) -> dict[str, Any]:
    """A JSON object such as `{"enable_thinking": false}`."""
    value = json_value(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{_shown(text)} is not a JSON object such as {{"key": "value"}}')
    return value


def environment_variables(text: str) -> dict[str, str | int | float | bool]:
    """A JSON object whose values can be those of variables: `{"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": 1}`."""
    variables = json_object(text)
    for name, value in variables.items():
        if not name or "=" in name:
            raise argparse.ArgumentTypeError(f"{name!r} cannot be the name of a variable; take one such as NCCL_DEBUG")
        if not isinstance(value, str | int | float):
            raise argparse.ArgumentTypeError(
                f"{name} is {'null' if value is None else 'a list or an object'}; give text, a number, true or false"
            )
    return variables


def json_value(text: str) -> Any:
    """Any JSON: `[{"name": "a"}]`, `{"key": 1}`, `3`. A name that stands twice in an object is refused."""
    try:
        return json.loads(text, object_pairs_hook=without_repetition)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not JSON: {error}") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def human_int(text: str) -> int:
    """An integer, with a decimal (k, M, G, T) or binary (Ki, Mi, Gi, Ti) suffix if you like: `32768`, `32Ki`, `25.6k`."""
    match = re.fullmatch(r"([-+]?\d+(?:\.\d+)?)([A-Za-z]*)", text.strip())
    number, suffix = match.groups() if match else ("0", "?")
    value = Fraction(number) * _SUFFIXES.get(suffix, 1)
    if suffix not in _SUFFIXES or value.denominator != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number such as 32768, 32Ki or 25.6k")
    return int(value)


def layer_pattern(text: str) -> int | list[int]:
    """As `read_pattern` reads it."""
    try:
        return read_pattern(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no layer pattern ({error}); write a number such as 4 or a list such as [0]*3+[1]*58"
        ) from None


def integers(text: str) -> list[int]:
    """Numbers with commas between them: `128,0`; brackets around them do no harm."""
    try:
        return [int(word) for word in text.strip().strip("()[]").split(",") if word.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of integers such as 128,0") from None


def _shown(text: str) -> str:
    return REDACTED if mentions_secret(text) else repr(redacted_text(text))
