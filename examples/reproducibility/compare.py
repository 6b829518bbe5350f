"""Whether two runs gave the same numbers: every value of every metric but times and memory, bit for bit.

    python examples/reproducibility/compare.py outputs/quickstart/seed-0/runs/first outputs/quickstart/seed-0/runs/second

Exit status 1, and the first step of each metric that differs, where they did not. Steps that only one of them has got to are
left out; a metric that only one of them has is a difference.
"""

import argparse
import math
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.report import Curve, read_run

# What a clock, an allocator or the load of the machine says is of one run alone.
NOT_COMPARED = ("perf/",)


def differences(first: Mapping[str, Curve], second: Mapping[str, Curve]) -> Iterator[str]:
    """A line for every metric that two runs have not in common, or of which they have different values."""
    for tag in sorted(compared(first) | compared(second)):
        one, other = first.get(tag), second.get(tag)
        if one is None or other is None:
            yield f"{tag}: only the {'second' if one is None else 'first'} has it"
            continue
        apart = [step for step in sorted(one.keys() & other.keys()) if bits(one[step]) != bits(other[step])]
        if apart:
            values = f"{one[apart[0]]!r} and {other[apart[0]]!r}"
            yield f"{tag}: {values} at step {apart[0]}, and {len(apart) - 1} more steps differ"


def compared(curves: Mapping[str, Curve]) -> set[str]:
    """The metrics that have to be the same."""
    return {tag for tag in curves if not tag.startswith(NOT_COMPARED)}


def bits(value: float) -> bytes:
    """Equal for equal numbers alone: zeros of both signs differ, and nan is itself."""
    return b"nan" if math.isnan(value) else struct.pack("<d", value)


def main(argv: list[str] | None = None) -> int:
    """0 where the runs are alike, 1 where they are not, 2 where one of them cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path, help="directory of a run, with its event files somewhere in it")
    parser.add_argument("second", type=Path)
    parser.add_argument("--without", nargs="+", default=[], metavar="METRIC", help="metrics that may differ")
    given = parser.parse_args(argv)
    try:
        first, second = (read_run(directory).curves for directory in (given.first, given.second))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for curves in (first, second):
        for tag in given.without:
            curves.pop(tag, None)
    found = list(differences(first, second))
    for line in found:
        print(line)
    common = compared(first) & compared(second)
    values = sum(len(first[tag].keys() & second[tag].keys()) for tag in common)
    if not values:
        print("the runs have no step in common")
        return 1
    print(f"{len(found)} of {len(compared(first) | compared(second))} metrics differ; {values} values were compared")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
