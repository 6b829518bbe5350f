"""Which samples of one or several files an epoch has, and in which order: a function of sizes, weights, seed and epoch.

There is no state between epochs, so a resumed run gets the same order from seed and epoch, and no global generator is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np


@dataclass(frozen=True)
class Part:
    """A file of a data set: how many samples it has, and their weight."""

    size: int
    weight: float


def epoch_order(parts: Sequence[Part], seed: int, epoch: int, shuffled: bool) -> Sequence[int]:
    """The positions of the samples of `epoch`, in the concatenation of all `parts`; as many as that has samples.

    The result depends only on the arguments. Each part has a share of size × weight, exact to one sample in each epoch, so
    equal weights give every sample once. No sample of a part occurs again before all others of it have occurred, which may take
    several epochs. Each pass over a part is in a new random order; without shuffling it is in the order of the file.
    """
    length = sum(part.size for part in parts)
    counts = shares(parts)
    starts = np.cumsum([0, *(part.size for part in parts)])
    chosen: Sequence[int] = range(length)
    if counts != [part.size for part in parts]:
        chosen = np.concatenate(
            [
                start + _drawn(part.size, count, (seed, number), epoch, shuffled)
                for number, (start, part, count) in enumerate(zip(starts, parts, counts, strict=False))
                if count
            ]
        )
    if not shuffled:
        return chosen
    permutation = epoch_permutation(length, seed, epoch)
    return permutation if isinstance(chosen, range) else chosen[permutation]


def shares(parts: Sequence[Part]) -> list[int]:
    """How many samples of each part an epoch has: proportional to size × weight, with the largest remainders rounded up."""
    length, whole = sum(part.size for part in parts), sum(part.size * Fraction(part.weight) for part in parts)
    exact = [length * part.size * Fraction(part.weight) / whole for part in parts]
    counts = [int(share) for share in exact]
    behind = sorted(range(len(parts)), key=lambda i: counts[i] - exact[i])
    for i in behind[: length - sum(counts)]:
        counts[i] += 1
    return counts


def _drawn(size: int, count: int, seed: tuple[int, int], epoch: int, shuffled: bool) -> np.ndarray:
    """The `count` positions out of `size` that `epoch` has, if each epoch continues where the last one ended, pass after
    pass."""
    pieces, begin, end = [], epoch * count, (epoch + 1) * count
    for number in range(begin // size, -(-end // size)):
        order = _permutation(size, *seed, number) if shuffled else np.arange(size)
        taken = order[max(0, begin - number * size) : end - number * size]
        # Sorted, since only the choice of samples is made here; the caller shuffles them within the epoch.
        pieces.append(np.sort(taken))
    return np.concatenate([np.empty(0, np.int64), *pieces])


def epoch_permutation(length: int, seed: int, epoch: int) -> np.ndarray:
    """The order of `length` items in `epoch`: int64 [length], a function of its arguments only.

    Sorted raw PCG64 output: numpy keeps the streams of its bit generators stable over versions, which it does not
    promise for `Generator.permutation`; a resumed run must find the same order.
    """
    return _permutation(length, seed, epoch)


def _permutation(length: int, seed: int, *place: int) -> np.ndarray:
    bits = np.random.PCG64(np.random.SeedSequence([seed % 2**64, *place])).random_raw(length)
    return np.argsort(bits, kind="stable")
