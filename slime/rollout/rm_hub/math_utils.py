"""Grades mathematical answers: takes the boxed answer out of a response, and compares it with the label.

Most answers are decided by their text or as plain numbers. The others are compared by math-verify in a worker process, under
our limits. The library is more lenient than a reward may be, so our own rules come first: units must agree, fractions must be
reduced, brackets must match, and sizes are bounded.
"""

import itertools
import math
import re
from collections.abc import Collection
from fractions import Fraction

from slime.rollout.rm_hub import worker_pool
from slime.rollout.rm_hub.answer_normalization import HALVES_OF_DAY, exact_latex, normalize_answer, split_unit

_BARE_BOX = re.compile(r"\\(?:boxed|fbox) ([^\s$]+)")
_OPENED_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"[{}]")
# How many boxes are tried.
_MAX_BOXES = 50
# The most that the library is given to read: characters, and depth of brackets within brackets.
_MAX_CHARACTERS = 300
_MAX_DEPTH = 12
# Exponents, factorials and numbers that take too long to compute, or to read.
_TOO_LARGE = re.compile(r"\^\s*\{?\s*[-+]?\d{5}|\d{4}\s*!|[!)}]\s*!|\d{61}")
_FRACTION = re.compile(r"\\frac\s*\{\s*-?(\d+)\s*\}\s*\{\s*-?(\d+)\s*\}|(?<![\w.})^!])(\d+)\s*/\s*(\d+)(?![\d.!^])")
_RATIO = re.compile(r"(?<![\w.})^!])(\d+)\s*:\s*(\d+)(?![\d.!^])")
_CHOICE = re.compile(r"\(?([A-Z])\)?")
_WORD = re.compile(r"[^\W\d_]{4}|\b(?:no|yes|and)\b|\d_", re.IGNORECASE)
# The library would make products of these words.
_CAPITALS = re.compile(r"[A-Z](?:\s*[A-Z])*")
_LETTERS = re.compile(r"[A-Za-z](?:\s*[A-Za-z])*")
_ANGLE = re.compile(r"\\angle\s*([A-Z])\s*([A-Z])\s*([A-Z])")
# The left side of an equation that only names a value: x, x_1, f(x), f(-3), P(A), (x, y); but x(x+1) and \ln(3) have values.
_NAME = re.compile(
    r"\s*(?:(?:\\angle )?\\?[a-zA-Z]+(?:_\{?\w\}?)?'*\s*(?:\([a-zA-Z, ]*\))?"
    r"|[a-zA-Z](?:_\{?\w\}?)?'*\s*\([-+\d./, ]+\)|\([a-zA-Z, ]+\))\s*"
)


def last_boxed_only_string(text: str) -> str | None:
    r"""The last `\boxed{…}` or `\fbox{…}` of `text` with balanced braces (also `\boxed 5`); None without one."""
    starts, end = [], len(text)
    while len(starts) < _MAX_BOXES and (end := max(text.rfind("\\boxed", 0, end), text.rfind("\\fbox", 0, end))) >= 0:
        starts.append(end)
    openings = {start: found.end() - 1 for start in starts if (found := _OPENED_BOX.match(text, start))}
    ends = _ends_of(text, openings.values())
    for start in starts:
        bare = _BARE_BOX.match(text, start)
        if bare and not bare[1].startswith("{"):
            return bare[0]
        if openings.get(start) in ends:
            return text[start : ends[openings[start]]]
    return None


def _ends_of(text: str, openings: Collection[int]) -> dict[int, int]:
    """Position of an opening brace → the position behind the brace that closes it, of those that are closed.

    All in one pass: boxes that are never closed may stand before megabytes of braces.
    """
    wanted, ends = set(openings), {}
    open_ones: list[int] = []
    for brace in _BRACE.finditer(text, min(wanted)) if wanted else ():
        if brace[0] == "{":
            open_ones.append(brace.start())
        elif open_ones and (opening := open_ones.pop()) in wanted:
            ends[opening] = brace.end()
    return ends


def remove_boxed(text: str | None) -> str | None:
    r"""The content of `\boxed{…}`; None when `text` is nothing of that form."""
    if text is None:
        return None
    for command in ("\\boxed", "\\fbox"):
        if text.startswith(command + " ") and "{" not in text[: len(command) + 2]:
            return text[len(command) + 1 :]
        opening = re.match(re.escape(command) + r"\s*\{", text)
        if opening and text.endswith("}"):
            return text[opening.end() : -1]
    return None


def extract_boxed_answer(text: str) -> str | None:
    """Content of the last box of `text`; None without a well-formed one."""
    return remove_boxed(last_boxed_only_string(text))


def extract_answer(passage: str) -> str | None:
    """The final answer of a response: content of its last box, or None."""
    return extract_boxed_answer(passage)


