import pytest
import torch

from tools.bench.gpu import handles


@pytest.mark.parametrize("piece", [2**26, 3])
def test_a_checksum_is_of_bytes_and_their_places(monkeypatch, piece):
    monkeypatch.setattr(handles, "_PIECE", piece)
    numbers = torch.arange(10, dtype=torch.bfloat16)
    known = handles.checksum(numbers)
    assert handles.checksum(numbers.clone()) == known == handles.checksum(numbers.view(2, 5).t().contiguous().t())
    assert len({known, handles.checksum(numbers.flip(0)), handles.checksum(numbers + 1)}) == 3


def test_the_pieces_of_a_checksum_are_one():
    numbers = torch.arange(100, dtype=torch.uint8)
    expected = sum(int(byte) * ((place + 1) * 2654435761 % 2**31) for place, byte in enumerate(numbers))
    assert handles.checksum(numbers) == expected


def test_what_is_lost_on_the_way_is_counted():
    row = handles.row_of("x", 2 * 10**9, {"copy": 0.5, "push": 2.0}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 5, "d": 3})
    assert row == {"shape": "x", "MB": 2000.0, "ms": 2000.0, "GB/s": 1.0, "of the copy's speed": 0.25, "different": 3}


def test_a_receiver_that_dies_ends_the_measurement(monkeypatch):
    receiver = handles._Receiver("cpu")
    receiver._process.kill()
    with pytest.raises(RuntimeError, match="ended"):
        receiver.checksums()
    receiver.close()
