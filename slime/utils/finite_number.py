"""Which values of users' functions, such as rewards and metrics, count as numbers."""

import math
import numbers
from typing import Any


def finite_number(value: Any) -> float | None:
    """`value` as a float if it is one finite real number: int, bool, float, or a scalar of numpy or torch; else None.

    Text is no number, not even "1"; an array is none, not even of one element.
    """
    if type(value) is float:
        return value if math.isfinite(value) else None
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def as_float(value: Any) -> float | None:
    """`value` as a float, also one that is not finite, and that of an array of one element; None if it is none, as a text."""
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several elements
        return None
