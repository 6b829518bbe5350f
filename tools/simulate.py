#!/usr/bin/env python3
"""Simulate ways to run on N devices from measured phase times, and say which is fastest and why: a table and a picture.

    python tools/simulate.py --from-run outputs/quickstart/seed-0/runs/20260101-120000 --devices 3..64
    python tools/simulate.py --phases phases.json --lengths lognormal:2000,1.0,32768 --devices 64..4096 --picture plan.png

The arrangements are the synchronous loop on shared devices and on separate devices, partial rollouts, the asynchronous loop,
and the asynchronous loop with weights swapped under running requests. By default each gets the division of the devices between
trainer and engines, in eighths, that suits it best. docs/en/advanced/plan-at-scale.md says what the model leaves out.
"""

import argparse
import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from slime.arguments.rules.algorithm import unavoidable_staleness
from tools.simulation.arrangements import (
    ARRANGEMENTS,
    Arrangement,
    Replay,
    Speeds,
    Work,
    best_replay,
    splits,
)
from tools.simulation.measured import Measured, lengths_of_dump, measured

_MOST_DEVICES = 4096
_LOST = ("stragglers", "samples", "trainer", "push", "other")
# The names of phases in the sentence of `verdict`.
_NAMES = {
    "stragglers": "stragglers",
    "samples": "a trainer that waits for samples",
    "trainer": "engines that wait for the trainer",
    "push": "pushes",
    "other": "what is neither generation nor training",
}
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Work)}
# Rates whose relative difference is smaller than this are called equal.
_EQUAL = 0.02

Draw = Callable[[np.random.Generator, int, int], np.ndarray]


def read_phases(path: Path) -> dict[str, float]:
    """The times and sizes in a JSON file, by the names of `Speeds`.

    Raises:
        ValueError: the file cannot be read, or an entry is not a field of `Speeds`.
    """
    known = {field.name: field for field in dataclasses.fields(Speeds)}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--phases {path}: {error}; expected a JSON object of seconds by name") from None
    if not isinstance(values, dict):
        raise ValueError(f"--phases {path}: expected a JSON object of seconds by name, not {type(values).__name__}")
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"--phases {path}: '{name}' is no phase; known are {', '.join(known)}")
        whole = not name.endswith("_seconds")
        is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not is_number or not whole <= value < math.inf:
            kind = "a whole number, at least 1" if whole else "a number of seconds, 0 or more"
            raise ValueError(f"--phases {path}: '{name}' is {json.dumps(value)}; expected {kind}")
    return values


def speeds_from(phases: dict[str, float], path: Path | None, found: Measured | None) -> Speeds:
    """The speeds of the measured runs, in which entries of the file replace measured ones.

    Raises:
        ValueError: a phase is missing, or decoding or training takes no time.
    """
    values = {**({} if found is None else dataclasses.asdict(found.speeds)), **phases}
    required = [field.name for field in dataclasses.fields(Speeds) if field.default is dataclasses.MISSING]
    missing = [name for name in required if name not in values]
    if missing:
        raise ValueError(
            f"--phases {path}: no {', '.join(missing)}; add them, or give a --from-run, which measures them"
        )
    speeds = Speeds(**values)
    if speeds.decode_step_seconds + speeds.decode_request_seconds <= 0:
        raise ValueError("--phases: decode_step_seconds and decode_request_seconds are both 0; one must be above")
    return speeds


def read_lengths(text: str) -> Draw:
    """Parse `--lengths`: `lognormal:MEDIAN,SIGMA,MAX`, one number, or a file.

    Raises:
        ValueError: it is none of these.
    """
    drawn = re.fullmatch(r"lognormal:([^,]+),([^,]+),([^,]+)", text)
    try:
        if drawn:
            return log_normal(*map(float, drawn.groups()))
        if re.fullmatch(r"\d+", text):
            if int(text) < 1:
                raise ValueError("expected 1 token or more")
            return resample(np.asarray([[int(text)]]))
    except ValueError as error:
        raise ValueError(f"--lengths {text}: {error}") from None
    path = Path(text)
    if not path.is_file():
        raise ValueError(
            f"--lengths {text}: no such file; give a file, one number of tokens, or lognormal:MEDIAN,SIGMA,MAX"
        )
    if path.suffix == ".pt":
        return resample(lengths_of_dump(path))
    try:
        values = [int(word) for word in path.read_text(encoding="utf-8").split()]
    except ValueError as error:
        raise ValueError(f"--lengths {path}: {error}; expected one number of tokens per line") from None
    if not values or min(values) < 1:
        raise ValueError(f"--lengths {path}: expected one number of tokens per line, at least 1 each")
    return resample(np.asarray(values)[:, None])


