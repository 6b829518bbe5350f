"""Token F1 of short answers, as in extractive question answering (SQuAD, arXiv 1606.05250; HotpotQA, arXiv 1809.09600)."""

import re
import string
from collections import Counter

from slime.utils.processing_utils import without_end_mark

# Only so much of a response's end is read: no answer is longer, and every word of a longer one is held apart.
_TAIL_CHARACTERS = 100_000
_EXACT = ("yes", "no", "noanswer")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_text(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces."""
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", text).split())


def f1_score(prediction: str | None, ground_truth: str) -> tuple[float, float, float]:
    """(F1, precision, recall) over word tokens; `yes`, `no` and `noanswer` count only when both sides agree.

    The token that ends the model's turn is no part of a prediction, of which the last 100,000 characters count.
    """
    if prediction is None:
        return 0.0, 0.0, 0.0
    predicted, truth = normalize_text(without_end_mark(prediction)[-_TAIL_CHARACTERS:]), normalize_text(ground_truth)
    if predicted != truth and (predicted in _EXACT or truth in _EXACT):
        return 0.0, 0.0, 0.0
    predicted_tokens, truth_tokens = predicted.split(), truth.split()
    common = sum((Counter(predicted_tokens) & Counter(truth_tokens)).values())
    if common == 0:
        return 0.0, 0.0, 0.0
    precision, recall = common / len(predicted_tokens), common / len(truth_tokens)
    return 2 * precision * recall / (precision + recall), precision, recall
