"""Multiple choice, as in GPQA (arXiv 2311.12022): which letter a response settles on, against the right one.

A statement ("the answer is C", "option C", "C is correct", a box) counts more than a letter that stands alone; among several of
a kind the last one with a valid letter decides. "The answer is" states one letter, and those of the explanation behind it stand
alone. Letters are whole words in upper case; marked ones, `(c)`, `**c**`, `\\boxed{c}`, may be lower case. A letter that is
negated or called wrong does not count. A response without any letter may name a choice by its text.
"""

import re
import string
from collections.abc import Iterator, Sequence
from typing import Any

from slime.utils.errors import UserError
from slime.utils.reward_types import compares_as_text

# Only so much of a response's end is read, since the answer stands there and the patterns below look at every letter.
_TAIL_CHARACTERS = 20_000
_DEFAULT_LETTERS = string.ascii_uppercase[:10]

_MARKED = (
    r"\\boxed\s{0,9}\{\s{0,9}(?:\\(?:text|mathrm|mathbf|textbf)\s{0,9}\{)?\s{0,9}"
    r"\(?(?:(?P<boxed>[A-Za-z])\)?[\s.}]{0,9}\}|(?P<boxed_with_text>[A-Za-z])[).:]\s)"
    r"|\*\*\s{0,9}\(?(?P<bold>[A-Za-z])\)?\s{0,9}[.:)]?\s{0,9}\*\*"
    r"|(?<!\w)[(\[{](?P<bracketed>[A-Za-z])[)\]}]"
)
_LETTER = re.compile(_MARKED + r"|(?<![\w'’\\])(?P<plain>[A-Z])(?!['’]?\w)")
# What leads to a letter, at the end of the text before it. Fillers may stand between: "is definitely", "must therefore be".
# Behind a colon, or a heading, the letter may stand on a line of its own. "B is the answer because" leads to no other letter.
_LEAD = re.compile(
    r"\b(?:answer|option|choice)s?\b(?!,?\s+(?:because|since|whereas|while)\b)(?P<between>[^.!?\n]{0,60}(?::[\s*_]{0,12})?)$",
    re.IGNORECASE,
)
_HEADING = re.compile(r"\n\s{0,3}(?:#{1,6}|\*\*)[^\n]{0,40}\banswer[*_ ]{0,4}\n[\s*_]{0,12}$", re.IGNORECASE)
_FILLERS = 4
# What leads to a letter that only says which answer is meant: "the answer to part A is B", "the choice between C and D: D".
_ASIDE = re.compile(
    r"\b(?:to|for|of|in|on|at|by|with|from|about|between|when|if|given)\s+(?:(?!(?:is|are|be|was)\b)\w+\s+){0,2}\W{0,3}$",
    re.IGNORECASE,
)
# What leads on from one letter to the next: "A or B", "A, no, B", "A — wait, it's B".
_LEADS_ON = re.compile(
    r"[\s)}*\]]{0,9}(?:[,;(–—-]\s{0,3})?(?:or\s{1,3}|(?<=[,;(–—\s-])(?:or\s{1,3})?"
    r"(?:(?:no|wait|actually|rather|sorry|correction|i\s{1,3}mean|make\s{1,3}that)\b[\s,:–—-]{1,5}){1,3}"
    r"(?:it(?:['’]s|\s{1,3}is)\s{1,3})?)[\s(*\[]{0,4}",
    re.IGNORECASE,
)
_VERDICT = re.compile(
    r"\s+(?:is|seems|looks|must be|would be|should be)\s+(?:[a-z]+\s+){0,2}?(?:the\s+)?(?:correct|right|true|best)\b"
)
# The rejection of a letter that is the subject of its sentence, or the heading of a verdict: "C: wrong."; words behind "and" or
# a comma are about something else, and "C: false vacuum" is a choice with its text.
_REJECTION = re.compile(
    r"\s+(?:(?:\w+ly|also|therefore|thus)\s+)?(?:(?:\w+n['’]t|cannot)\b"
    r"|(?:is|are|was|were|seems|looks|appears|can|could|would|should|must|may|does|did|will)\s+"
    r"(?:(?!(?:and|but|because|since|so|correct|right|true|best)\b)\w+\s+){0,2}?"
    r"(?:not|never|wrong|incorrect|false|impossible|invalid|excluded|eliminated|ruled|out)\b)"
    r"|\s{0,2}(?:[:(–—-]|->)\s{0,3}(?:wrong|incorrect|false|impossible|invalid|excluded|eliminated|ruled out)"
    r"\s{0,2}(?:[.,;)]|$)",
    re.IGNORECASE,
)
_NEGATION = re.compile(r"not|no|never|neither|nor|cannot|without|\w+n['’]t", re.IGNORECASE)
# A turn of the sentence: the words before it say what the answer is not, or something else altogether.
_TURN = re.compile(
    r"[;:]|\b(?:but|so|rather(?!\s+than)|instead(?!\s+of)|it['’]s|it\s+(?:is|must\s+be))\b", re.IGNORECASE
)
_NO_NEGATION = re.compile(
    r"\b(?:no|without(?:\s+an?y?)?)\s+(?:doubt|question)\b|\bnot?\s+(?:only|surprising|surprise)\b", re.IGNORECASE
)
_INSTEAD_OF = re.compile(r"\b(?:rather\s+than|instead\s+of)\b", re.IGNORECASE)
_WORD = re.compile(r"[\w'’]+")
# What follows an A or I that is a letter and not an English word.
_AFTER_A_LETTER = re.compile(
    r"\s+(?:is|was|because|since|as|for|and|or|but|so|which|with|from|by|due|if|would|must|seems|looks|then|here|also|not)\b"
)


