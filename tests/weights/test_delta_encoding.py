"""Encodings of a delta: the vector of the format, the plain formulas bit for bit, and inverses."""

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


def plain(encoding, old, new):
    """What the formulas of the format say, byte by byte."""
    places = [place for place, (theirs, ours) in enumerate(zip(old, new, strict=True)) if theirs != ours]
    if encoding == "xor":
        return bytes(theirs ^ ours for theirs, ours in zip(old, new, strict=True)), len(places)
    words = b"".join(number.to_bytes(4, "little") for number in (len(places), *places))
    return words + bytes(new[place] for place in places), len(places)


def check(encoding, old, new):
    """`encode` against the formulas and `apply`. The bytes of `old` and `new` may begin anywhere in memory."""
    base = old.copy()
    found = encode(encoding, old, new, "xxh3-128")
    expected, changed = plain(encoding, base.tobytes(), new.tobytes())
    assert found.changed == changed and found.digest == digest("xxh3-128", new)
    assert old.tobytes() == new.tobytes(), "the base follows"
    if changed == 0:
        assert found.payload == b""
        return
    assert zstandard.ZstdDecompressor().decompress(found.payload) == expected
    once = apply(encoding, found.payload, base)
    assert once.tobytes() == new.tobytes()
    assert apply(encoding, found.payload, once).tobytes() == (base if encoding == "xor" else new).tobytes()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_vector_of_the_format(encoding):
    old = array(OLD)
    found = encode(encoding, old, array(NEW), "adler32")
    assert zstandard.ZstdDecompressor().decompress(found.payload) == VECTOR[encoding]
    assert found.changed == 2 and found.digest == digest("adler32", array(NEW))
    assert old.tobytes() == NEW, "the base follows"
    assert apply(encoding, found.payload, array(OLD)).tobytes() == NEW


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("share", [0, 0.01, 0.3, 1])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 31, 32, 33, 64, 95, 96, 1000, 4096])
def test_bytes_in_blocks_and_what_is_left_at_the_end_are_as_the_formulas_say(encoding, share, size, monkeypatch):
    for block in ("_XOR_BLOCK_BYTES", "_OVERWRITE_BLOCK_BYTES"):
        monkeypatch.setattr(delta_encoding, block, 96)
    random = np.random.default_rng(size)
    memory = random.integers(0, 256, size + 3, dtype=np.uint8)
    for first in (0, 3):  # words that lie where words do, and others
        old, changes = memory[first : first + size].copy(), random.random(size) < share
        new = np.concatenate([memory[:first], old ^ (changes * random.integers(1, 256, size)).astype(np.uint8)])
        check(encoding, old, new[first:])


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("place", [0, 7, 8, 31, 32, 2**20 - 1, 2**20, 2**20 + 96, 2**20 + 100])
def test_a_single_byte_is_found_wherever_it_is(encoding, place):
    old = np.arange(2**20 + 101, dtype=np.uint32).astype(np.uint8)
    new = old.copy()
    new[place] ^= 128
    found = encode(encoding, old.copy(), new, "xxh3-128")
    assert found.changed == 1 and apply(encoding, found.payload, old).tobytes() == new.tobytes()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int64, np.int8, np.bool_])
def test_tensors_of_every_size_of_element(encoding, dtype):
    random = np.random.default_rng(0)
    weights = (random.standard_normal(777) * 100).astype(dtype)
    moved = np.where(random.random(777) < 0.2, weights + dtype(1), weights).astype(dtype)
    check(encoding, weights.view(np.uint8).copy(), moved.view(np.uint8))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_payload_of_another_tensor_or_a_damaged_one_is_refused(encoding):
    old = np.zeros(100, dtype=np.uint8)
    payload = encode(encoding, old.copy(), np.arange(100, dtype=np.uint8), "xxh3-128").payload
    with pytest.raises(ValueError, match="it is for a tensor of"):
        apply(encoding, payload, old[:10])
    with pytest.raises(ValueError):
        apply(encoding, payload[:-3], old)
    with pytest.raises(ValueError):
        apply(encoding, b"no stream at all", old)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_small_payload_of_a_huge_tensor_is_not_unpacked(encoding, monkeypatch):
    bomb = zstandard.ZstdCompressor().compress(bytes(2**20))
    monkeypatch.setattr(zstandard, "ZstdDecompressor", None)
    with pytest.raises(ValueError, match="it is for a tensor of more than 100 bytes"):
        apply(encoding, bomb, np.zeros(100, dtype=np.uint8))


def test_compression_is_of_the_fastest_level():
    old = np.zeros(2**16, dtype=np.uint8)
    new = np.random.default_rng(0).integers(0, 3, 2**16, dtype=np.uint8)
    raw, _ = plain("overwrite", old.tobytes(), new.tobytes())
    found = encode("overwrite", old, new, "xxh3-128").payload
    assert found == zstandard.ZstdCompressor(level=1).compress(raw) != zstandard.ZstdCompressor(level=3).compress(raw)


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
    assert digest("adler32", data[:0]) == "00000001"
    # Of no bytes, as the authors of XXH3 publish it.
    assert digest("xxh3-128", data[:0]) == "99aa06d3014798d86001c324468d497f"
    for kind in ("xxh3-128", "adler32"):
        changed = data.copy()
        changed[17] ^= 1
        assert digest(kind, changed) != digest(kind, data)
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(UserError, match=r"--update-weight-delta-checksum blake3 .* give xxh3-128"):
        digest("blake3", data)