def grade_answer_mathd(given_answer: str, ground_truth: str) -> bool:
    """Whether both have the same normal form as text."""
    return normalize_answer(given_answer) == normalize_answer(ground_truth)


def grade_answer_sympy(given_answer: str, ground_truth: str) -> bool:
    r"""Whether both are equal as mathematics. Blocks up to 5 s where the library is needed.

    Intervals and tuples need the same brackets; lists and sets are equal in any order. A fraction of whole numbers must
    be reduced, and an exponent holds no power of a number. Where both name a unit, it must be the same, and a time needs
    the half of the day that the label names. Where one of them is a percentage or an angle in degrees, its value counts
    too: `50\%` is 50 and 0.5. Capital letters alone are a word: `HTH` is not `HHT`, though `ab` is `ba`.
    """
    (given, given_unit), (truth, truth_unit) = split_unit(given_answer), split_unit(ground_truth)
    if not given or not truth or _units_differ(given_unit, truth_unit):
        return False
    if ":" in truth and HALVES_OF_DAY & {given_unit, truth_unit}:
        return given == truth and truth_unit in (given_unit, "")
    if re.fullmatch(r"\d{1,3}(?:, \d{3})+", truth) and re.fullmatch(r"\d{1,3}(?:,\d{3})+", given_answer.strip()):
        # Where the label is a list, this is one whose commas look like those between thousands.
        given = given_answer.replace(",", ", ")
    if _is_text(given) or _is_text(truth):
        return _as_text(given) == _as_text(truth)
    is_wrapped = any(re.match(r"\s*\\(?:text|mbox)", answer) for answer in (given_answer, ground_truth))
    spelled = [_spelled(text, is_wrapped) for text in (given, truth)]
    if None not in spelled:
        return spelled[0] == spelled[1]
    if not _is_admissible(given, truth):
        return False
    if given_unit == truth_unit:
        return _are_equal(given, truth)
    pairs = itertools.product(_readings(given, given_unit), _readings(truth, truth_unit))
    return any(_are_equal(*pair) for pair in pairs)


def grade_answer_verl(solution_str: str, ground_truth: str) -> bool:
    """Whether the last box of a response equals the label (or the label's last box, if it has one)."""
    if ground_truth is None or not str(ground_truth).strip():
        return False
    truth = label_answer(str(ground_truth))
    given = extract_answer(solution_str)
    if not given or not truth or _units_differ(split_unit(given)[1], split_unit(truth)[1]):
        return False
    return grade_answer_mathd(given, truth) or grade_answer_sympy(given, truth)


def label_answer(label: str) -> str | None:
    """The answer that a label stands for: the content of its last box if it has one."""
    return extract_answer(label) if "\\boxed" in label or "\\fbox" in label else label


def _units_differ(given_unit: str, truth_unit: str) -> bool:
    return bool(given_unit and truth_unit and given_unit != truth_unit)


def _readings(text: str, unit: str) -> list[str]:
    if unit == "%":
        return [text, rf"\frac{{{text}}}{{100}}"]
    if unit == "°":
        return [text, rf"\frac{{{text}\pi}}{{180}}"]
    return [text]


def _is_text(answer: str) -> bool:
    """Words, letters of choices and numerals with a base are no formulas: the library would multiply their letters."""
    without_commands = re.sub(r"\\(?:begin|end)\{\w+\}|\\[a-zA-Z]+", " ", answer)
    return bool(_CHOICE.fullmatch(answer) or _WORD.search(without_commands))


def _as_text(answer: str) -> str:
    text = normalize_answer(answer)
    choice = _CHOICE.fullmatch(text.upper())
    return (choice[1] if choice else text).lower()


def _spelled(answer: str, is_wrapped: bool) -> frozenset[str] | None:
    r"""What letters spell, whose order counts: `HTH`, the elements of `HH, HT`, an angle; None for a formula.

    Letters in lower case are a product, as in `xyz`. Where one of both answers is wrapped (`\text{cat}`), they are a word too,
    and case does not count.
    """
    angle = _ANGLE.fullmatch(answer)
    if angle:
        return frozenset({"∠" + min("".join(angle.groups()), "".join(reversed(angle.groups())))})
    elements = [element.strip() for element in re.sub(r"^\\\{|\\\}$", "", answer).split(",")]
    if not all((_LETTERS if is_wrapped else _CAPITALS).fullmatch(element) for element in elements):
        return None
    words = [re.sub(r"\s", "", element) for element in elements]
    return frozenset(word.lower() if is_wrapped else word for word in words)


def _is_admissible(given: str, truth: str) -> bool:
    """Whether the library may be asked: what it would wrongly accept, or never finish, is refused here."""
    if max(len(given), len(truth)) > _MAX_CHARACTERS or max(map(_depth, (given, truth))) > _MAX_DEPTH:
        return False
    if any(_TOO_LARGE.search(text) for text in (given, truth)) or re.search(r"(?<![_\d])\d+ \d", given):
        return False
    if _has_unreduced(given) or _has_tower(given):
        return False
    if ("=" in given) != ("=" in truth) and not (_names_only(given) and _names_only(truth)):
        return False
    kinds = {_bracket_kind(_value(given)), _bracket_kind(_value(truth))} - {None}
    return len(kinds) < 2