def compute_gpqa_reward(response: str, label: Any, metadata: dict[str, Any] | None = None) -> float:
    """1.0 when the response settles on the right choice, else 0.0.

    `metadata` may hold `choices` (texts, in the order of the letters), `valid_letters` (else as many as there are choices,
    else A to J) and `correct_letter`. Without the last, the label is a letter, the index of a choice counted from 0, or its
    text.

    Raises:
        UserError: neither label nor `correct_letter`, or one that is none of the valid letters and choices.
    """
    metadata = metadata or {}
    choices = [str(choice) for choice in metadata.get("choices") or ()]
    valid = _valid_letters(metadata.get("valid_letters"), choices)
    right = _correct_letter(metadata.get("correct_letter"), label, valid, choices)
    text = (response or "").rpartition("</think>")[2][-_TAIL_CHARACTERS:]
    given = _settled_letter(text, valid)
    if given is not None:
        return float(given == right)
    named = [position for position, choice in enumerate(choices) if _names(text, choice)]
    if choices:
        return float(len(named) == 1 and valid[named[0]] == right)
    return float(right is None and _names(text, str(label)))


def _valid_letters(given: Any, choices: Sequence[str]) -> list[str]:
    letters = [str(letter).strip().upper() for letter in given or ()] or list(
        string.ascii_uppercase[: len(choices)] if choices else _DEFAULT_LETTERS
    )
    if len(letters) < len(choices) or any(len(letter) != 1 for letter in letters):
        raise UserError(
            f"gpqa: valid_letters {given!r} of the metadata: give one letter for each of {len(choices)} choices"
        )
    return letters


def _correct_letter(named: Any, label: Any, valid: Sequence[str], choices: Sequence[str]) -> str | None:
    """The right letter; None where the label is a text and there are no choices to look it up in."""
    right = label if named is None else named
    if isinstance(right, float) and right.is_integer():
        # A column of numbers in which some are missing has them as floating-point numbers.
        right = int(right)
    text = "" if right is None else str(right).strip()
    letter = text.strip("()").upper()
    if not text:
        raise UserError("gpqa: a sample needs a label (--label-key), or correct_letter in its metadata")
    if not compares_as_text(right):
        raise UserError(
            f"gpqa: the right answer is {type(right).__name__}; give a letter, the index of a choice, or its text"
        )
    if letter in valid:
        return letter
    if named is None:
        is_index = re.fullmatch(r"\d{1,3}", text) is not None and int(text) < len(choices or valid)
        matching = [place for place, choice in enumerate(choices) if choice.strip().casefold() == text.casefold()]
        # A number of the data is an index; one in quotes may be a choice's text.
        if is_index and (isinstance(right, int) or not matching):
            return valid[int(text)]
        if len(matching) == 1:
            return valid[matching[0]]
        if not choices:
            return None
    raise UserError(
        f"gpqa: the right answer {text!r} is none of the letters {''.join(valid)} and names none of the choices {choices}"
    )


def _settled_letter(text: str, valid: Sequence[str]) -> str | None:
    stated = standing = None
    for letter, is_statement in _letters(text, valid):
        stated, standing = (letter if is_statement else stated), letter
    return stated or standing


def _letters(text: str, valid: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """(valid letter, whether it is stated to be the answer), in their order."""
    # Where the last letter ends that something leads to: that lead ends there too.
    led_until = 0
    for match in _LETTER.finditer(text):
        letter = match[match.lastgroup]
        if letter.upper() not in valid:
            continue
        after = text[match.end() : match.end() + 60]
        if (
            match.lastgroup == "plain"
            and letter in "AI"
            and re.match(r"\s+[a-z]", after)
            and not _AFTER_A_LETTER.match(after)
        ):
            continue
        lead = _LEAD.search(text, max(led_until, match.start() - 80), match.start())
        between = _WORD.findall(lead["between"]) if lead else []
        before = lead["between"] if between else _clause_before(text, match.start())
        if _ends_negated(before) or _REJECTION.match(after):
            continue
        is_led = (
            (lead is not None and len(between) <= _FILLERS)
            # A line break stands for the beginning of the text, which may be a heading as well.
            or _HEADING.search("\n" + text[max(0, match.start() - 80) : match.start()]) is not None
            or (led_until > 0 and _LEADS_ON.fullmatch(text, led_until, match.start()) is not None)
        )
        if is_led and not (lead and _ASIDE.search(lead["between"])):
            led_until = match.end()
        is_boxed = match.lastgroup in ("boxed", "boxed_with_text")
        yield letter.upper(), is_boxed or is_led or _VERDICT.match(after) is not None


def _clause_before(text: str, position: int) -> str:
    return re.split(r"[.!?;,:\n]", text[max(0, position - 60) : position])[-1]


def _ends_negated(text: str) -> bool:
    """Whether one of the last three words is a negation, without those before a turn, and other letters: "not A, B or C"."""
    words = _WORD.findall(_INSTEAD_OF.sub(" not ", _NO_NEGATION.sub(" ", _TURN.split(text)[-1])))
    return any(_NEGATION.fullmatch(word) for word in [word for word in words if not re.fullmatch("[A-Z]", word)][-3:])


def _names(text: str, choice: str) -> bool:
    """Whether `choice` occurs as whole words, and nowhere behind a negation."""
    if not choice.strip():
        return False
    places = list(re.finditer(rf"(?<![\w.]){re.escape(choice.strip())}(?!\w|\.\d)", text, re.IGNORECASE))
    before = [_WORD.findall(text[max(0, place.start() - 60) : place.start()])[-3:] for place in places]
    return bool(places) and not any(_NEGATION.fullmatch(word) for words in before for word in words)
