"""Encodings of a delta: the vector of the format, and inverses on random bytes."""

import sys
import zlib

import numpy as np
import pytest
import zstandard

from slime.utils.errors import UserError
from slime.weights import delta_encoding
from slime.weights.delta_encoding import apply, digest, encode, usable_encoding

OLD, NEW = bytes.fromhex("01020304"), bytes.fromhex("01ff0305")
VECTOR = {"xor": bytes.fromhex("00fd0001"), "overwrite": bytes.fromhex("02000000 01000000 03000000 ff05")}
ENCODINGS = list(VECTOR)


def array(data):
    return np.frombuffer(data, dtype=np.uint8).copy()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_vector_of_the_format(encoding):
    old = array(OLD)
    payload, changed = encode(encoding, old, array(NEW))
    assert zstandard.ZstdDecompressor().decompress(payload) == VECTOR[encoding]
    assert changed == 2 and old.tobytes() == NEW, "the base follows"
    assert apply(encoding, payload, array(OLD)).tobytes() == NEW


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("size", [1, 7, 50, 1000])
def test_any_bytes_come_back_over_several_blocks(encoding, size, monkeypatch):
    monkeypatch.setattr(delta_encoding, "_BLOCK_BYTES", 7)
    random = np.random.default_rng(size)
    old = random.integers(0, 256, size, dtype=np.uint8)
    new = np.where(random.random(size) < 0.3, random.integers(0, 256, size, dtype=np.uint8), old).astype(np.uint8)
    new[-1] = old[-1] ^ 1
    payload, changed = encode(encoding, old.copy(), new)
    assert changed == int((old != new).sum())
    assert apply(encoding, payload, old).tobytes() == new.tobytes()
    twice = apply(encoding, payload, apply(encoding, payload, old))
    assert twice.tobytes() == (old if encoding == "xor" else new).tobytes()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("size", [0, 5])
def test_what_did_not_change_has_no_payload(encoding, size):
    same = np.arange(size, dtype=np.uint8)
    assert encode(encoding, same.copy(), same) == (b"", 0)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_payload_of_another_tensor_or_a_damaged_one_is_refused(encoding):
    old = np.zeros(100, dtype=np.uint8)
    payload, _ = encode(encoding, old.copy(), np.arange(100, dtype=np.uint8))
    with pytest.raises(ValueError, match="it is for a tensor of"):
        apply(encoding, payload, old[:10])
    with pytest.raises(ValueError):
        apply(encoding, payload[:-3], old)
    with pytest.raises(ValueError):
        apply(encoding, b"no stream at all", old)


@pytest.mark.parametrize(
    "raw", [b"", b"\x01", b"\x02\x00\x00\x00\x01\x00\x00\x00\x07", b"\x01\x00\x00\x00\x09\x00\x00\x00\x07"]
)
def test_an_overwrite_that_does_not_fit_is_refused(raw):
    with pytest.raises(ValueError):
        apply("overwrite", zstandard.ZstdCompressor().compress(raw), np.zeros(9, dtype=np.uint8))


def test_a_tensor_whose_positions_cannot_be_counted_is_sent_as_a_difference():
    assert [usable_encoding("overwrite", size) for size in (2**32 - 1, 2**32)] == ["overwrite", "xor"]


def test_digests(monkeypatch):
    data = np.arange(200, dtype=np.uint8)
    assert digest("adler32", data) == f"{zlib.adler32(bytes(range(200))):08x}"
    # Of no bytes, as the authors of XXH3 publish it.
    assert digest("xxh3-128", data[:0]) == "99aa06d3014798d86001c324468d497f"
    for kind in ("xxh3-128", "adler32"):
        changed = data.copy()
        changed[17] ^= 1
        assert digest(kind, changed) != digest(kind, data)
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(UserError, match=r"--update-weight-delta-checksum blake3 .* give xxh3-128"):
        digest("blake3", data)
