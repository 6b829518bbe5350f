"""Kept sets at the rows of a micro-batch, in every layout, and the loss that follows from them."""

import random

import pytest
import torch

from slime.training.context_parallel import NO_CONTEXT_PARALLEL, ContextParallel
from slime.training.keep_set import kept_tokens
from slime.training.loss import loss_function
from slime.training.packed_stream import pack_stream
from tests.support.grpo_batch import objective_args

VOCABULARY = 11
LENGTHS = ((9, 5), (4, 1), (17, 12), (3, 2))


def make_batch(cp, multiple=4):
    generator = random.Random(5)
    batch = {"tokens": [], "total_lengths": [], "response_lengths": [], "rollout_top_p_token_ids": [], "kept": [],
             "rollout_top_p_token_offsets": []}  # fmt: skip
    for total, response in LENGTHS:
        tokens = [generator.randrange(VOCABULARY) for _ in range(total)]
        kept = [sorted(generator.sample(range(VOCABULARY), generator.randint(1, 4))) for _ in range(response)]
        for t, ids in enumerate(kept):
            kept[t] = sorted({*ids, tokens[total - response + t]})
        offsets = [0]
        for ids in kept:
            offsets.append(offsets[-1] + len(ids))
        batch["tokens"].append(torch.tensor(tokens))
        batch["total_lengths"].append(total)
        batch["response_lengths"].append(response)
        batch["kept"].append(kept)
        batch["rollout_top_p_token_ids"].append(torch.tensor([i for ids in kept for i in ids], dtype=torch.int32))
        batch["rollout_top_p_token_offsets"].append(torch.tensor(offsets, dtype=torch.int32))
    batch["stream"] = pack_stream(batch["tokens"], batch["response_lengths"], multiple, cp=cp)
    return batch


def sets_of_rows(batch):
    """Kept ids per row of a rank, ascending."""
    kept = kept_tokens(batch)
    offsets, ids = kept.offsets.tolist(), kept.token_ids.tolist()
    assert len(offsets) == len(batch["stream"].tokens) + 1
    return [sorted(ids[start:end]) for start, end in zip(offsets[:-1], offsets[1:], strict=True)]


def test_no_sets_no_replay():
    assert kept_tokens({"stream": None}) is None


def places_of_rows(stream, rank, size):
    """Where a rank's rows stand in the whole stream."""
    if stream.cp.all_gather or size == 1:
        return range(rank * len(stream.tokens), (rank + 1) * len(stream.tokens))
    places, begin = [], 0
    for length in stream.sequence_lengths:
        chunk = length // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            places += range(begin + number * chunk, begin + (number + 1) * chunk)
        begin += length
    return places


@pytest.mark.parametrize("size, all_gather", [(1, False), (2, False), (3, False), (2, True), (3, True)])
def test_sets_stand_at_the_rows_that_predict_their_tokens(size, all_gather):
    seen = {}
    for rank in range(size):
        batch = make_batch(ContextParallel(size, rank, None, all_gather) if size > 1 else NO_CONTEXT_PARALLEL)
        sets = sets_of_rows(batch)
        places = places_of_rows(batch["stream"], rank, size)
        seen.update({place: ids for place, ids in zip(places, sets, strict=True) if ids})
    expected, start = {}, 0
    for sample, (total, response) in enumerate(LENGTHS):
        for t in range(response):
            expected[start + total - response - 1 + t] = batch["kept"][sample][t]
        start += batch["stream"].sequence_lengths[sample]
    assert seen == expected


def test_the_loss_is_that_of_the_renormalised_distribution():
    batch = make_batch(NO_CONTEXT_PARALLEL)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(batch["stream"].tokens), VOCABULARY, generator=generator).requires_grad_()
    args = objective_args(loss_type="sft_loss", calculate_per_token_loss=True)
    batch["loss_masks"] = [torch.ones(response) for _, response in LENGTHS]
    loss, _ = loss_function(args, batch, logits, None)
    loss.backward()

    leaf = logits.detach().double().requires_grad_()
    expected, start = 0.0, 0
    for sample, (total, response) in enumerate(LENGTHS):
        for t in range(response):
            place = start + total - response + t
            kept = batch["kept"][sample][t]
            row = leaf[place - 1]
            expected = expected - (row[batch["tokens"][sample][total - response + t]] - torch.logsumexp(row[kept], 0))
        start += total
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(logits.grad.double(), leaf.grad, rtol=1e-5, atol=1e-7)


def test_offsets_of_another_response_are_refused():
    batch = make_batch(NO_CONTEXT_PARALLEL)
    batch["rollout_top_p_token_offsets"][1] = torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match="of sample 1 has 3 entries for 1 response tokens"):
        kept_tokens(batch)
