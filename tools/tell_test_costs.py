"""The cost of a run of the tests, by folder and by file, from pytest's report.

    PYTEST_ADDOPTS=--junitxml=report.xml bash scripts/test.sh
    python tools/tell_test_costs.py report.xml [--files 15]

Seconds are wall-clock seconds of tests with their fixtures. The first test of a file pays for fixtures that the file shares.
If two files ran at a time, the run took about half of the sum.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree

# (name of a folder or file, number of its tests, their seconds)
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
    """Yields (file relative to the repository's root, seconds) for every test."""
    for case in ElementTree.parse(report).iter("testcase"):
        parts = case.attrib["classname"].split(".")
        # Names of test classes follow the name of the module.
        module = next((end for end, part in enumerate(parts, 1) if part.startswith("test_")), len(parts))
        yield f"{'/'.join(parts[:module])}.py", float(case.attrib["time"])


def room_of(file: str) -> str:
    """The folder of a file in `tests/`; in `tests/backends/` also the next folder."""
    parts = Path(file).parts
    return "/".join(parts[: 3 if parts[1:2] == ("backends",) else 2]) if len(parts) > 2 else "tests"


def costs(cases: Iterable[tuple[str, float]]) -> list[Row]:
    """A row per name, the most expensive first."""
    counts: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for name, cost in cases:
        counts[name] += 1
        seconds[name] += cost
    return [(name, counts[name], cost) for name, cost in seconds.most_common()]


def table(title: str, rows: list[Row], count: int | None = None) -> list[str]:
    """Lines of Markdown: the first `count` rows, with their shares of the whole cost."""
    total = sum(seconds for *_, seconds in rows) or 1.0
    lines = [f"| {title} | Tests | Seconds | Share |", "| --- | ---: | ---: | ---: |"]
    return lines + [
        f"| `{name}` | {tests:,} | {cost:,.0f} | {cost / total:.0%} |" for name, tests, cost in rows[:count]
    ]


if __name__ == "__main__":
    sys.exit(main())
