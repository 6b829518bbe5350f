"""The normal form of a final answer as text: two answers with one normal form are equal.

After the string normalisation of the MATH benchmark (arXiv 2103.03874): spelling variants of LaTeX, units, currency and
percent signs disappear, simple fractions get one spelling.
"""

import re

_WRAPPERS = r"text|mbox|mathrm|textbf|mathbf|textit|mathit|rm|bf|operatorname"
_UNITS = (
    "degrees?|centimeters?|meters?|kilometers?|millimeters?|inch(?:es)?|feet|foot|yards?|miles?|seconds?|minutes?|hours?|"
    "days?|weeks?|months?|years?|liters?|grams?|kilograms?|dollars?|cents?|points?|units?|percent|"
    "cm|mm|km|kg|mph|sq|square|cubic"
)
_TRAILING_UNITS = re.compile(rf"(?<=[\d}})])\s*(?:(?:{_UNITS})\b\.?(?:\s*\^\s*\{{?\d\}}?)?\s*)+$", re.IGNORECASE)
_SPACING = re.compile(r"\\[!,;:> ]|\\(?:quad|qquad|left|right|displaystyle|limits|big[lr]?|Big[lr]?)(?![a-zA-Z])|~")
_WHOLE_WRAPPER = re.compile(rf"^\\(?:{_WRAPPERS})\s*\{{([^{{}}]*)\}}$")
_TRAILING_WRAPPER = re.compile(rf"(?<=\S)\s*\\(?:{_WRAPPERS})\s*\{{[^{{}}]*\}}(?:\s*\^\s*\{{?\d\}}?)?$")
_INNER_WRAPPER = re.compile(rf"\\(?:{_WRAPPERS})\s*\{{([^{{}}]*)\}}")
_MAX_CHARACTERS = 2000


def normalize_answer(answer: str) -> str:
    """The normal form of `answer`, without spaces. Idempotent on plain numbers and words."""
    text = answer.strip()[:_MAX_CHARACTERS].replace("\n", " ").rstrip(".").strip()
    text = text.replace("−", "-").replace("\\\\", "\\")
    text = _SPACING.sub(" ", text)
    text = re.sub(r"\\(?:t|d|c)frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|°", "", text)
    text = re.sub(r"\\?\$|\\?%|\\\(|\\\)|\\\[|\\\]", "", text)
    text = text.replace("{,}", ",").strip()
    text = _strip_text_and_units(text)
    text = _strip_variable(text)
    text = re.sub(r"(?<![\d.])\.(?=\d)", "0.", text)
    text = re.sub(r"\s+", " ", text)
    text = _brace_arguments(_join_mixed_number(text))
    return _simple_fraction(text.replace(" ", ""))


def _strip_text_and_units(text: str) -> str:
    whole = _WHOLE_WRAPPER.match(text)
    if whole:
        return whole[1].strip()
    stripped = _TRAILING_WRAPPER.sub("", text)
    stripped = _TRAILING_UNITS.sub("", stripped).strip()
    return _INNER_WRAPPER.sub(r"\1", stripped or text).strip()


def _strip_variable(text: str) -> str:
    """`x=5` → `5`: a name of at most two letters before the only equals sign."""
    left, separator, right = text.partition("=")
    name = left.strip().replace("\\", "")
    if separator and "=" not in right and 0 < len(name) <= 2 and right.strip():
        return right.strip()
    return text


def _join_mixed_number(text: str) -> str:
    """`1 1/2` is one and a half; without the space it would read eleven halves."""
    return re.sub(r"(?<![\d.])(\d+) +(\d+)\s*/\s*(\d+)(?!\d)", r"\1\\frac{\2}{\3}", text)


def _brace_arguments(text: str) -> str:
    r"""`\frac12` → `\frac{1}{2}`, `\frac1{72}` → `\frac{1}{72}`, `\sqrt3` → `\sqrt{3}`."""
    text = re.sub(r"\\frac\s*(\w)\s*(\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\w)\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"(\\frac\s*\{[^{}]*\})\s*(\w)", r"\1{\2}", text)
    return re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)


def _simple_fraction(text: str) -> str:
    if text == "0.5":
        return r"\frac{1}{2}"
    fraction = re.fullmatch(r"(-?)(\d+)/(\d+)", text)
    return rf"{fraction[1]}\frac{{{fraction[2]}}}{{{fraction[3]}}}" if fraction else text
