"""Grading of mathematical answers: take the boxed answer out of a response, and compare it with the label.

Text of a model is never evaluated: it is compared as normalised text, then as exact rationals by our own restricted
parser, and only what is left goes, as a tree, to sympy in a worker process with a time limit.
"""

import re

from slime.rollout.rm_hub import symbolic_pool
from slime.rollout.rm_hub.answer_normalization import normalize_answer
from slime.rollout.rm_hub.restricted_math import (
    NotMath,
    Tree,
    fraction_literal,
    integer_literal,
    parse,
    rational_value,
)

_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?![\d,])")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_MAX_ELEMENTS = 20
_BARE_BOX = re.compile(r"\\(?:boxed|fbox) ([^\s$]+)")
_OPENED_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"[{}]")
# Every one that is never closed costs a look at the rest of the text.
_MAX_BOXES = 50


def last_boxed_only_string(text: str) -> str | None:
    r"""The last `\boxed{…}` or `\fbox{…}` of `text` with balanced braces (also `\boxed 5`); None without one."""
    end = len(text)
    for _ in range(_MAX_BOXES):
        start = max(text.rfind("\\boxed", 0, end), text.rfind("\\fbox", 0, end))
        if start < 0:
            return None
        box = _box_at(text, start)
        if box is not None:
            return box
        end = start
    return None


def _box_at(text: str, start: int) -> str | None:
    bare = _BARE_BOX.match(text, start)
    if bare and not bare[1].startswith("{"):
        return bare[0]
    if not _OPENED_BOX.match(text, start):
        return None
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : brace.end()]
    return None


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
    """Whether both are equal as mathematics. Blocks up to 5 s per element where sympy is needed.

    Tuples and intervals are compared element by element and need the same brackets, sets `\\{…\\}` in any order. An
    integer label needs an integer, a fraction label that is answered by a fraction needs the same, reduced one.
    """
    given, truth = _comparable(given_answer), _comparable(ground_truth)
    if not given or not truth:
        return False
    if given == truth:
        return True
    given_brackets, given_elements = _split_elements(given)
    truth_brackets, truth_elements = _split_elements(truth)
    if given_brackets != truth_brackets or len(given_elements) != len(truth_elements):
        return False
    if truth_brackets == "{}":
        given_elements, truth_elements = sorted(given_elements), sorted(truth_elements)
    return all(_elements_equal(a, b) for a, b in zip(given_elements, truth_elements, strict=True))


def grade_answer_verl(solution_str: str, ground_truth: str) -> bool:
    """Whether the last box of a response equals the label (or the label's last box, if it has one)."""
    if ground_truth is None or not str(ground_truth).strip():
        return False
    truth = label_answer(str(ground_truth))
    given = extract_answer(solution_str)
    if given is None or truth is None:
        return False
    return grade_answer_mathd(given, truth) or grade_answer_sympy(given, truth)


def label_answer(label: str) -> str | None:
    """The answer that a label stands for: the content of its last box if it has one."""
    return extract_answer(label) if "\\boxed" in label or "\\fbox" in label else label


def _comparable(answer: str) -> str:
    """Normal form, lower case, plain thousands, without words that only join."""
    text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), answer.replace("{,}", ",").replace(",\\!", ","))
    text = re.sub(r"\s+(?:or|and)\s+|\s*\\text\{\s*(?:or|and)\s*\}\s*", ",", text)
    text = normalize_answer(text)
    choice = re.fullmatch(r"\(([A-Z])\)", text)
    return (choice[1] if choice else text).lower()


def _split_elements(text: str) -> tuple[str, list[str]]:
    r"""(brackets, elements): `(1,2]` gives `(]` and two elements; one without a top-level comma has no brackets."""
    brackets, inner = "", text
    if text.startswith("\\{") and text.endswith("\\}"):
        brackets, inner = "{}", text[2:-2]
    elif len(text) > 2 and text[0] in "([" and text[-1] in ")]" and len(_split_at_commas(text[1:-1])) > 1:
        brackets, inner = text[0] + text[-1], text[1:-1]
    elements = _split_at_commas(inner)
    return brackets, elements[: _MAX_ELEMENTS + 1]


def _split_at_commas(text: str) -> list[str]:
    elements, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            elements.append(text[start:position])
            start = position + 1
    return [*elements, text[start:]]


def _elements_equal(given: str, truth: str) -> bool:
    given, truth = normalize_answer(given), normalize_answer(truth)
    if given == truth:
        return True
    try:
        given_tree, truth_tree = parse(given), parse(truth)
    except NotMath:
        return False
    return _trees_equal(given_tree, truth_tree)


def _trees_equal(given: Tree, truth: Tree) -> bool:
    truth_integer = integer_literal(truth)
    if truth_integer is not None:
        return integer_literal(given) == truth_integer
    truth_fraction, given_fraction = fraction_literal(truth), fraction_literal(given)
    if truth_fraction is not None and given_fraction is not None:
        return given_fraction == truth_fraction
    given_value, truth_value = rational_value(given), rational_value(truth)
    if given_value is not None and truth_value is not None:
        return given_value == truth_value
    return symbolic_pool.are_equal(given, truth)
