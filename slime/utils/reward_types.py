"""The names of the built-in rewards, in one list for the check of `--rm-type` and for the graders themselves."""

import math
import numbers
from decimal import Decimal
from importlib.util import find_spec
from typing import Any

from slime.utils.errors import UserError

BOXED = "boxed_"
# A service at --rm-url grades it.
REMOTE = "remote_rm"
REWARD_TYPES = (
    "dapo",
    "deepscaler",
    "f1",
    "gpqa",
    "ifbench",
    "math",
    "random",
    REMOTE,
)
# These compare with the label of a row. The others may find what they need in its metadata.
_WITH_LABEL = ("dapo", "deepscaler", "f1", "math")
# Modules with checks of instructions; each row suffices by itself. They are IFBench's, and IFEval's with its imports.
_CHECKS = (("instructions_registry",), ("lm_eval", "langdetect", "nltk", "immutabledict"))


def is_reward_type(name: str) -> bool:
    """Whether `name` is a built-in reward, with or without the prefix that grades the last box alone."""
    return bare_reward_type(name) in REWARD_TYPES


def bare_reward_type(name: str) -> str:
    """`name` without the prefix that grades the last box alone."""
    return name.strip().removeprefix(BOXED)


def needs_label(name: str) -> bool:
    """Whether `name` is a built-in reward that cannot grade a row without a label."""
    return bare_reward_type(name) in _WITH_LABEL


def lacks_label(label: Any) -> bool:
    """Whether a row has no label: None, an empty text, or the NaN that tables put in the place of a missing value."""
    return label is None or (isinstance(label, str | numbers.Number) and (label == "" or label != label))


def compares_as_text(label: Any) -> bool:
    """Whether a reward that compares a response with the label's text can be asked about `label`: a text or a number. The text
    of a list, an object or bytes is Python's notation, which no response has, so every reward would be 0."""
    return isinstance(label, str | numbers.Number)


def text_of_label(label: Any) -> str:
    """The text that a response is compared with. Numbers are written out: rewards that compare texts would not take 1e-05 for
    0.00001, nor 3.0, as a column of numbers has it in which some are missing, for 3."""
    if isinstance(label, numbers.Real | Decimal) and not isinstance(label, numbers.Rational) and math.isfinite(label):
        number = Decimal(str(label))
        whole = number.to_integral_value()
        return format(whole if whole == number else number, "f")
    return str(label)


def checked_label(label: Any) -> str:
    """The text of a label that a response is compared with.

    Raises:
        UserError: there is no label, or it is not one text or number, so that every answer would be wrong.
    """
    if lacks_label(label) or not compares_as_text(label):
        raise UserError(
            f"the label of a row is {label!r}, and answers are compared with one text or number; name a field that has one "
            "with --label-key, or grade with a function of your own"
        )
    return text_of_label(label)


def known_reward_types() -> str:
    """The names as messages list them."""
    return f"{', '.join(REWARD_TYPES)} (each also with the prefix {BOXED})"


def lacks_checks(name: str) -> bool:
    """Whether `name` grades with checks of other packages, and none of these packages are installed."""
    return bare_reward_type(name) == "ifbench" and not any(all(map(find_spec, modules)) for modules in _CHECKS)