def _are_equal(given: str, truth: str) -> bool:
    values = [_number(text) for text in (given, truth)]
    if None not in values:
        return values[0] == values[1]
    if "=" not in given or "=" not in truth:
        given, truth = _value(given), _value(truth)
    return worker_pool.are_equal(*(exact_latex(_without_plus_minus(text)) for text in (given, truth)))


def _without_plus_minus(text: str) -> str:
    r"""`1\pm\sqrt{2}` → `1+\sqrt{2},1-\sqrt{2}`, element by element."""
    if text.startswith("\\{") and text.endswith("\\}"):
        return rf"\{{{_without_plus_minus(text[2:-2])}\}}"
    elements = []
    for element in _split_at_commas(text):
        signs = (("+", "-"), ("-", "+")) if re.search(r"\\[pm][pm](?![a-z])", element) else ((None, None),)
        for plus, minus in signs:
            signed = element if plus is None else element.replace("\\pm", plus).replace("\\mp", minus)
            elements.append(re.sub(r"(^|[({=])\s*\+", r"\1", signed))
    return ",".join(elements)


def _number(text: str) -> Fraction | None:
    """The exact value of a plain number or fraction of whole numbers, else None."""
    fraction = re.fullmatch(r"([-+]?)\s*\\frac\{([-+]?\d+)\}\{([-+]?\d+)\}", normalize_answer(text))
    if fraction and int(fraction[3]):
        return Fraction(int(fraction[2]), int(fraction[3])) * (-1 if fraction[1] == "-" else 1)
    return Fraction(text.replace(" ", "")) if re.fullmatch(r"[-+]? ?(?:\d+\.?\d*|\.\d+)", text) else None


def _has_unreduced(text: str) -> bool:
    """Whether a fraction or a ratio of whole numbers in `text` could be written with smaller ones."""
    fractions = [[int(group) for group in match.groups() if group] for match in _FRACTION.finditer(text)]
    ratios = [[int(group) for group in match.groups()] for match in _RATIO.finditer(text)]
    return any(math.gcd(*pair) > 1 for pair in fractions + ratios) or any(bottom == 1 for _, bottom in fractions)


def _has_tower(text: str) -> bool:
    """Whether an exponent holds a power of a number: `2^{3^2}`, but not `e^{x^2}`."""
    for caret in re.finditer(r"\^\s*\{?", text):
        end = _closing(text, caret.end() - 1) if caret[0].endswith("{") else caret.end() + 1
        exponent = text[caret.end() : end]
        if re.search(r"[\d)}]\s*\^", exponent) or re.match(r"\}?\s*\^", text[end:]):
            return True
    return False


def _names_only(text: str) -> bool:
    """Whether each equation of `text` only names its value: `x=5`, `f(x)=2x`, `(x,y)=(3,4)`, not `2x=5` or `5=6`."""
    return all(_NAME.fullmatch(part.partition("=")[0]) for part in _split_at_commas(text) if "=" in part)


def _value(text: str) -> str:
    """What a single equation or membership gives a name: `V=2\\pi r=6\\pi` → `6\\pi`, `x\\in[1,2]` → `[1,2]`."""
    membership = re.fullmatch(r"(.*?)\\in(?![a-z])\s*(.+)", text)
    if membership and _NAME.fullmatch(membership[1]):
        return membership[2]
    if "=" in text and len(_split_at_commas(text)) == 1 and _NAME.fullmatch(text.partition("=")[0]):
        return text.rpartition("=")[2].strip()
    return text


def _bracket_kind(text: str) -> str | None:
    r"""Outer brackets of a tuple, an interval or a set; a bare list is a set; None for what has no elements."""
    if text.startswith("\\{") and text.endswith("\\}"):
        return "{}"
    encloses = text[:1] in "([" and text[-1:] in ")]" and _closing(text, 0) == len(text) - 1
    if text and encloses and len(_split_at_commas(text[1:-1])) > 1:
        return text[0] + text[-1]
    return "{}" if len(_split_at_commas(text)) > 1 or "\\pm" in text else None


def _closing(text: str, start: int) -> int:
    """Position of the bracket that closes the one at `start`, else the end of `text`."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] in "([{") - (text[position] in ")]}")
        if depth == 0:
            return position
    return len(text)


def _split_at_commas(text: str) -> list[str]:
    elements, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            elements.append(text[start:position])
            start = position + 1
    return [*elements, text[start:]]


def _depth(text: str) -> int:
    steps = ((character in "([{") - (character in ")]}") for character in text)
    return max(itertools.accumulate(steps), default=0)
