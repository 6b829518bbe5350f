"""Log-probs and draws of a teacher against whole rows: on one rank, and on two that have half of the vocabulary each."""

import datetime

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slime.training.packed_stream import Rows
from tests.support.processes.distributed import run_distributed
from tools.teacher import scoring
from tools.teacher.scoring import Question, score

VOCAB, LENGTH, DRAWS, LABELS = 98, 34, 5, 3
CHUNKS = {"sample_rows": 7, "label_rows": 4}


def a_case(scale=3.0):
    """Logits of LENGTH rows and two of padding, and a question about the sequence."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(LENGTH + 2, VOCAB, generator=generator) * scale
    tokens = torch.randint(VOCAB, (LENGTH,), generator=generator).numpy()
    labels = torch.randint(VOCAB, (LENGTH - 1, LABELS), generator=generator).numpy()
    return logits, Question(tokens, 0.7, DRAWS, 11, labels)


def rows_of(question):
    return Rows.at([range(len(question.tokens) - 1)], torch.device("cpu"))


def asked(logits, question, group=None, **chunks):
    found = score(logits, rows_of(question), question, group, **{**CHUNKS, **chunks})
    return {name: values.numpy() for name, values in found.items()}


class Shapes(TorchDispatchMode):
    """Of every tensor that comes out of an operation."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.seen |= {tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        return result


def _score_half(logits, question):
    """On one of two ranks: the answer, and the shapes of what was computed."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    half = logits.chunk(2, dim=1)[dist.get_rank()].contiguous()
    with Shapes() as shapes:
        found = asked(half, question, dist.group.WORLD)
    return found, shapes.seen


@pytest.fixture(scope="module")
def of_two_ranks():
    return run_distributed(_score_half, 2, a_case())


def expected_log_probs(logits, question):
    return torch.log_softmax(logits[: LENGTH - 1].double() / question.temperature, dim=1).numpy()


def check_answer(found, logits, question):
    whole = expected_log_probs(logits, question)
    for name, ids in (
        ("log_probs", question.tokens[1:]),
        ("sampled_log_probs", found["sampled_token_ids"]),
        ("label_token_log_probs", question.labels),
    ):
        expected = np.take_along_axis(whole, ids.reshape(len(whole), -1), axis=1).reshape(ids.shape)
        assert found[name].dtype == np.float32 and found[name].shape == ids.shape
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=2e-6)


def test_every_log_prob_is_that_of_the_whole_row():
    logits, question = a_case()
    found = asked(logits, question)
    check_answer(found, logits, question)
    assert list(asked(logits, Question(question.tokens))) == ["log_probs"]


def test_ranks_that_share_the_vocabulary_say_the_same(of_two_ranks):
    (first, _), (second, _) = of_two_ranks
    check_answer(first, *a_case())
    assert {name: values.tolist() for name, values in first.items()} == {
        name: values.tolist() for name, values in second.items()
    }
    # Draws of both halves.
    assert first["sampled_token_ids"].min() < VOCAB // 2 <= first["sampled_token_ids"].max()


def test_no_rank_has_a_row_of_the_whole_vocabulary(of_two_ranks):
    for _, shapes in of_two_ranks:
        assert all(VOCAB not in shape for shape in shapes)
        # The whole sums go through the half that a rank has; draws and ids in chunks.
        most = (LENGTH - 1) * VOCAB // 2
        assert max(np.prod(shape, dtype=int) for shape in shapes) <= most
        assert (CHUNKS["sample_rows"], VOCAB // 2) in shapes and (CHUNKS["label_rows"], LABELS) in shapes


def _draw(logits, question):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    half = logits.chunk(2, dim=1)[dist.get_rank()].contiguous()
    return asked(half, question, dist.group.WORLD)["sampled_token_ids"]


def chi_square(ids, probabilities):
    counts = np.bincount(ids, minlength=len(probabilities))
    expected = probabilities * len(ids)
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    return float(((counts - expected)[kept] ** 2 / expected[kept]).sum())


@pytest.mark.parametrize("ranks", [1, 2])
def test_draws_have_the_frequencies_of_the_softmax(ranks):
    """12 ids, one of which is impossible: above 31.3 chi-square of 10 degrees has a probability of 0.0005."""
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -0.5, 2.5, 0.2, 0.7, 1.2, -1e9]] * 5)
    question = Question(np.arange(5), 0.8, 2000, 3)
    if ranks == 1:
        ids = asked(logits, question)["sampled_token_ids"]
    else:
        ids, other = run_distributed(_draw, 2, (logits, question))
        assert ids.tolist() == other.tolist()
    probabilities = torch.softmax(logits[0].double() / question.temperature, dim=0).numpy()
    assert ids.shape == (4, 2000)
    assert all(chi_square(of_row, probabilities) < 31.3 for of_row in ids)
    # What is drawn for one row says nothing about the next.
    pairs = np.mean(ids[0] == ids[1])
    assert abs(pairs - (probabilities**2).sum()) < 0.05


def test_a_question_is_drawn_for_again_by_its_seed_and_nothing_global_moves():
    logits, question = a_case(scale=1.0)
    before = torch.get_rng_state()
    first = asked(logits, question)["sampled_token_ids"]
    assert asked(logits, question)["sampled_token_ids"].tolist() == first.tolist()
    other = Question(question.tokens, question.temperature, DRAWS, question.seed + 1)
    assert asked(logits, other)["sampled_token_ids"].tolist() != first.tolist()
    assert torch.get_rng_state().equal(before)


def test_16_bits_are_computed_in_32():
    logits, question = a_case()
    rounded = logits.bfloat16()
    check_answer(asked(rounded, question), rounded, question)


def test_an_impossible_token_and_a_broken_row_show():
    logits, question = a_case()
    logits[0, question.tokens[1]] = -torch.inf
    logits[5, 0] = torch.nan
    found = asked(logits, question)
    assert found["log_probs"][0] == -np.inf
    assert np.isnan(found["log_probs"][5]) and np.isnan(found["label_token_log_probs"][5]).all()
    assert np.isfinite(found["log_probs"][6:]).all()


def test_no_token_is_more_than_certain(monkeypatch):
    """A device may round a sum below the one logit that it consists of."""
    logits, question = a_case()
    logits[:, question.tokens[1]] = 1e4
    sums = scoring.log_sums
    monkeypatch.setattr(scoring, "log_sums", lambda *args, **options: sums(*args, **options) - 1e-3)
    found = asked(logits, question)
    assert found["log_probs"][0] == 0.0 and (found["log_probs"] <= 0.0).all()
    assert (found["sampled_token_ids"] == question.tokens[1]).all() and (found["sampled_log_probs"] == 0.0).all()


def test_a_draw_that_a_device_rounds_to_nothing_chooses_no_impossible_token(monkeypatch):
    """Its noise would be infinite, and above every logit."""
    logits, question = a_case()
    logits[:, 0] = -1e4

    def of_which_one_is_zero(values, generator):
        values.fill_(1.0)[:, 0] = 0.0
        return values

    monkeypatch.setattr(torch.Tensor, "exponential_", of_which_one_is_zero)
    likeliest = logits[: LENGTH - 1].argmax(dim=1)
    assert (asked(logits, question)["sampled_token_ids"] == likeliest[:, None].numpy()).all()
    # Noise of a likely draw of that size still counts: as an exponential draw of 2^-25 has it.
    logits[:, 0] = logits.amax(dim=1) - 0.7 * 17
    assert (asked(logits, question)["sampled_token_ids"] == 0).all()
