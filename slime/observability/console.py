"""What a run shows on the console: one line per rollout, a progress bar, and how long the stages of the start took.

A generation loop announces a task at the `Progress` of its call and advances it. The driver asks the rollout manager for a
snapshot and draws the bar, because only the driver has a terminal that somebody sees.
"""

import os
import sys
import threading
import time
from typing import Any

from tqdm import tqdm

from slime.utils.finite_number import as_float
from slime.utils.misc import SingletonMeta


class GenerationBar:
    """Draws progress snapshots of the rollout manager as a bar on a terminal; draws nothing elsewhere, since a bar would fill
    logs with lines."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None

    def show(self, snapshot: tuple[str, int, int] | None) -> None:
        """Redraw for (description, done, total); None leaves the bar as it is."""
        if snapshot is None or not sys.stderr.isatty():
            return
        description, done, total = snapshot
        if self._bar is None or self._bar.desc.rstrip(": ") != description:
            self.close()
            self._bar = tqdm(total=total, desc=description, unit="sample", leave=False, dynamic_ncols=True)
        self._bar.total = total
        self._bar.n = done
        self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


# (metric, label, format), in the order of the line; metrics that a run does not have are left out.
_COLUMNS = (
    ("rollout/raw_reward", "reward", "{:.3f}"),
    ("rollout/response_len/mean", "length", "{:.1f}"),
    ("train/loss", "loss", "{:.4f}"),
    ("train/critic-value_loss", "value_loss", "{:.4f}"),
    ("train/kl_loss", "kl", "{:.4f}"),
    ("train/grad_norm", "grad_norm", "{:.3f}"),
    ("train/train_rollout_logprob_abs_diff", "logprob_diff", "{:.1e}"),
)
_PHASES = (
    ("perf/rollout_time", "generate"),
    ("perf/train_time", "train"),
    ("perf/critic_train_time", "critic"),
    ("perf/update_weights_time", "sync"),
    ("perf/save_model_time", "save"),
    ("perf/step_time", "step"),
)


# (metric, label): shown if they are not zero.
_COUNTS = (
    ("rollout/failed_samples", "failed samples"),
    ("rollout/aborted_samples", "aborted samples"),
    ("rollout/surplus_groups", "surplus groups"),
    ("rollout/dropped_rollouts", "dropped rollouts"),
    ("rollout/sft_cut_samples", "cut chats"),
    ("rollout/sft_untrained_samples", "untrained chats"),
)
_FILTER_PREFIX = "rollout/dynamic_filter/drop_"


def rollout_line(rollout_id: int, num_rollout: int, metrics: dict[str, Any]) -> str:
    """The console line of a finished rollout step, from all of its metrics. It begins with the rollout's id, under which
    everything about it is logged, and with how many rollouts are done."""
    numbers = _numbers(metrics)
    parts = [f"{label} {fmt.format(numbers[name])}" for name, label, fmt in _COLUMNS if name in numbers]
    filtered = sum(value for name, value in numbers.items() if name.startswith(_FILTER_PREFIX))
    counts = [*((numbers.get(name), label) for name, label in _COUNTS), (filtered, "filtered groups")]
    parts += [f"{label} {count:.0f}" for count, label in counts if count]
    phases = [f"{label} {numbers[name]:.1f}" for name, label in _PHASES if name in numbers]
    return f"rollout {rollout_id} ({rollout_id + 1}/{num_rollout}) | {' | '.join(parts)} | seconds: {', '.join(phases)}"


def has_line(rollout_id: int, num_rollout: int, *, steps: int, interval: int) -> bool:
    """Whether a rollout has a line: it completes a further `interval` optimizer steps, or it is the last one.

    Args:
        steps: optimizer steps per rollout.
    """
    before, after = rollout_id * steps, (rollout_id + 1) * steps
    return after // interval > before // interval or rollout_id + 1 == num_rollout


def generation_name(rollout_id: int) -> str:
    """The name of a step's generation in messages: `generation of rollout 3`."""
    return f"generation of rollout {rollout_id}"


def evaluation_name(rollout_id: int, *, before: bool = False) -> str:
    """The name of an evaluation in messages: `evaluation before rollout 0`, `evaluation after rollout 3`."""
    return f"evaluation {'before' if before else 'after'} rollout {rollout_id}"


def evaluation_line(name: str, metrics: dict[str, Any]) -> str:
    """The console line of the evaluation `name`: the mean reward of every data set."""
    means = {name: value for name, value in _numbers(metrics).items() if name.count("/") == 1 and not _is_detail(name)}
    shown = ", ".join(f"{name.removeprefix('eval/')} {value:.4f}" for name, value in means.items())
    return f"{name}: {shown}"


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """The metrics that are numbers. Users' functions may add others, for trackers or readers of their own."""
    return {name: number for name, value in metrics.items() if (number := as_float(value)) is not None}


def _is_detail(name: str) -> bool:
    return name == "eval/step" or any(
        mark in name for mark in ("-truncated_ratio", "-pass@", "-unfinished", "-failed_samples")
    )


class ProgressTask:
    """A counter from 0 to `total`. Usable as a context manager that closes itself."""

    def __init__(self, board: "Progress", description: str, total: int) -> None:
        self.description = description
        self.total = total
        self.done = 0
        self._board = board

    def advance(self, n: int = 1) -> None:
        with self._board.lock:
            self.done += n

    def close(self) -> None:
        with self._board.lock:
            if self._board.task is self:
                self._board.task = None

    def __enter__(self) -> "ProgressTask":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Progress:
    """How far one call has come with the task that it announced last, as long as that task is not closed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.task: ProgressTask | None = None

    def start(self, description: str, total: int) -> ProgressTask:
        """Announce a task of `total` units; it replaces the one announced before."""
        task = ProgressTask(self, description, total)
        with self.lock:
            self.task = task
        return task

    def snapshot(self) -> tuple[str, int, int] | None:
        """(description, done, total) of the current task, or None when nothing is in progress."""
        with self.lock:
            return None if self.task is None else (self.task.description, self.task.done, self.task.total)


class StartupClock(metaclass=SingletonMeta):
    """Measures the stretches of a start, from milestone to milestone; the first begins with the process itself."""

    def __init__(self) -> None:
        self._started = self._last = _process_start()
        self._stretches: list[tuple[str, float]] = []
        self._closed = False

    def mark(self, name: str) -> None:
        """End the current stretch and call it `name`. After `close` this does nothing."""
        if not self._closed:
            now = _since_boot()
            self._stretches.append((name, now - self._last))
            self._last = now

    def close(self, name: str) -> str | None:
        """End the last stretch. Returns the line to print; None if the clock was closed before."""
        if self._closed:
            return None
        self.mark(name)
        self._closed = True
        parts = ", ".join(f"{stretch} {seconds:.1f}" for stretch, seconds in self._stretches)
        return f"first sample {self._last - self._started:.1f} s after the start (seconds: {parts})"


def _since_boot() -> float:
    """Seconds of a clock that nobody sets."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _process_start() -> float:
    """Start of this process, in seconds of `_since_boot`."""
    with open("/proc/self/stat") as stat:
        # The command in parentheses may hold spaces; field 22 counts from the start of the line.
        ticks = int(stat.read().rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")
