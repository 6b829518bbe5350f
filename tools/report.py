#!/usr/bin/env python3
"""Summarise a run from its TensorBoard event files: accuracy before and after, and a picture of the reward per rollout.

    python tools/report.py outputs/quickstart/seed-0/runs/20260101-120000

The tool reads the files in the run's directory: event files anywhere below it, checkpoint directories (those with a pointer to
their latest iteration), and `train.sh`, if the quick start started the run. If a step has several values, because a resumed run
repeats steps that its predecessor lost, the one written last counts.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.observability.trackers import AXES, steps_noted_beside

REWARD_TAG = "rollout/raw_reward"
CHECKPOINT_POINTER = "latest_checkpointed_iteration.txt"
Curve = dict[int, float]


@dataclass
class RunRecord:
    """The contents of a run's files, with `curves[tag][step]`, and the paths of the files."""

    directory: Path
    curves: dict[str, Curve] = field(default_factory=dict)
    event_directories: list[Path] = field(default_factory=list)
    checkpoints: dict[Path, int] = field(default_factory=dict)

    @property
    def evaluations(self) -> dict[str, Curve]:
        """Evaluation set -> number of rollouts trained before -> mean reward, without details such as `eval/x/response_len`."""
        means = {tag.removeprefix("eval/"): curve for tag, curve in self.curves.items() if tag.startswith("eval/")}
        return {name: curve for name, curve in means.items() if not _is_detail(name)}


def _is_detail(name: str) -> bool:
    details = ("-truncated_ratio", "-pass@", "-unfinished", "-failed_samples")
    return name == "step" or "/" in name or any(detail in name for detail in details)


def read_events(path: Path) -> dict[str, Curve]:
    """All scalars of an event file, or of those directly in a directory, as tag → step → value."""
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator
    from tensorboard.util import tensor_util

    # Newer writers store a scalar as a tensor with one element. 0 keeps every event.
    accumulator = EventAccumulator(str(path), size_guidance={TENSORS: 0, "scalars": 0})
    accumulator.Reload()
    curves: dict[str, Curve] = {}
    for tag in accumulator.Tags()["scalars"]:
        curves[tag] = {event.step: event.value for event in accumulator.Scalars(tag)}
    for tag in accumulator.Tags()["tensors"]:
        values = ((event.step, tensor_util.make_ndarray(event.tensor_proto)) for event in accumulator.Tensors(tag))
        curves.setdefault(tag, {}).update({step: float(value) for step, value in values if value.ndim == 0})
    return curves


