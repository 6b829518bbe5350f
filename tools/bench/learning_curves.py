"""The results of runs of the toy task: reads them from event files, keeps them as JSON, shows them as tables and pictures."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slime.utils.filesystem import write_text_atomically
from tools.report import read_run

ACCURACY = "eval/held_out"
# The metrics that are kept of a run, as far as it has them.
KEPT = (
    ACCURACY, "rollout/raw_reward", "rollout/staleness", "rollout/values", "train/grad_norm", "train/kl_loss",
    "train/entropy_loss", "train/ppo_kl", "train/pg_clipfrac", "train/train_rollout_logprob_abs_diff", "train/ois",
    "train/tis", "train/tis_clipfrac", "train/tis_abs", "train/critic-value_loss",
)  # fmt: skip
# The metrics that tables and pictures show, and that a docs page keeps in a file beside itself.
SHOWN = (ACCURACY, "rollout/staleness")
GAIN, BUDGET_SECONDS = 0.2, 180
BEGIN, END = "<!-- {} table: begin -->", "<!-- {} table: end -->"

Curve = dict[int, float]


@dataclass(frozen=True)
class Run:
    """One finished run.

    seconds: the time of the whole reinforcement phase, including the start of Ray and engines.
    curves: metric → rollout → value. The key of an evaluation is the number of rollouts that were trained before it.
    """

    recipe: str
    seed: int
    flags: tuple[str, ...]
    rollouts: int
    seconds: float
    curves: dict[str, Curve]

    @property
    def accuracy(self) -> Curve:
        return self.curves[ACCURACY]

    @property
    def before(self) -> float:
        return self.accuracy[min(self.accuracy)]

    @property
    def after(self) -> float:
        return self.accuracy[max(self.accuracy)]

    @property
    def gain(self) -> float:
        return self.after - self.before

    @property
    def mean_accuracy(self) -> float:
        """The mean over the evaluations after the start: high for a run that learns early and keeps what it learned."""
        first = min(self.accuracy)
        return statistics.fmean(value for step, value in self.accuracy.items() if step != first)

    @property
    def staleness(self) -> float | None:
        """Weight versions between the policy that answered and the one that trained, in the last rollout."""
        curve = self.curves.get("rollout/staleness")
        return curve[max(curve)] if curve else None


def kept_curves(run_directory: Path) -> dict[str, Curve]:
    """The curves of `KEPT` from the event files below `run_directory`.

    Raises:
        ValueError: there is no event file, or no evaluation in them.
    """
    found = read_run(run_directory).curves
    if ACCURACY not in found:
        raise ValueError(f"{run_directory}: no {ACCURACY} in its event files")
    return {name: dict(sorted(found[name].items())) for name in KEPT if name in found}


def save_run(run: Run, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, json.dumps(asdict(run), indent=1) + "\n")


def load_run(path: Path) -> Run:
    return _run_of(json.loads(path.read_text()))


def known_runs(results: Path, kept: Path) -> dict[str, Run]:
    """Runs by name: those that a page keeps in the file `kept`, which may be missing, and those of this machine, which win.

    Args:
        results: the directory with a JSON file for each run of this machine, named after the run.
    """
    of_the_page = json.loads(kept.read_text()) if kept.is_file() else {}
    runs = {name: _run_of(values) for name, values in of_the_page.items()}
    return runs | {path.stem: load_run(path) for path in sorted(results.glob("*.json"))}


def keep_runs(runs: dict[str, Run], kept: Path) -> None:
    """Write what the page shows of `runs` into the file `kept`, one line per run, so that other machines can add theirs."""
    lines = []
    for name, run in sorted(runs.items()):
        shown = replace(run, curves={metric: run.curves[metric] for metric in SHOWN if metric in run.curves})
        lines.append(f"{json.dumps(name)}: {json.dumps(asdict(shown))}")
    write_text_atomically(kept, "{\n" + ",\n".join(lines) + "\n}\n")


def _run_of(values: dict[str, Any]) -> Run:
    curves = {name: {int(step): value for step, value in curve.items()} for name, curve in values["curves"].items()}
    return Run(**{**values, "flags": tuple(values["flags"]), "curves": curves})


def estimator_row(title: str, runs: Sequence[Run]) -> list[str]:
    """A row of the table of estimators: means over seeds, and the worst seed for a bar that all seeds must pass."""
    met = all(run.gain >= GAIN for run in runs) and all(run.seconds <= BUDGET_SECONDS for run in runs)
    return [
        title,
        str(len(runs)),
        str(max(run.rollouts for run in runs)),
        mean_and_spread([run.before for run in runs]),
        mean_and_spread([run.after for run in runs]),
        f"{min(run.gain for run in runs):+.3f}",
        "met" if met else "missed",
    ]


ESTIMATOR_HEADER = ("Estimator", "Seeds", "Rollouts", "Before", "After", "Smallest gain", f"+{GAIN} in 3 minutes")


def off_policy_row(title: str, runs: Sequence[Run]) -> list[str]:
    """A row of the table of corrections."""
    staleness = {run.staleness for run in runs}
    return [
        title,
        str(len(runs)),
        ", ".join("?" if value is None else f"{value:.0f}" for value in sorted(staleness, key=str)),
        mean_and_spread([run.mean_accuracy for run in runs]),
        mean_and_spread([run.after for run in runs]),
        f"{min(run.after for run in runs):.3f}",
    ]


OFF_POLICY_HEADER = (
    "Correction",
    "Seeds",
    "Versions behind",
    "Mean accuracy of the run",
    "Accuracy after",
    "Worst seed",
)


def arrangement_row(title: str, runs: Sequence[Run]) -> list[str]:
    """A row of the table of arrangements."""
    return [
        title,
        str(len(runs)),
        mean_and_spread([run.before for run in runs]),
        mean_and_spread([run.after for run in runs]),
    ]


ARRANGEMENT_HEADER = ("Arrangement", "Seeds", "Before", "After")


def mean_and_spread(values: Sequence[float]) -> str:
    """`0.912 ± 0.014`: mean and standard deviation over seeds; the mean alone for one."""
    mean = f"{statistics.fmean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.3f}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def with_table(page: str, name: str, table: str) -> str:
    """The page with `table` between the two marks of `name`.

    Raises:
        ValueError: the page has no such marks.
    """
    begin, end = BEGIN.format(name), END.format(name)
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page must hold {begin} and {end} once each")
    before, rest = page.split(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def mean_curve(runs: Sequence[Run]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Rollouts at which every seed was evaluated, and there the mean, lowest and highest accuracy."""
    steps = sorted(set.intersection(*(set(run.accuracy) for run in runs)))
    at = [[run.accuracy[step] for run in runs] for step in steps]
    return steps, [statistics.fmean(values) for values in at], [min(v) for v in at], [max(v) for v in at]


def draw(curves: dict[str, Sequence[Run]], path: Path) -> None:
    """An SVG with one line (mean) and one band (range over seeds) for every title; the same bytes for the same runs."""
    import matplotlib

    matplotlib.use("Agg")
    # Text stays text: a smaller file, and readable differences between versions.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "learning", "font.family": "sans-serif"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.2), layout="constrained")
    for number, (title, runs) in enumerate(curves.items()):
        steps, mean, low, high = mean_curve(runs)
        color = f"C{number}"
        axes.plot(steps, mean, color=color, marker="osD^vPX"[number % 7], markersize=4, label=title)
        axes.fill_between(steps, low, high, color=color, alpha=0.08, linewidth=0)
    axes.set(xlabel="trained rollouts", ylabel="held-out accuracy", ylim=(0, 1))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    figure.patch.set_facecolor("white")
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
