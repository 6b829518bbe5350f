"""Held-out accuracy of every example while it learns its toy task with the command of its README.

    python tools/bench/bench_examples.py --examples calculator search-r1
    python tools/bench/bench_examples.py --write-docs        # into docs/en/advanced/examples.md

A run is `scripts/quickstart.sh --example NAME`, evaluated every five rollouts, with real engines and the real trainer. A result
is a JSON file below outputs/bench-examples; an example that has one is not run again. The docs page keeps the results that it
shows in a file beside itself, so that examples may run on one machine after another.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from slime.utils.filesystem import write_text_atomically  # noqa: E402
from tools.bench import learning_curves as curves  # noqa: E402
from tools.bench.bench_learning import quickstart  # noqa: E402

PAGE = ROOT / "docs" / "en" / "advanced" / "examples.md"
PICTURE, KEPT = PAGE.with_name("learning-examples.svg"), PAGE.with_name("learning-examples.json")
RESULTS = ROOT / "outputs" / "bench-examples"
EXAMPLES = tuple(sorted(path.parent.name for path in (ROOT / "examples").glob("*/quickstart.sh")))
SEED = 0
FLAGS = ("--eval-interval", "5")
HEADER = ("Example", "Before", "After", "Seconds")


def result_of(name: str) -> curves.Run:
    """The result of an example, which is run if there is none yet."""
    path = RESULTS / f"{name}.json"
    if path.is_file():
        return curves.load_run(path)
    seconds = quickstart("--example", name, "--run", "curve", "--", *FLAGS)
    found = curves.kept_curves(ROOT / "outputs" / name / f"seed-{SEED}" / "runs" / "curve")
    run = curves.Run(name, SEED, FLAGS, max(found[curves.ACCURACY]), seconds, found)
    curves.save_run(run, path)
    return run


def row(run: curves.Run) -> list[str]:
    return [f"`{run.recipe}`", f"{run.before:.3f}", f"{run.after:.3f}", f"{run.seconds:.0f}"]


def write_docs(runs: dict[str, curves.Run]) -> None:
    """Write the table of `runs`, by example, into the page, and the picture and the runs beside the page."""
    runs = dict(sorted(runs.items()))
    table = curves.markdown(HEADER, [row(run) for run in runs.values()])
    write_text_atomically(PAGE, curves.with_table(PAGE.read_text(), "examples", table))
    curves.draw({name: [run] for name, run in runs.items()}, PICTURE)
    curves.keep_runs(runs, KEPT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", nargs="+", default=[], choices=EXAMPLES, metavar="NAME")
    parser.add_argument("--write-docs", action="store_true", help="write table and picture of all runs into docs/")
    options = parser.parse_args()
    for name in options.examples:
        print(curves.markdown(HEADER, [row(result_of(name))]), flush=True)
    if options.write_docs:
        write_docs(curves.known_runs(RESULTS, KEPT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
