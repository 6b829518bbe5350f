"""Which predictions count, and what is predicted; written out by hand and in every cut of the stream."""

import math

import pytest
import torch

from slime.training import multi_token_prediction
from slime.training.context_parallel import ContextParallel
from slime.training.multi_token_prediction import counted_predictions, counted_rows, prediction_loss, tokens_ahead
from slime.training.packed_stream import pack_stream

# Prompts of two and of one token.
TOKENS = [torch.tensor([10, 11, 12, 13, 14]), torch.tensor([20, 21, 22])]
MASKS = [torch.tensor([1, 0, 1]), torch.tensor([1, 1])]


def batch_of(cp=None, pad_multiple=4):
    options = {} if cp is None else {"cp": cp}
    responses = [len(mask) for mask in MASKS]
    stream = pack_stream(TOKENS, responses, pad_multiple, **options)
    totals = [len(tokens) for tokens in TOKENS]
    return {
        "stream": stream, "tokens": TOKENS, "loss_masks": MASKS, "total_lengths": totals, "response_lengths": responses,
    }  # fmt: skip


def test_rows_see_and_predict_tokens_of_their_own_sequence():
    batch = batch_of()
    assert batch["stream"].tokens.tolist() == [10, 11, 12, 13, 14, 20, 21, 22]
    assert tokens_ahead(batch, 1).tolist() == [11, 12, 13, 14, 0, 21, 22, 0]
    assert tokens_ahead(batch, 2).tolist() == [12, 13, 14, 0, 0, 22, 0, 0]
    assert tokens_ahead(batch, 7).tolist() == [0] * 8


def test_predictions_of_trained_tokens_count_wherever_they_stand():
    batch = batch_of()
    # Trained: positions 2 and 4 of the first sequence, 1 and 2 of the second.
    assert counted_rows(batch, 1).tolist() == [1, 0, 1, 0, 0, 1, 0, 0]
    assert counted_rows(batch, 2).tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert counted_rows(batch, 9).tolist() == [0] * 8


def test_padding_counts_for_nothing():
    batch = batch_of(pad_multiple=16)
    assert counted_rows(batch, 1).tolist() == [1, 0, 1, 0, 0, 1] + [0] * 10
    assert tokens_ahead(batch, 1).tolist()[8:] == [0] * 8


@pytest.mark.parametrize("all_gather", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_parts_of_a_stream_hold_what_the_whole_one_does(size, all_gather):
    def predictions(batch, layer):
        rows = zip(
            batch["stream"].tokens.tolist(), tokens_ahead(batch, layer).tolist(),
            tokens_ahead(batch, 1 + layer).tolist(), counted_rows(batch, layer).tolist(), strict=True,
        )  # fmt: skip
        return sorted(row for row in rows if row[0])

    parts = [batch_of(ContextParallel(size, rank, None, all_gather), pad_multiple=2) for rank in range(size)]
    for layer in (1, 2, 3):
        assert sorted(row for part in parts for row in predictions(part, layer)) == predictions(batch_of(), layer)


def test_the_mean_is_over_all_that_counts_in_the_step(monkeypatch):
    monkeypatch.setattr(multi_token_prediction, "all_reduce_sum", lambda counts, group: counts)
    assert counted_predictions(MASKS, [5, 3], 4, None) == [3.0, 1.0, 1.0, 1.0]
    batch = batch_of()
    assert [counted_rows(batch, layer).sum().item() for layer in (1, 2, 3, 4)] == [3, 1, 1, 0]


def test_the_loss_is_the_sum_of_negative_log_likelihoods_of_what_counts():
    batch = batch_of()
    logits = torch.zeros(8, 32)
    logits[0, 12] = math.log(3.0)
    logits[1] = torch.nan  # does not count
    logits.requires_grad_()
    loss = prediction_loss(batch, logits, 1, None)
    assert loss.item() == pytest.approx(-math.log(3 / 34) - 2 * math.log(1 / 32), rel=1e-6)
    loss.backward()
    assert logits.grad[[3, 4, 6, 7]].abs().sum() == 0 and (logits.grad[[0, 2, 5]].abs().sum(1) > 0).all()


def test_a_stream_lays_out_values_of_positions():
    stream = pack_stream([torch.arange(3), torch.arange(2)], [1, 1], pad_multiple=8)
    assert stream.rows_of([torch.tensor([7]), torch.tensor([8, 9])]).tolist() == [7, 0, 0, 8, 9, 0, 0, 0]