def log_normal(median: float, sigma: float, longest: float) -> Draw:
    """Draw lengths whose logarithm is normal around that of the median, cut off at the longest.

    Raises:
        ValueError: the numbers are out of range.
    """
    if not (1 <= median <= longest < math.inf and 0 <= sigma < math.inf):
        raise ValueError("expected 1 ≤ MEDIAN ≤ MAX, and SIGMA of 0 or more")

    def draw(generator: np.random.Generator, prompts: int, answers: int) -> np.ndarray:
        lengths = median * np.exp(sigma * generator.standard_normal((prompts, answers)))
        return np.clip(np.round(lengths), 1, longest).astype(int)

    return draw


def resample(lengths: np.ndarray) -> Draw:
    """Draw from lengths [prompts, answers]: whole prompts if each has as many answers as wanted, otherwise single answers."""

    def draw(generator: np.random.Generator, prompts: int, answers: int) -> np.ndarray:
        if lengths.shape[1] == answers:
            return lengths[generator.integers(0, len(lengths), prompts)]
        return generator.choice(lengths.ravel(), (prompts, answers))

    return draw


def read_devices(text: str) -> list[int]:
    """Parse `--devices`: `64`, `8,24,64`, or `8..4096`, which doubles from the first to the last.

    Raises:
        ValueError: it is none of these.
    """
    doubling = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if doubling:
        first, last = map(int, doubling.groups())
        found = [first << power for power in range(32) if 0 < first << power < last] + [last]
        if not 0 < first <= last:
            found = []
    else:
        found = [int(word) for word in text.split(",")] if re.fullmatch(r"\d+(,\d+)*", text) else []
    if not found or min(found) < 1 or max(found) > _MOST_DEVICES:
        raise ValueError(f"--devices {text}: expected 64, 8,24,64 or 8..4096, of 1 to {_MOST_DEVICES} devices")
    return found


