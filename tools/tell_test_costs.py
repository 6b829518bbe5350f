"""What a run of the tests cost, by room and by file, from the report that pytest writes of it.

    PYTEST_ADDOPTS=--junitxml=report.xml bash scripts/test.sh
    python tools/tell_test_costs.py report.xml [--files 15]

Seconds are those of the clock that tests took, with their fixtures; the first test of a file pays for what the file shares.
Where two files ran at a time, the run took about half of the sum.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree

# A row: what it is of, its tests, their seconds.
Row = tuple[str, int, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--files", type=int, default=15, help="how many of the dearest files are named")
    options = parser.parse_args()
    try:
        cases = list(cases_of(options.report))
    except (OSError, ElementTree.ParseError) as error:
        parser.error(f"{options.report}: {error}; it has to be what pytest writes with --junitxml")
    print("\n".join([*table("Room", costs((room_of(file), seconds) for file, seconds in cases)), ""]))
    print("\n".join(table("File", costs(cases), options.files)))
    return 0


def cases_of(report: Path) -> Iterator[tuple[str, float]]:
    """Of every test its file, from the repository's root, and its seconds."""
    for case in ElementTree.parse(report).iter("testcase"):
        parts = case.attrib["classname"].split(".")
        # The names of classes follow that of the module.
        module = next((end for end, part in enumerate(parts, 1) if part.startswith("test_")), len(parts))
        yield f"{'/'.join(parts[:module])}.py", float(case.attrib["time"])


def room_of(file: str) -> str:
    """The folder of `tests/` that a file is in, with the next one where `tests/backends/` has one."""
    parts = Path(file).parts
    return "/".join(parts[: 3 if parts[1:2] == ("backends",) else 2]) if len(parts) > 2 else "tests"


def costs(cases: Iterable[tuple[str, float]]) -> list[Row]:
    """Rows by name, the dearest first."""
    counts: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for name, cost in cases:
        counts[name] += 1
        seconds[name] += cost
    return [(name, counts[name], cost) for name, cost in seconds.most_common()]


def table(title: str, rows: list[Row], count: int | None = None) -> list[str]:
    """Lines of Markdown: the first `count` rows, with their shares of all."""
    total = sum(seconds for *_, seconds in rows) or 1.0
    lines = [f"| {title} | Tests | Seconds | Share |", "| --- | ---: | ---: | ---: |"]
    return lines + [
        f"| `{name}` | {tests:,} | {cost:,.0f} | {cost / total:.0%} |" for name, tests, cost in rows[:count]
    ]


if __name__ == "__main__":
    sys.exit(main())
