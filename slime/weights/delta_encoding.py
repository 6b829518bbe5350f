"""Differences between the old and new bytes of a tensor: two encodings, their compression, and digests. Bytes in, bytes out.

`xor` is new ^ old over the whole tensor; applied twice it gives the old bytes back. `overwrite` is a count, the changed
positions (both little-endian unsigned 32-bit integers), and the new bytes there; a second application changes nothing. Both are
sent as a Zstandard stream.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from slime.utils.errors import UserError

if TYPE_CHECKING:
    import numpy as np

XOR, OVERWRITE = "xor", "overwrite"
COMPRESSION = "zstd"
_COMPRESSION_LEVEL = 1
# A difference is zeros with few bytes between them. With a smaller hash table the compressor finds fewer short matches, and
# more that go on to the next changed byte: it takes three quarters of the time, and its output is no larger.
_XOR_HASH_LOG = 6
# Sizes of blocks whose old bytes, new bytes and differences stay in a core's cache. `overwrite` has many short steps, between
# which a thread may wait for the interpreter lock, held by threads of other tensors; so its blocks are larger.
_XOR_BLOCK_BYTES = 256 * 1024
_OVERWRITE_BLOCK_BYTES = 1024 * 1024
# Positions have 32 bits.
_OVERWRITE_LIMIT = 2**32
_WORD_BYTES = 8
_WORDS_OF_GROUP = 4


def usable_encoding(encoding: str, num_bytes: int) -> str:
    """`encoding`, or `xor` for a tensor whose positions `overwrite` cannot count."""
    return XOR if num_bytes >= _OVERWRITE_LIMIT else encoding


@dataclasses.dataclass(frozen=True)
class Difference:
    """`payload` turns the old bytes into the new ones, and is empty if none differ; `changed` is how many differ, `digest` that
    of the new bytes."""

    payload: bytes
    changed: int
    digest: str


def encode(encoding: str, old: np.ndarray, new: np.ndarray, digest_kind: str) -> Difference:
    """The difference from `old` to `new` (both uint8, of one length). `old` becomes `new`. Every byte is read from memory once.

    Raises:
        UserError: as `digest`.
    """
    running = _DIGESTS[digest_kind]()
    difference_of = _xor if encoding == XOR else _overwrite
    payload, changed = difference_of(old, new, running)
    return Difference(payload if changed else b"", changed, running.hexdigest())


def _xor(old: np.ndarray, new: np.ndarray, running: _Running) -> tuple[bytes, int]:
    import numpy as np
    import zstandard

    parameters = zstandard.ZstdCompressionParameters.from_level(
        _COMPRESSION_LEVEL, source_size=len(new), hash_log=_XOR_HASH_LOG
    )
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=len(new))
    difference = np.empty(min(_XOR_BLOCK_BYTES, len(new)), dtype=np.uint8)
    changed, parts = 0, []
    for theirs, ours in _blocks(old, new, _XOR_BLOCK_BYTES):
        between = np.bitwise_xor(theirs, ours, out=difference[: len(ours)])
        running.update(ours)
        parts.append(stream.compress(between))
        count = int(np.count_nonzero(between))
        if count:
            theirs[:] = ours
            changed += count
    return b"".join((*parts, stream.flush())), changed


def _overwrite(old: np.ndarray, new: np.ndarray, running: _Running) -> tuple[bytes, int]:
    import numpy as np
    import zstandard

    changed, positions, values = 0, [], []
    for start, (theirs, ours) in enumerate(_blocks(old, new, _OVERWRITE_BLOCK_BYTES)):
        # Words in whole groups; the last block may have bytes left at its end.
        num_words = len(ours) // (_WORD_BYTES * _WORDS_OF_GROUP) * _WORDS_OF_GROUP
        left = num_words * _WORD_BYTES
        old_words, new_words = theirs[:left].view(np.uint64), ours[:left].view(np.uint64)
        running.update(ours)
        words = _true_ones(old_words != new_words)
        before, after = old_words.take(words), new_words.take(words).view(np.uint8)
        inside = np.flatnonzero(before.view(np.uint8) != after)
        at_the_end = np.flatnonzero(theirs[left:] != ours[left:]) + left
        old_words[words] = after.view(np.uint64)
        theirs[at_the_end] = ours[at_the_end]
        values += after.take(inside), ours[at_the_end]
        found = words.take(inside >> 3) * _WORD_BYTES + (inside & 7)
        positions += ((of_block + start * _OVERWRITE_BLOCK_BYTES).astype("<u4") for of_block in (found, at_the_end))
        changed += len(found) + len(at_the_end)
    count = np.array([changed], dtype="<u4")
    compressor = zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL)
    return compressor.compress(b"".join((count, *positions, *values))) if changed else b"", changed


def _blocks(old: np.ndarray, new: np.ndarray, size: int) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    return ((old[start : start + size], new[start : start + size]) for start in range(0, len(new), size))


def _true_ones(mask: np.ndarray) -> np.ndarray:
    """The positions at which `mask`, of whole groups, is true. About one in ten may be, so first looking for groups with any is
    faster than looking at each element."""
    import numpy as np

    of_groups = mask.view(np.uint32)
    groups = np.flatnonzero(of_groups != 0)
    inside = np.flatnonzero(of_groups.take(groups).view(bool))
    return groups.take(inside >> 2) * _WORDS_OF_GROUP + (inside & 3)


def apply(encoding: str, payload: bytes, old: np.ndarray) -> np.ndarray:
    """The bytes that `encode` was called with as `new`, for the same `old`.

    Raises:
        ValueError: the payload is damaged, or was made for a tensor of another size.
    """
    import numpy as np
    import zstandard

    # Overwriting every byte takes five bytes each, and the count.
    limit = len(old) if encoding == XOR else 4 + 5 * len(old)
    try:
        if zstandard.frame_content_size(payload) > limit:
            raise ValueError(f"it is for a tensor of more than {len(old)} bytes")
        raw = np.frombuffer(zstandard.ZstdDecompressor().decompress(payload), dtype=np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if encoding == XOR:
        if len(raw) != len(old):
            raise ValueError(f"it is for a tensor of {len(raw)} bytes, not of {len(old)}")
        return np.bitwise_xor(old, raw)
    count = int(raw[:4].view("<u4")[0]) if len(raw) >= 4 else -1
    if len(raw) != 4 + 5 * count:
        raise ValueError("it is shorter or longer than its count says")
    positions = raw[4 : 4 + 4 * count].view("<u4")
    if count and int(positions.max()) >= len(old):
        raise ValueError(f"it is for a tensor of more than {len(old)} bytes")
    new = old.copy()
    new[positions] = raw[4 + 4 * count :]
    return new


def digest(kind: str, data: np.ndarray) -> str:
    """Digest of bytes, as hexadecimal digits. `kind`: a value of `--update-weight-delta-checksum`.

    Raises:
        UserError: the package that computes it is not installed.
    """
    running = _DIGESTS[kind]()
    running.update(data)
    return running.hexdigest()


class _Running(Protocol):
    """A digest of bytes that come in pieces."""

    def update(self, data: Any) -> object: ...

    def hexdigest(self) -> str: ...


def _xxh3() -> _Running:
    import xxhash

    return xxhash.xxh3_128()


def _blake3() -> _Running:
    try:
        import blake3
    except ImportError as error:
        raise UserError(
            "--update-weight-delta-checksum blake3 needs the package `blake3`, which is not installed here: install it on the "
            "hosts of trainer and engines, or give xxh3-128"
        ) from error
    return blake3.blake3()


class _Adler32:
    def __init__(self) -> None:
        self._value = zlib.adler32(b"")

    def update(self, data: Any) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


_DIGESTS: dict[str, Callable[[], _Running]] = {"xxh3-128": _xxh3, "blake3": _blake3, "adler32": _Adler32}