def table(replays: Sequence[Replay]) -> str:
    """The table as text, with one line per arrangement."""
    header = ["", "trainer", "engines", "step s", "steps/h", "tokens/s", "busy: trainer", "engines"]
    header += ["stale: mean", "max", "lost: stragglers", *_LOST[1:], "wasted"]
    rows = [header]
    for found in replays:
        shares = [found.trainer_busy, found.engines_busy]
        lost = [found.lost[name] for name in _LOST] + [found.wasted_share]
        rows.append(
            [
                found.arrangement.name,
                str(found.split.trainer_devices),
                f"{found.split.engines} x {found.speeds.engine_devices}",
                _significant(found.step_seconds),
                _significant(found.steps_per_hour),
                _significant(found.tokens_per_second),
                *(f"{share:.0%}" for share in shares),
                f"{np.mean(found.staleness):.2f}",
                str(max(found.staleness)),
                *(f"{share:.0%}" for share in lost),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def verdict(replays: Sequence[Replay]) -> str:
    """A sentence that says which arrangement is fastest, why it is faster than the synchronous loop (or than the second one, if
    it is that loop itself), and what it still loses."""
    best, *others = sorted(replays, key=lambda found: -found.steps_per_hour)
    lost = max(best.lost, key=best.lost.__getitem__)
    still = f"what it loses most to is {_NAMES[lost]}, {best.lost[lost]:.0%} of all device time"
    age = max(best.staleness)
    policy = f"its samples are up to {age} weight version{'s' * (age > 1)} old" if age else "it is on policy"
    if not others:
        return f"{best.arrangement.name}: {policy}; {still}"
    equals = [each.arrangement.name for each in others if best.steps_per_hour / each.steps_per_hour < 1 + _EQUAL]
    equal = f" ({', '.join(equals)} within {_EQUAL:.0%})" if equals else ""
    other = next((each for each in others if each.arrangement.name == "sync"), others[0])
    ratio = f"{best.steps_per_hour / other.steps_per_hour:.2f} times {other.arrangement.name}"
    return f"{best.arrangement.name} is fastest{equal}, {ratio}: {_reason(best, other)}; {policy}; {still}"


def _reason(best: Replay, other: Replay) -> str:
    generation, before = (f"{np.mean(each.rollout_seconds):,.3g} s" for each in (best, other))
    training, training_before = (f"{each.training_seconds:,.3g} s" for each in (best, other))
    if best.arrangement.resumes:
        return f"a rollout takes {generation}, not {before}, as the longest answers go on in the next one"
    if best.arrangement.ahead:
        pushes = ", and a push waits for no rollout" if best.arrangement.in_flight else ""
        return f"the {training} of training go on beside the {generation} of a rollout{pushes}"
    return f"a rollout takes {generation} and training {training}, not {before} and {training_before}"


def _significant(value: float) -> str:
    """The number with three significant digits."""
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:,.{min(digits, 6)}f}"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Replay arrangements of trainer and engines on N devices from measured phase times, and say which is "
        "fastest and why.",
        allow_abbrev=False,
    )
    source = parser.add_argument_group("what was measured")
    source.add_argument(
        "--from-run",
        metavar="DIR",
        type=Path,
        action="append",
        default=[],
        help="directory of a finished run (event files and args.json); repeat it for runs of other batch sizes",
    )
    source.add_argument("--phases", metavar="FILE", type=Path, help="JSON of phase times; wins over what runs measured")
    source.add_argument(
        "--max-running-requests",
        metavar="N",
        type=int,
        help="of an engine, where --from-run is of a run "
        "without --sglang-max-running-requests (default: as many as it may be sent; without a GPU engines run 64)",
    )
    source.add_argument("--save-phases", metavar="FILE", type=Path, help="write the phase times that are used")
    source.add_argument(
        "--lengths",
        metavar="SPEC",
        help="tokens of answers: a dump of --save-debug-rollout-data, a text "
        "file with a number per line, one number, or lognormal:MEDIAN,SIGMA,MAX (default: those of the runs)",
    )
    work = parser.add_argument_group("the run, by the names of its flags (defaults: those of the run that was read)")
    work.add_argument("--rollout-batch-size", metavar="N", type=int)
    work.add_argument("--n-samples-per-prompt", metavar="N", type=int)
    work.add_argument("--prompt-tokens", metavar="N", type=int, help="mean tokens of a prompt")
    work.add_argument(
        "--over-sampling-batch-size",
        metavar="N",
        type=int,
        help="of partial rollouts (default: half as many again as --rollout-batch-size)",
    )
    work.add_argument("--async-buffer-size", metavar="N", type=int, help="without a run 1")
    work.add_argument("--update-weights-interval", metavar="N", type=int, help="without a run 1")
    work.add_argument("--max-weight-staleness", metavar="N", type=int, help="without a run any")
    replayed = parser.add_argument_group("the replay")
    replayed.add_argument("--devices", metavar="N", default="8", help="64, 8,24,64 or 8..4096 (default 8)")
    replayed.add_argument(
        "--trainer-devices",
        metavar="N",
        type=int,
        help="of arrangements apart (default: the eighths that suit each best)",
    )
    replayed.add_argument(
        "--arrangements",
        metavar="NAME",
        nargs="+",
        choices=[each.name for each in ARRANGEMENTS],
        default=[each.name for each in ARRANGEMENTS],
        help="default: all (%(choices)s)",
    )
    replayed.add_argument("--rollouts", metavar="N", type=int, default=12, help="rollouts to replay (default 12)")
    replayed.add_argument(
        "--warm-up", metavar="N", type=int, default=4, help="rollouts that are not counted (default 4)"
    )
    replayed.add_argument("--seed", type=int, default=0)
    replayed.add_argument(
        "--picture", metavar="FILE", type=Path, help="draw the first steps on the most devices, as PNG or SVG"
    )
    return parser  # fmt: skip