def read_run(directory: Path) -> RunRecord:
    """Read the files in `directory`.

    With `--wandb-always-use-train-step` event files count in optimizer steps; the steps of the record are rollouts again. The
    note beside a file says how many steps a rollout is there, or else `args.json`.

    Raises:
        ValueError: no such directory, or no event file in it.
    """
    if not directory.is_dir():
        raise ValueError(f"RUN_DIR {directory}: no such directory")
    event_files = sorted(directory.rglob("events.out.tfevents.*"))
    if not event_files:
        raise ValueError(
            f"RUN_DIR {directory}: no TensorBoard event files in it; did the run get to its first rollout?"
        )
    record = RunRecord(directory)
    record.event_directories = list(dict.fromkeys(path.parent for path in event_files))
    arguments = read_arguments(directory)[1]
    factor = arguments["num_steps_per_rollout"] if arguments.get("wandb_always_use_train_step") else 1
    for path in event_files:
        noted = steps_noted_beside(path) or {}
        for tag, curve in read_events(path).items():
            axis = AXES.get(tag.partition("/")[0], "rollout/step")
            if axis != "train/step":
                steps = noted.get(axis, factor)
                curve = {step // steps: value for step, value in curve.items()}
            record.curves.setdefault(tag, {}).update(curve)
    for pointer in sorted(directory.rglob(CHECKPOINT_POINTER)):
        record.checkpoints[pointer.parent] = int(pointer.read_text())
    return record


def read_arguments(directory: Path) -> tuple[Path | None, dict[str, Any]]:
    """Returns (path of the run's `args.json`, its values), or (None, {}) if there is none. An evaluation of the run's
    checkpoints may have written another such file beside its own event files."""
    records = sorted(
        directory.rglob("args.json"), key=lambda path: ((path.parent / CHECKPOINT_POINTER).is_file(), path)
    )
    if not records:
        return None, {}
    arguments = json.loads(records[-1].read_text())["arguments"]
    return records[-1], {name: entry["value"] for name, entry in arguments.items()}


def draw(record: RunRecord, path: Path) -> None:
    """Draw the reward per rollout, and the evaluations beside it, into the PNG file `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    reward = sorted(record.curves.get(REWARD_TAG, {}).items())
    if reward:
        axes.plot(*zip(*reward, strict=True), marker=".", label="reward per rollout (training prompts)")
    for name, curve in sorted(record.evaluations.items()):
        points = sorted(curve.items())
        axes.plot(*zip(*points, strict=True), marker="o", linestyle="--", label=f"evaluation: {name}")
    axes.set(xlabel="rollouts trained", ylabel="mean reward", title=record.directory.name)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def first_and_last(curve: Curve, name: Callable[[int], str]) -> str:
    """`0.41 → 0.93 (first name to last name)`, or only one value if the curve has one. `name(step)` names a step."""
    first, last = min(curve), max(curve)
    if first == last:
        return f"{curve[first]:.3f} ({name(first)})"
    return f"{curve[first]:.3f} → {curve[last]:.3f} ({name(first)} to {name(last)})"


def name_evaluation(rollouts_before: int) -> str:
    """The name of an evaluation, whose step is the number of rollouts that were trained before it."""
    return f"after rollout {rollouts_before - 1}" if rollouts_before else "before rollout 0"


def summary(record: RunRecord, picture: Path) -> str:
    """The report as text."""
    lines = [f"Report of {record.directory}", ""]
    for name, curve in sorted(record.evaluations.items()):
        lines.append(f"  accuracy on {name}, before → after: {first_and_last(curve, name_evaluation)}")
    if REWARD_TAG in record.curves:
        reward = first_and_last(record.curves[REWARD_TAG], lambda rollout_id: f"rollout {rollout_id}")
        lines.append(f"  reward per rollout, first → last: {reward}")
    lines.append(f"  picture: {picture}")
    lines += [f"  TensorBoard event files: {directory}" for directory in record.event_directories]
    lines += [f"  checkpoint: {path} (rollout {iteration})" for path, iteration in record.checkpoints.items()]
    lines += ["", "Next:", *(f"  {command}" for command in next_commands(record))]
    return "\n".join(lines)


def next_commands(record: RunRecord) -> list[str]:
    """Commands that the user may want to run next."""
    commands = [f"{Path(sys.executable).parent / 'tensorboard'} --logdir {record.directory}    # all metrics as curves"]
    script = record.directory / "train.sh"
    if script.is_file():
        rollouts = max(record.curves.get(REWARD_TAG, {0: 0.0})) + 1
        commands += [
            f"bash {script} --num-rollout {rollouts + 10}    # 10 more rollouts from the checkpoint",
            f"bash {script} --num-rollout {rollouts + 10} --dump-details {record.directory}/details"
            "    # the same, keeping every sample",
        ]
    return commands


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Summarise a run from its TensorBoard event files and draw its reward curve.", allow_abbrev=False
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="directory that the run wrote")
    parser.add_argument("--png", type=Path, default=None, help="picture to write (default: RUN_DIR/reward.png)")
    arguments = parser.parse_args(argv)
    picture = arguments.png or arguments.run_dir / "reward.png"
    try:
        record = read_run(arguments.run_dir)
    except ValueError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    draw(record, picture)
    print(summary(record, picture))
    return 0


if __name__ == "__main__":
    sys.exit(main())
