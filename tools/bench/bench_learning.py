"""Held-out accuracy of the toy task over several seeds: with every estimator and mode, and with old answers, corrected or not.

    python tools/bench/bench_learning.py --recipes grpo ppo --seeds 0
    python tools/bench/bench_learning.py --recipes estimators --seeds 0 1 2
    python tools/bench/bench_learning.py --recipes off-policy --seeds 0 1 2 3
    python tools/bench/bench_learning.py --recipes arrangements --seeds 0
    python tools/bench/bench_learning.py --write-docs        # into docs/en/advanced/learning.md

Every run is one of `scripts/quickstart.sh` with the flags of its recipe (`learning_recipes.py`), with real engines and the real
trainer. Runs of a seed share the toy task and the supervised start. A result is a JSON file below DIR/results. Its name has a
hash of the recipe and of the files that its flags name: a run that has a result is not repeated, and results from before a
change of these enter no table.
The docs page keeps the figures that it shows in a file beside itself, so that recipes may run on one machine after another.
The bars: an estimator gains 0.2 within three minutes, including the start of the engines; with answers from four weight
versions ago, a run with a correction ends higher than one without; every arrangement ends as the first does.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slime.utils.filesystem import write_text_atomically
from tools.bench import learning_curves as curves
from tools.bench.learning_recipes import ARRANGEMENTS, ESTIMATORS, OFF_POLICY, RECIPES, names_of
from tools.tied import ROOT, tied

PAGE = ROOT / "docs" / "en" / "advanced" / "learning.md"
KEPT = PAGE.with_name("learning-runs.json")
TABLES = {
    ESTIMATORS: (curves.ESTIMATOR_HEADER, curves.estimator_row),
    OFF_POLICY: (curves.OFF_POLICY_HEADER, curves.off_policy_row),
    ARRANGEMENTS: (curves.ARRANGEMENT_HEADER, curves.arrangement_row),
}
Results = dict[str, list[curves.Run]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--recipes", nargs="+", default=[], metavar="NAME", help="recipes, or studies; none: run nothing"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--dir", type=Path, default=ROOT / "outputs" / "bench-learning")
    parser.add_argument("--write-docs", action="store_true", help="write tables and curves of the results into docs/")
    options = parser.parse_args()
    try:
        names = names_of(options.recipes)
    except ValueError as error:
        parser.error(str(error))
    directory = options.dir.resolve()
    for seed in options.seeds:
        for name in names:
            result_of(name, seed, directory)
    results = read_results(directory)
    for study in TABLES:
        print(f"\n{table_of(study, results)}")
    if options.write_docs:
        write_docs(results)
    return 0


def result_of(name: str, seed: int, directory: Path) -> curves.Run:
    """The result of a recipe with a seed; the recipe is run if there is no result yet."""
    recipe, path = RECIPES[name], result_path(name, seed, directory)
    if path.is_file():
        return curves.load_run(path)
    run_name = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    seconds = quickstart(
        "--seed", str(seed), "--dir", str(directory), "--run", run_name, "--num-rollout", str(recipe.rollouts),
        *recipe.words, "--", *recipe.flags,
    )  # fmt: skip
    found = curves.kept_curves(directory / f"seed-{seed}" / "runs" / run_name)
    run = curves.Run(name, seed, recipe.flags, recipe.rollouts, seconds, found)
    curves.save_run(run, path)
    shown = " ".join(f"{step}:{value:.3f}" for step, value in run.accuracy.items())
    print(f"{name} seed {seed}: {run.before:.3f} -> {run.after:.3f} in {seconds:.0f} s | {shown}", flush=True)
    return run


def result_path(name: str, seed: int, directory: Path) -> Path:
    return directory / "results" / f"{_result_name(name, seed)}.json"


def _result_name(name: str, seed: int | str) -> str:
    return f"{name}-{RECIPES[name].content}-seed-{seed}"


def quickstart(*words: str) -> float:
    """Run the quick start. Returns the seconds between the titles of its steps 4 and 5; ends the program if the run fails."""
    command = tied(["bash", "scripts/quickstart.sh", *words])
    output: list[str] = []
    at = dict.fromkeys(("== 4/5", "== 5/5"), 0.0)
    # The quick start watches its standard input, which stays open until it has ended: this ties it to this process.
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        for line in process.stdout:
            output.append(line)
            at |= {title: time.perf_counter() for title in at if line.startswith(title)}
        status = process.wait()
    if status:
        sys.exit("".join(output)[-5000:])
    return at["== 5/5"] - at["== 4/5"]


def read_results(directory: Path) -> Results:
    """Recipe → the results of its present content, by seed: those that the page keeps, and those in `directory`."""
    known = curves.known_runs(directory / "results", KEPT)
    results: Results = {}
    for name in RECIPES:
        runs = [run for result, run in known.items() if result.startswith(_result_name(name, ""))]
        if runs:
            results[name] = sorted(runs, key=lambda run: run.seed)
    return results


def of_study(study: str, results: Results) -> dict[str, Sequence[curves.Run]]:
    return {RECIPES[name].title: runs for name, runs in results.items() if RECIPES[name].study == study}


def table_of(study: str, results: Results) -> str:
    header, row = TABLES[study]
    return curves.markdown(header, [row(title, runs) for title, runs in of_study(study, results).items()])


def write_docs(results: Results) -> None:
    """Write the tables into the page, and pictures and runs beside it. A study without results stays as it is on the page."""
    page = PAGE.read_text()
    for study in TABLES:
        by_title = of_study(study, results)
        if by_title:
            page = curves.with_table(page, study, table_of(study, results))
            curves.draw(by_title, PAGE.with_name(f"learning-{study}.svg"))
    write_text_atomically(PAGE, page)
    curves.keep_runs({_result_name(name, run.seed): run for name, runs in results.items() for run in runs}, KEPT)


if __name__ == "__main__":
    sys.exit(main())
