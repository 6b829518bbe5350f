"""Bin packing and number partitioning: which samples travel together.

Every function is deterministic: equal weights are told apart by position. Bins and partitions are lists of positions in the
given list, each position exactly once. Two families:
- packing under a capacity (`first_fit_pack`, `best_fit_pack`): as few bins as possible; only a single item may exceed it;
- partitioning into k parts (`karmarkar_karp`, `greedy_partition`): the heaviest part as light as possible.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

import numpy as np

Bins = list[list[int]]

# Partitions count as balanced when the heaviest is at most this share above their mean.
_BALANCED_WITHIN = 0.01


def first_fit_pack(lengths: Sequence[int], capacity: int) -> Bins:
    """Items in the given order, each into the first bin that has room; O(n log n).

    A tournament tree holds the largest room of every range of bins, so the first bin with enough is found by descent.
    """
    leaf_count = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [capacity] * (2 * leaf_count)
    bins: Bins = []
    for position, length in enumerate(lengths):
        # An over-long item closes an untouched bin: it finds none by room, and leaves none.
        needed = min(length, capacity)
        node = 1
        while node < leaf_count:
            node *= 2
            if room[node] < needed:
                node += 1
        if node - leaf_count == len(bins):
            bins.append([])
        bins[node - leaf_count].append(position)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def best_fit_pack(lengths: Sequence[int], capacity: int) -> Bins:
    """Longest items first (equal ones by position), each into the fullest bin that has room; O(n log n).

    Equally full bins: the oldest. Members come out in order of position, bins in order of their first member.
    """
    bins: Bins = []
    # (room, bin) ascending: the first entry with room for an item is the fullest bin that can take it.
    open_bins: list[tuple[int, int]] = []
    for position in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        length = lengths[position]
        place = bisect_left(open_bins, (length, -1))
        if place < len(open_bins):
            room, bin_number = open_bins.pop(place)
            bins[bin_number].append(position)
        else:
            room, bin_number = capacity, len(bins)
            bins.append([position])
        if room >= length:
            insort(open_bins, (room - length, bin_number))
    return sorted(sorted(members) for members in bins)


def expand_bins_by_splitting(bins: Iterable[Sequence[int]], lengths: Sequence[int], target_count: int) -> Bins:
    """Split the heaviest bin that has several items in two, until there are `target_count` bins. The input is not modified.

    The longest item goes first, each item to the lighter side. The side of the longest item keeps the place, the other goes to
    the end. Raises ValueError if the bins hold fewer items than `target_count`.
    """
    result = [list(members) for members in bins]
    item_count = sum(len(members) for members in result)
    if item_count < target_count:
        raise ValueError(f"{item_count} items cannot fill {target_count} bins")
    splittable: list[tuple[int, int]] = []

    def offer(place: int) -> None:
        if len(result[place]) > 1:
            heapq.heappush(splittable, (-sum(lengths[item] for item in result[place]), place))

    for place in range(len(result)):
        offer(place)
    while len(result) < target_count:
        _, place = heapq.heappop(splittable)
        result[place], second_half = _split_in_two(result[place], lengths)
        result.append(second_half)
        offer(place)
        offer(len(result) - 1)
    return result


def split_bins_over_capacity(bins: Iterable[Sequence[int]], lengths: Sequence[int], capacity: int) -> Bins:
    """Split, as `expand_bins_by_splitting` does, every bin of several items until it is within `capacity`."""
    result = [list(members) for members in bins]
    place = 0
    while place < len(result):
        while len(result[place]) > 1 and sum(lengths[item] for item in result[place]) > capacity:
            result[place], second_half = _split_in_two(result[place], lengths)
            result.append(second_half)
        place += 1
    return result


def _split_in_two(members: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    sides: tuple[list[int], list[int]] = ([], [])
    weights = [0, 0]
    for item in sorted(members, key=lambda item: (-lengths[item], item)):
        # An empty side counts as lighter than any other: items of length 0 must not leave a side empty.
        lighter = min((0, 1), key=lambda side: (len(sides[side]) > 0, weights[side]))
        sides[lighter].append(item)
        weights[lighter] += lengths[item]
    return sorted(sides[0]), sorted(sides[1])


def karmarkar_karp(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool = False) -> Bins:
    """k parts with sums close together, by the largest differencing method (Karmarkar and Karp, 1982); O(n·k·log k).

    `equal_size`: all parts have the same number of items; the number of items must then be a multiple of k (ValueError).
    Members come out in order of position; some parts are empty if there are fewer items than parts.
    """
    if k_partitions < 1:
        raise ValueError(f"k_partitions must be at least 1, got {k_partitions}")
    chunk = k_partitions if equal_size else 1
    if len(seqlen_list) % chunk:
        raise ValueError(f"{len(seqlen_list)} items cannot be divided equally into {k_partitions} partitions")

    # A part is (-sum, -size, negated positions) and a state is its parts in ascending order of that tuple: heaviest part first.
    # A heap entry is (-spread, heaviest part, state). Negation lets plain tuple order do all comparing.
    ascending = sorted(range(len(seqlen_list)), key=lambda item: (seqlen_list[item], item))
    heap = []
    for start in range(0, len(ascending), chunk):
        parts = [(-seqlen_list[item], -1, (-item,)) for item in ascending[start : start + chunk]]
        parts += [(0, 0, ())] * (k_partitions - len(parts))
        heap.append(_differencing_entry(parts))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [
            (heavy[0] + light[0], heavy[1] + light[1], heavy[2] + light[2])
            for heavy, light in zip(first, reversed(second), strict=True)
        ]
        heapq.heappush(heap, _differencing_entry(merged))
    if not heap:
        return [[] for _ in range(k_partitions)]
    return [sorted(-negated for negated in part[2]) for part in heap[0][2]]


def _differencing_entry(parts: list[tuple]) -> tuple:
    parts = sorted(parts)
    negated_spread = parts[0][0] - parts[-1][0]
    return negated_spread, parts[0], parts


def balance_by_swaps(partitions: Bins, weights: Sequence[int]) -> Bins:
    """Exchange items between the heaviest partition and another while that lowers the heavier of the two.

    Sizes stay as they are. Partitions whose heaviest is within 1 % of the mean come back unchanged. Differencing with
    equal sizes pairs items of similar rank, so it cannot answer a few outliers with many small ones; these swaps can.
    """
    partition_of = np.concatenate([np.full(len(part), number) for number, part in enumerate(partitions)])
    items = np.concatenate([np.asarray(part, dtype=np.int64) for part in partitions])
    weight_of = np.asarray(weights, dtype=np.float64)[items]
    sums = np.bincount(partition_of, weight_of, minlength=len(partitions))
    while sums.max() > (1 + _BALANCED_WITHIN) * sums.mean():
        heaviest = int(sums.argmax())
        candidates = np.flatnonzero(partition_of == heaviest)
        moved = weight_of[candidates, None] - weight_of[None, :]
        heavier_after = np.maximum(sums[heaviest] - moved, sums[partition_of] + moved)
        heavier_after[:, candidates] = np.inf
        row, other = np.unravel_index(heavier_after.argmin(), heavier_after.shape)
        # A smaller gain than this is mere rounding, and swaps for it might never end.
        if heavier_after[row, other] > sums[heaviest] * (1 - 1e-6):
            break
        sums[heaviest] -= moved[row, other]
        sums[partition_of[other]] += moved[row, other]
        partition_of[candidates[row]], partition_of[other] = partition_of[other], heaviest
    return [sorted(items[partition_of == number].tolist()) for number in range(len(partitions))]


def greedy_partition(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool = False) -> Bins:
    """k parts, longest item first, each to the lightest part (equally light: the first); O(n log k).

    `equal_size`: a part that has its share of items takes no more; the number of items must be a multiple of k (ValueError).
    """
    if equal_size and len(seqlen_list) % k_partitions:
        raise ValueError(f"{len(seqlen_list)} items cannot be divided equally into {k_partitions} partitions")
    limit = len(seqlen_list) // k_partitions if equal_size else len(seqlen_list)
    partitions: Bins = [[] for _ in range(k_partitions)]
    lightest = [(0, part) for part in range(k_partitions)]
    for item in sorted(range(len(seqlen_list)), key=lambda item: (-seqlen_list[item], item)):
        weight, part = heapq.heappop(lightest)
        partitions[part].append(item)
        if len(partitions[part]) < limit:
            heapq.heappush(lightest, (weight + seqlen_list[item], part))
    return [sorted(members) for members in partitions]


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool = False) -> Bins:
    """`karmarkar_karp` where every part must get an item: raises ValueError for fewer items than parts."""
    if len(seqlen_list) < k_partitions:
        raise ValueError(f"{len(seqlen_list)} items are too few for {k_partitions} non-empty partitions")
    partitions = karmarkar_karp(seqlen_list, k_partitions, equal_size)
    if all(partitions):
        return partitions
    # Only weights of 0 leave a part empty although there are enough items.
    return greedy_partition([length + 1 for length in seqlen_list], k_partitions, equal_size)


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """The inverse of a permutation: result[idx_map[i]] = i."""
    reverse = [0] * len(idx_map)
    for position, index in enumerate(idx_map):
        reverse[index] = position
    return reverse
