"""The DAPO reward (arXiv 2503.14476), which compares the line `Answer: …` near the end of a response with the label."""

import re
from typing import Any

from slime.rollout.rm_hub.answer_normalization import normalize_answer
from slime.rollout.rm_hub.math_utils import extract_boxed_answer, last_boxed_only_string
from slime.utils.processing_utils import without_end_mark

_TAIL_CHARACTERS = 300
_STRICT_TAIL_CHARACTERS = 100
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


def remove_boxed(text: str) -> str:
    r"""The content of `\boxed{…}`.

    Raises:
        AssertionError: `text` has another form; the message contains "box error".
    """
    if not (text.startswith("\\boxed{") and text.endswith("}")):
        raise AssertionError(f"box error: {text}")
    return text[len("\\boxed{") : -1]


def normalize_final_answer(answer: str) -> str:
    """The normal form of a final answer: what follows its last equals sign, without box, markup, unit, commas of thousands."""
    boxed = last_boxed_only_string(answer)
    if boxed is not None and boxed.startswith("\\boxed{"):
        answer = remove_boxed(boxed)
    answer = re.sub(r"\*\*|`", "", answer.rpartition("=")[2] or answer)
    return normalize_answer(re.sub(r"^(?:the|an?)\s+", "", answer.strip(), flags=re.IGNORECASE))


def compute_score(solution_str: str, ground_truth: Any, strict_box_verify: bool = False) -> dict[str, Any]:
    """`score` ±1, `acc`, and `pred`, the normalised answer ("[INVALID]" without one).

    The token that ends the model's turn is no part of an answer. Integers are compared by value, other labels by their
    normalised text.

    Args:
        strict_box_verify: the answer is the last box of the last 100 characters, and no line `Answer: …` counts.
    """
    solution_str = without_end_mark(solution_str)
    if strict_box_verify:
        box = extract_boxed_answer(solution_str[-_STRICT_TAIL_CHARACTERS:])
        answers = [] if box is None else [box]
    else:
        answers = _ANSWER_LINE.findall(solution_str[-_TAIL_CHARACTERS:])
    predicted = normalize_final_answer(answers[-1]) if answers else "[INVALID]"
    truth = normalize_final_answer(str(ground_truth))
    correct = bool(answers) and (predicted == truth or _same_integer(predicted, truth))
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": predicted}


def _same_integer(left: str, right: str) -> bool:
    values = [re.fullmatch(r"([+-]?\d{1,300})(?:\.0*)?", text) for text in (left, right)]
    return all(values) and int(values[0][1]) == int(values[1][1])
