import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from slime.scheduling.zigzag import response_ranges
from slime.training.context_parallel import NO_CONTEXT_PARALLEL, ContextParallel
from slime.training.packed_stream import pack_stream
from slime.training.rollout_data import RolloutData
from slime.training.train_step import MicroBatches


def test_stream_pads_with_a_pseudo_sequence():
    stream = pack_stream([torch.tensor([5, 6, 7]), torch.tensor([8, 9])], [2, 1], pad_multiple=4)
    assert stream.tokens.tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert stream.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert stream.cu_seqlens.tolist() == [0, 3, 5, 8] and stream.cu_seqlens.dtype == torch.int32
    assert stream.sequence_lengths == (3, 2, 3)


def test_a_stream_lays_out_values_of_positions():
    stream = pack_stream([torch.arange(3), torch.arange(2)], [1, 1], pad_multiple=8)
    assert stream.rows_of([torch.tensor([7]), torch.tensor([8, 9])]).tolist() == [7, 0, 0, 8, 9, 0, 0, 0]


def test_rows_predict_the_response_tokens():
    stream = pack_stream([torch.tensor([5, 6, 7]), torch.tensor([8, 9])], [2, 1], pad_multiple=4)
    assert stream.response_rows.tolist() == [0, 1, 3]
    assert stream.responses(stream.next_tokens).tolist() == [6, 7, 9]
    assert [part.tolist() for part in stream.split(torch.tensor([1, 2, 3]))] == [[1, 2], [3]]


def test_rows_are_found_in_logits_of_the_stream_or_of_themselves():
    stream = pack_stream([torch.tensor([5, 6, 7]), torch.tensor([8, 9])], [2, 1], pad_multiple=4)
    rows = stream.predicting_rows
    assert rows.within(torch.zeros(8, 5)) is rows is rows.one_at_least()
    # A long copy from the host would wait for all that the device was asked for before.
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        found = rows.within(torch.zeros(3, 5, device="meta"))
    assert found.ranges == (range(3),) and found.index.device.type == "meta"
    assert not [event.name for event in seen.events() if "copy" in event.name]
    assert rows.within(torch.zeros(3, 5)).index.tolist() == [0, 1, 2]


def test_there_are_logits_of_one_row_where_none_predicts():
    none = pack_stream([torch.tensor([5, 6, 7])], [0], pad_multiple=4).predicting_rows
    first = none.one_at_least()
    assert (first.ranges, first.index.tolist()) == ((range(1),), [0])
    assert none.within(torch.zeros(len(first.index), 5)) is none


def test_full_stream_is_not_padded():
    stream = pack_stream([torch.tensor([1, 2, 3, 4])], [1], pad_multiple=4)
    assert stream.sequence_lengths == (4,)


def test_empty_response_has_no_rows():
    stream = pack_stream([torch.tensor([1, 2]), torch.tensor([3, 4])], [0, 1], pad_multiple=2)
    assert stream.responses(stream.next_tokens).tolist() == [4]
    assert [len(part) for part in stream.split(torch.tensor([7]))] == [0, 1]


SAMPLES = [(10, 4), (1, 0), (16, 15), (7, 1), (3, 0), (9, 5)]


def streams(cp_size, pad_multiple, all_gather=False):
    """Tokens are unique and positive: 100 · sample + position + 1."""
    tokens = [100 * i + 1 + torch.arange(total) for i, (total, _) in enumerate(SAMPLES)]
    responses = [response for _, response in SAMPLES]
    cps = [ContextParallel(cp_size, rank, None, all_gather) for rank in range(cp_size)]
    return tokens, [pack_stream(tokens, responses, pad_multiple, cp=cp) for cp in cps]


@pytest.mark.parametrize("cp", [
    NO_CONTEXT_PARALLEL, ContextParallel(2, 1, None), ContextParallel(4, 0, None), ContextParallel(2, 1, None, True),
])  # fmt: skip
@pytest.mark.parametrize("pad_multiple", [1, 3, 8])
def test_the_rows_of_streams_are_known_before_these_are_packed(cp, pad_multiple):
    totals, responses = zip(*SAMPLES, strict=True)
    tokens = [torch.ones(total, dtype=torch.int64) for total in totals]
    data = RolloutData({"tokens": tokens, "response_lengths": list(responses)}, cp)
    batches = MicroBatches(data, [[0, 1], [2], [5, 4, 3]], pad_multiple)
    assert batches.stream_rows == [len(batch.stream.tokens) for batch in batches]


