"""What changed in the bytes of a tensor: two encodings, their compression, and digests. Pure: bytes in, bytes out.

`xor` is new ^ old over the whole tensor; applied twice it gives the old bytes back. `overwrite` is a count, the positions that
changed (little-endian unsigned 32-bit integers, both), and the bytes that are there now; applied twice it changes nothing. Both
travel as a Zstandard stream.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slime.utils.errors import UserError

if TYPE_CHECKING:
    import numpy as np

XOR, OVERWRITE = "xor", "overwrite"
COMPRESSION = "zstd"
_COMPRESSION_LEVEL = 1
# Old bytes, new bytes and what is between them stay in a core's cache.
_BLOCK_BYTES = 256 * 1024
# Positions have 32 bits.
_OVERWRITE_LIMIT = 2**32


def usable_encoding(encoding: str, num_bytes: int) -> str:
    """`encoding`, or `xor` for a tensor whose positions `overwrite` cannot count."""
    return XOR if num_bytes >= _OVERWRITE_LIMIT else encoding


def encode(encoding: str, old: np.ndarray, new: np.ndarray) -> tuple[bytes, int]:
    """What makes `new` of `old` (both uint8, of one length), and how many bytes differ; `old` becomes `new`.

    Where none differ the first is empty.
    """
    import numpy as np
    import zstandard

    compressor = zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL)
    stream = compressor.compressobj(size=len(new))
    # Of whole words, the last of which are zero where a block ends before.
    difference = np.zeros(-(-min(_BLOCK_BYTES, len(new)) // 8) * 8, dtype=np.uint8)
    changed, parts, positions, values = 0, [], [], []
    for start in range(0, len(new), _BLOCK_BYTES):
        theirs, ours = old[start : start + _BLOCK_BYTES], new[start : start + _BLOCK_BYTES]
        between = np.bitwise_xor(theirs, ours, out=difference[: len(ours)])
        difference[len(ours) :] = 0
        if encoding == XOR:
            count = int(np.count_nonzero(between))
            parts.append(stream.compress(between))
        else:
            found = _nonzero_bytes(difference)
            count = len(found)
            positions.append((found + start).astype("<u4"))
            values.append(ours[found])
        if count:
            theirs[:] = ours
            changed += count
    if not changed:
        return b"", 0
    if encoding == XOR:
        return b"".join((*parts, stream.flush())), changed
    count_word = np.array([changed], dtype="<u4")
    return compressor.compress(b"".join(array.tobytes() for array in (count_word, *positions, *values))), changed


def _nonzero_bytes(data: np.ndarray) -> np.ndarray:
    """Where `data`, of whole words, is not zero. Most words are, and are gone through eight bytes at a time."""
    import numpy as np

    words = data.view(np.uint64)
    changed = np.flatnonzero(words != 0)
    inside = np.flatnonzero(words[changed].view(np.uint8))
    return changed[inside >> 3] * 8 + (inside & 7)


def apply(encoding: str, payload: bytes, old: np.ndarray) -> np.ndarray:
    """The bytes that `encode` was called with as `new`, for the same `old`.

    Raises:
        ValueError: the payload is damaged, or was made for a tensor of another size.
    """
    import numpy as np
    import zstandard

    # An overwrite of every byte takes five for each, and the count.
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
    return _DIGESTS[kind](data)


def _xxh3(data: Any) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(data)


def _blake3(data: Any) -> str:
    try:
        import blake3
    except ImportError as error:
        raise UserError(
            "--update-weight-delta-checksum blake3 needs the package `blake3`, which is not installed here: install it on the "
            "hosts of trainer and engines, or give xxh3-128"
        ) from error
    return blake3.blake3(data).hexdigest()


def _adler32(data: Any) -> str:
    return f"{zlib.adler32(data):08x}"


_DIGESTS: dict[str, Callable[[Any], str]] = {"xxh3-128": _xxh3, "blake3": _blake3, "adler32": _adler32}
