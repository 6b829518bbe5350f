"""Multiple choice: which letter a response settles on, and what counts as the right one."""

import pytest

from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.utils.errors import UserError

CITIES = {"choices": ["London", "Paris", "Berlin"]}


@pytest.mark.parametrize(
    ("response", "label", "metadata", "verdict"),
    [
        ("The answer is definitely C", "C", {}, 1),
        ("The answer is clearly (B)", "B", {}, 1),
        ("the answer is a little tricky: B", "B", {}, 1),
        ("it is not paris", "Paris", {}, 0),
        ("Definitely paris.", "Paris", CITIES, 1),
        ("Answer: C? A fits better; no, B.", "B", {"valid_letters": ["A", "B"]}, 1),
    ],
)
def test_w1_vectors_of_multiple_choice(response, label, metadata, verdict):
    """A letter is never taken out of a word (definitely, clearly, tricky)."""
    assert compute_gpqa_reward(response, label, metadata) == verdict


@pytest.mark.parametrize("letter", "ABCD")
@pytest.mark.parametrize(
    ("response", "settled"),
    [
        ("Perhaps B. I think A is a fair option, but the final answer: D", "D"),
        ("Option A is wrong. Option B is incorrect. So D", "D"),
        ("D is the correct answer. B and C are decoys", "D"),
        ("The correct choice must therefore be A because of that", "A"),
        ("The answer is not D. It is (a)", "A"),
        (r"Option B says so, and yet \boxed{\text{D}}", "D"),
        ("<think>The answer is A.</think> **d**", "D"),
        ("**Answer: A**", "A"),
        ("Option D: gives 7, which does not match.\n\n**Answer:**\n\n**B**", "B"),
        ("Option D: gives 7.\n\nThe correct answer is:\n\nB", "B"),
        ("Option D: gives 7.\n\n### Final Answer\n\n**B**", "B"),
        ("### Answer\nB\nOption is the wrong word for D", "B"),
        ("Option D: gives 7.\nThis asks for an answer\n\nB is a letter", "D"),
        (r"Option D: gives 7. \boxed{B) 10^{-4}}", "B"),
        (r"Option D: gives 7. \boxed{(b) 10^{-4}}", "B"),
        ("D", "D"),
        ("It can't be D.", None),
        ("A study shows that I was right", None),
        ("the answer is d", None),
        ("The answer is B, not C.", "B"),
        ("The answer is (B), not (C).", "B"),
        (r"The answer is \boxed{B}, not A.", "B"),
        ("The answer is B. Not C.", "B"),
        ("Answer: D (not C)", "D"),
        ("The answer is A and not C", "A"),
        ("The answer is B, which is not obvious.", "B"),
        ("The answer is B since it isn't A.", "B"),
        ("The answer is C: false vacuum", "C"),
        ("There is no doubt that C is correct", "C"),
        ("I do not think that C is correct", None),
        ("The answer is not B but C.", "C"),
        ("The correct answer isn't A, it is D.", "D"),
        ("The answer isn't A, it's D.", "D"),
        ("The answer is not obvious: B", "B"),
        ("The answer is not A, B, or C.", None),
        ("B is correct and not C", "B"),
        ("A clearly isn't it, B is the wrong one, C cannot be, D was never likely", None),
        ("The answer is B. Option A: wrong. Option C (incorrect), option D – impossible", "B"),
        ("So the answer is C, rather than D.", "C"),
        ("The answer is C instead of D; D is out", "C"),
        # What leads to a letter leads to no other of the explanation behind it,
        ("The answer is (B) since reagent A is consumed.", "B"),
        ("The answer is B because group A is smaller.", "B"),
        ("Answer: B, because C decays into D", "B"),
        ("The answer is B, whereas A and C are distractors.", "B"),
        ("The answer is B (point D in the figure)", "B"),
        ("My answer is B: in phase D it melts", "B"),
        ("The answer is C because compound D reacts faster.", "C"),
        ("I go with option B because group A is smaller", "B"),
        ("B is the correct answer, since A is smaller", "B"),
        (r"The answer is \boxed{B}, A is smaller", "B"),
        ("### Answer\nB because A melts", "B"),
        ("The answer is A, so B decays", "A"),
        ("The answer is A; no B is left", "A"),
        ("The answer is A, no doubt, B decays", "A"),
        ("The answer is A: it is B that decays", "A"),
        # but those that say which answer is meant come before it, and it may be taken back.
        ("The answer to part A is B.", "B"),
        ("The answer for compound C is (B), since A melts", "B"),
        ("My choice between C and D is D", "D"),
        ("The answer is B. The correct choice is C because A decays", "C"),
        ("The answer is A, no, B", "B"),
        ("The answer is (A) — wait, it's (B).", "B"),
        ("Answer: A, sorry, I mean B", "B"),
        ("The answer is A, or rather B", "B"),
        ("The answer is A or B", "B"),
        ("the electron(d)s", None),
        ("", None),
    ],
)
def test_the_letter_that_a_response_settles_on(response, settled, letter):
    assert compute_gpqa_reward(response, letter, {"choices": ["w1", "x1", "y1", "z1"]}) == (letter == settled)


@pytest.mark.parametrize(
    ("label", "metadata", "letter"),
    [
        ("a", {}, "A"),
        ("(B)", {}, "B"),
        (2, {}, "C"),
        (2.0, {}, "C"),
        ("2", CITIES, "C"),
        (1, {"choices": ["1", "2", "3"]}, "B"),
        ("1", {"choices": ["1", "2", "3"]}, "A"),
        (" berlin ", CITIES, "C"),
        ("Paris", {**CITIES, "correct_letter": "a"}, "A"),
        (None, {"correct_letter": "J"}, "J"),
        ("Q", {"valid_letters": "PQ"}, "Q"),
    ],
)
def test_the_right_letter(label, metadata, letter):
    assert compute_gpqa_reward(f"The answer is {letter}.", label, metadata) == 1
    assert compute_gpqa_reward("no letter at all", label, metadata) == 0


@pytest.mark.parametrize(
    ("response", "verdict"),
    [
        ("London or Paris", 0),
        ("It isn't London. It must be Paris", 1),
        ("never really in Paris", 0),
        ("Parisian", 0),
        ("nothing of the kind", 0),
    ],
)
def test_w2_texts_of_choices(response, verdict):
    assert compute_gpqa_reward(response, "Paris", CITIES) == verdict


@pytest.mark.parametrize(
    ("label", "metadata", "message"),
    [
        (None, {}, "needs a label"),
        ("Rome", CITIES, "'Rome' is none of the letters ABC"),
        ("A", {"correct_letter": "Z"}, "'Z' is none of the letters"),
        ("A", {**CITIES, "valid_letters": "AB"}, "one letter for each of 3 choices"),
        (3, CITIES, "'3' is none"),
        (["A"], {}, "the right answer is list"),
        ("A", {"correct_letter": {"letter": "A"}}, "the right answer is dict"),
    ],
)
def test_a_row_without_a_right_letter_is_an_error(label, metadata, message):
    with pytest.raises(UserError, match=message):
        compute_gpqa_reward("A", label, metadata)