@pytest.mark.parametrize("all_gather", [False, True])
@pytest.mark.parametrize("pad_multiple", [1, 3, 8])
@pytest.mark.parametrize("cp_size", [2, 4])
def test_parts_of_a_stream_hold_every_token_with_its_position_and_successor(cp_size, pad_multiple, all_gather):
    samples, parts = streams(cp_size, pad_multiple, all_gather)
    seen = []
    for part in parts:
        assert len(part.tokens) == len(parts[0].tokens) and len(part.tokens) % pad_multiple == 0
        for token, following, position in zip(part.tokens, part.next_tokens, part.position_ids, strict=True):
            if token == 0:
                continue
            sample = samples[int(token) // 100]
            assert position == token % 100 - 1
            assert position + 1 == len(sample) or following == sample[position + 1]
            seen.append(int(token))
    assert sorted(seen) == torch.cat(samples).tolist()


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_rows_of_a_zigzag_part_predict_the_response_tokens_it_owns(cp_size):
    samples, parts = streams(cp_size, 8)
    for rank, part in enumerate(parts):
        predicted = part.split(part.responses(part.next_tokens))
        for sample, (total, response), tokens in zip(samples, SAMPLES, predicted, strict=True):
            own = response_ranges(total, response, cp_size, rank)
            assert tokens.tolist() == [t for start, end in own for t in sample[total - response :][start:end].tolist()]


@pytest.mark.parametrize("cp_size", [2, 4])
def test_rows_of_a_contiguous_part_point_into_the_whole_stream(cp_size):
    _, zigzag = streams(cp_size, 8)
    _, parts = streams(cp_size, 8, all_gather=True)
    whole = torch.cat([part.next_tokens for part in parts])
    for part, same in zip(parts, zigzag, strict=True):
        assert whole[part.response_rows].tolist() == same.responses(same.next_tokens).tolist()
        assert part.local_response_lengths == same.local_response_lengths
    assert sum(parts[0].sequence_lengths) == len(whole)


@pytest.mark.parametrize("pad_multiple", [1, 6, 8])
@pytest.mark.parametrize("cp_size", [2, 4])
def test_zigzag_lengths_speak_of_the_whole_stream(cp_size, pad_multiple):
    """Megatron divides the lengths by the context-parallel size, and that by two chunks."""
    _, parts = streams(cp_size, pad_multiple)
    for part in parts:
        assert all(length % (2 * cp_size) == 0 for length in part.sequence_lengths)
        assert part.cu_seqlens.tolist()[-1] == sum(part.sequence_lengths) == cp_size * len(part.tokens)
        whole = torch.cat([other.tokens for other in parts])[part.gather_order]
        firsts = whole[part.cu_seqlens.long()[: len(SAMPLES)]]
        assert firsts.tolist() == [100 * i + 1 for i in range(len(SAMPLES))]
        assert sum(segment.queries for segment in part.segments) == len(part.tokens)


@pytest.mark.parametrize("distance", [1, 2, 4])
@pytest.mark.parametrize("cp_size, all_gather", [(1, False), (2, False), (4, False), (2, True), (4, True)])
def test_rows_that_predict_know_their_token_of_the_response(cp_size, all_gather, distance):
    samples, parts = streams(cp_size, 8, all_gather)
    found = []
    for part in parts:
        rows = part.rows_predicting(distance)
        assert rows.index.tolist() == [row for piece in rows.ranges for row in piece] == sorted(rows.index.tolist())
        found += part.tokens[rows.index].tolist()
    expected = [
        token
        for sample, (total, response) in zip(samples, SAMPLES, strict=True)
        for token in sample[max(total - response - distance, 0) : max(total - distance, 0)].tolist()
        if response
    ]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_rows_of_own_response_tokens_are_those_that_predict(cp_size):
    for part in streams(cp_size, 8)[1]:
        assert part.predicting_rows.index.tolist() == part.response_rows.tolist()
        values = torch.rand(len(part.response_rows))
        assert part.responses_of_predictions(values) is values