def work_from(arguments: argparse.Namespace, found: Measured | None) -> Work:
    """The work of the run: batch sizes, lengths and limits.

    Raises:
        ValueError: a value is missing or out of range; the message names the flag.
    """
    shape = None if found is None else found.shape
    values: dict[str, Any] = {"prompt_tokens": 0 if found is None else found.prompt_tokens}
    for name in ("rollout_batch_size", "n_samples_per_prompt"):
        values[name] = None if shape is None else getattr(shape, name)
    for name in values:
        typed = vars(arguments)[name]
        values[name] = values[name] if typed is None else typed
        flag = "--" + name.replace("_", "-")
        if values[name] is None:
            raise ValueError(f"{flag} is missing: give it, or a --from-run, which has it")
        if values[name] < (name != "prompt_tokens"):
            raise ValueError(f"{flag} {values[name]}: must be at least {int(name != 'prompt_tokens')}")
    for name, least in (("async_buffer_size", 1), ("update_weights_interval", 1), ("max_weight_staleness", 0)):
        of_run = _DEFAULTS[name] if shape is None else getattr(shape, name)
        values[name] = of_run if vars(arguments)[name] is None else vars(arguments)[name]
        if values[name] is not None and values[name] < least:
            raise ValueError(f"--{name.replace('_', '-')} {values[name]}: must be at least {least}")
    if arguments.lengths is None and found is None:
        raise ValueError("--lengths is missing: give it, or a --from-run, which has them")
    draw = resample(found.lengths) if arguments.lengths is None else read_lengths(arguments.lengths)
    batch, answers = values["rollout_batch_size"], values.pop("n_samples_per_prompt")
    over_sampling = arguments.over_sampling_batch_size
    if over_sampling is not None and over_sampling < batch:
        raise ValueError(f"--over-sampling-batch-size {over_sampling}: must be at least --rollout-batch-size {batch}")
    work = Work(
        draw=lambda generator, prompts: draw(generator, prompts, answers),
        over_sampling_batch_size=math.ceil(1.5 * batch) if over_sampling is None else over_sampling,
        **values,
    )
    ahead = any(each.ahead for each in ARRANGEMENTS if each.name in arguments.arrangements)
    least = unavoidable_staleness(argparse.Namespace(**vars(work), asynchronous=ahead))
    if work.max_weight_staleness is not None and work.max_weight_staleness < least:
        raise ValueError(
            f"--max-weight-staleness {work.max_weight_staleness}: with --async-buffer-size {work.async_buffer_size} and "
            f"--update-weights-interval {work.update_weights_interval} samples are up to {least} versions old; give at least "
            f"{least}, a smaller buffer, or --arrangements without rollouts ahead"
        )
    return work


def replays_on(
    devices: int, chosen: Sequence[Arrangement], speeds: Speeds, work: Work, arguments: argparse.Namespace
) -> list[Replay]:
    """A replay of every arrangement for which the devices are enough.

    Raises:
        ValueError: the devices are enough for none.
    """
    candidates = {each: splits(devices, each, speeds, arguments.trainer_devices) for each in chosen}
    if not any(candidates.values()):
        least = speeds.replica_devices + speeds.engine_devices
        apart = f"of {arguments.trainer_devices} devices (--trainer-devices)" if arguments.trainer_devices else (
            f"of {speeds.replica_devices} devices (replica_devices)"
        )  # fmt: skip
        raise ValueError(
            f"--devices {devices}: no room for a trainer {apart} and an engine of {speeds.engine_devices} "
            f"(engine_devices); give at least {least}"
        )
    return [
        best_replay(
            each, found, speeds, work, seed=arguments.seed, rollouts=arguments.rollouts, warm_up=arguments.warm_up
        )
        for each, found in candidates.items()
        if found
    ]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    try:
        running = arguments.max_running_requests
        if running is not None and running < 1:
            raise ValueError(f"--max-running-requests {running}: must be at least 1")
        found = measured(arguments.from_run, max_running_requests=running) if arguments.from_run else None
        if found is None and arguments.phases is None:
            raise ValueError("nothing was measured: give --from-run DIR or --phases FILE")
        phases = {} if arguments.phases is None else read_phases(arguments.phases)
        speeds = speeds_from(phases, arguments.phases, found)
        work = work_from(arguments, found)
        if not 0 <= arguments.warm_up < arguments.rollouts:
            raise ValueError(
                f"--warm-up {arguments.warm_up}: must be 0 or more, and below --rollouts {arguments.rollouts}"
            )
        if arguments.trainer_devices is not None and arguments.trainer_devices < speeds.replica_devices:
            raise ValueError(f"--trainer-devices {arguments.trainer_devices}: a replica has {speeds.replica_devices}")
        chosen = [each for each in ARRANGEMENTS if each.name in arguments.arrangements]
        if found is not None:
            print(
                f"measured: {len(found.steps)} steps, which the fitted times meet within {found.error:.0%} on average"
            )
        if arguments.save_phases is not None:
            arguments.save_phases.write_text(json.dumps(dataclasses.asdict(speeds), indent=1) + "\n")
        for devices in read_devices(arguments.devices):
            replays = replays_on(devices, chosen, speeds, work, arguments)
            print(f"\n{devices} devices\n{table(replays)}\n{verdict(replays)}", flush=True)
        if arguments.picture is not None:
            from tools.simulation.picture import draw

            draw(replays, arguments.picture, f"{devices} devices")
            print(f"\npicture: {arguments.picture}")
    except (OSError, ValueError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
