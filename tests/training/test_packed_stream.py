import torch

from slime.training.packed_stream import pack_stream


def test_stream_pads_with_a_pseudo_sequence():
    stream = pack_stream([torch.tensor([5, 6, 7]), torch.tensor([8, 9])], [2, 1], pad_multiple=4)
    assert stream.tokens.tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert stream.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert stream.cu_seqlens.tolist() == [0, 3, 5, 8] and stream.cu_seqlens.dtype == torch.int32
    assert stream.sequence_lengths == (3, 2, 3)


def test_rows_predict_the_response_tokens():
    stream = pack_stream([torch.tensor([5, 6, 7]), torch.tensor([8, 9])], [2, 1], pad_multiple=4)
    assert stream.response_rows.tolist() == [0, 1, 3]
    assert stream.responses(stream.next_tokens).tolist() == [6, 7, 9]
    assert [part.tolist() for part in stream.split(torch.tensor([1, 2, 3]))] == [[1, 2], [3]]


def test_full_stream_is_not_padded():
    stream = pack_stream([torch.tensor([1, 2, 3, 4])], [1], pad_multiple=4)
    assert stream.sequence_lengths == (4,)


def test_empty_response_has_no_rows():
    stream = pack_stream([torch.tensor([1, 2]), torch.tensor([3, 4])], [0, 1], pad_multiple=2)
    assert stream.responses(stream.next_tokens).tolist() == [4]
    assert [len(part) for part in stream.split(torch.tensor([7]))] == [0, 1]
