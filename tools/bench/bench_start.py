"""From the start of `train.py` to its first sample: wall-clock seconds, and processor seconds of all processes of the run.

    python tools/bench/bench_start.py [--starts 3]
    git worktree add ../before COMMIT && python tools/bench/bench_start.py --beside ../before

A start is a run of one rollout on the toy task of 1.25 M parameters, with one engine and one rank. `train.py` logs the seconds
itself; the bench reads processor seconds from the kernel while the run goes on, up to that moment. With --beside, each turn
starts the other trees first and then this one, all with the interpreter of this one, so that all trees meet the same state of
the machine. Before the clock starts, the bench compiles the modules of every tree and lets it cache the flags of the installed
packages.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from slime.utils.child_process import ChildProcess
from tools.bench.bench_loop import train_command
from tools.bench.learning_curves import markdown
from tools.tied import ROOT, tied

INTERVAL_S = 0.2
_TOLD = re.compile(r"first sample ([0-9.]+) s after the start \(seconds: (.*)\)")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_SIGCHLD_IS_IGNORED = re.compile(r"^SigIgn:\s*[0-9a-f]*[13579bdf][0-9a-f]{4}$", re.MULTILINE)


@dataclass(frozen=True)
class Start:
    """seconds: until the first sample; processor: seconds of all processes until then; stretches: parts of it, as logged."""

    seconds: float
    processor: float
    stretches: str


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=3, help="of each tree")
    parser.add_argument("--beside", type=Path, nargs="+", default=[], metavar="TREE", help="such as git worktrees")
    options = parser.parse_args(argv)
    trees = [*(tree.resolve() for tree in options.beside), ROOT]
    for tree in trees:
        if not (tree / "train.py").is_file():
            parser.error(f"--beside {tree}: there is no train.py")
    with tempfile.TemporaryDirectory(prefix="bench-start-") as directory:
        task = Path(directory) / "task"
        subprocess.run([sys.executable, ROOT / "tools/make_toy_task.py", task], check=True, stdout=sys.stderr)
        for tree in trees:
            compileall.compile_dir(tree / "slime", quiet=2)
            plan = [*command_in(tree, task), "--dry-run"]
            subprocess.run(plan, check=True, stdout=subprocess.DEVNULL, env=environment_in(tree))
        found = measure(trees, options.starts, task, Path(directory))
    print(markdown(("Tree", "Seconds", "Seconds of the processor"), [row(tree, found[tree]) for tree in trees]))
    for tree in trees:
        print(f"{tree}, the last start: {found[tree][-1].stretches}")


def row(tree: Path, starts: Sequence[Start]) -> list[str]:
    """A line of the table: all starts, and their median if there are several."""
    columns = []
    for numbers in ([start.seconds for start in starts], [start.processor for start in starts]):
        median = f" (median {statistics.median(numbers):.1f})" if len(numbers) > 1 else ""
        columns.append(", ".join(f"{number:.1f}" for number in numbers) + median)
    return [str(tree), *columns]


def measure(trees: Sequence[Path], starts: int, task: Path, directory: Path) -> dict[Path, list[Start]]:
    """Tree → its starts. The trees take turns."""
    found: dict[Path, list[Start]] = {tree: [] for tree in trees}
    for turn in range(starts):
        for number, tree in enumerate(trees):
            found[tree].append(start(tree, task, directory / f"turn-{turn}-{number}"))
            print(f"{tree}: {row(tree, found[tree][-1:])[1:]}", file=sys.stderr, flush=True)
    return found


def command_in(tree: Path, task: Path) -> list[str]:
    """The command of a start, to be run in the directory `tree`, where `python -m` looks for modules first."""
    words = train_command(task, argparse.Namespace(engines=1, rollouts=1))[2:]
    return ["env", "-C", str(tree), sys.executable, "train.py", *words]


def environment_in(tree: Path) -> dict[str, str]:
    """The environment in which all processes of a start find the modules of `tree`."""
    import_path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": import_path, "SLIME_ACCELERATOR": "cpu"}


def start(tree: Path, task: Path, directory: Path) -> Start:
    """Run `train.py` of `tree` to its end; metrics and log go below `directory`.

    Raises:
        SystemExit: it failed, or its log has no first sample.
    """
    command, environment = command_in(tree, task), {**environment_in(tree), "TENSORBOARD_DIR": str(directory)}
    log = directory.with_suffix(".log")
    child = ChildProcess("train.py", tied(command), log, environment)
    began = time.monotonic()
    child.start()
    family, times, seconds, told = Family(child.pid), [0.0], [0.0], None
    try:
        while told is None and child.poll() is None:
            time.sleep(INTERVAL_S)
            # The log is read before the processes, so the last look at them comes after the first sample.
            told = _TOLD.search(log.read_text(errors="replace"))
            times.append(time.monotonic() - began)
            seconds.append(family.seconds(processes()))
        status = child.wait(600)
    finally:
        child.terminate()
    told = told or _TOLD.search(log.read_text(errors="replace"))
    if status != 0 or told is None:
        sys.exit(f"{tree / 'train.py'} ended with {status}:\n{log.read_text(errors='replace')[-3000:]}")
    until = float(told[1])
    return Start(until, float(np.interp(until, times, seconds)), told[2])


@dataclass(frozen=True)
class Process:
    """seconds: processor seconds, its own and those of the children that it has waited for."""

    parent: int
    seconds: float


def processes() -> dict[int, Process]:
    """All processes of the machine, by id."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            # One may end while it is read.
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", errors="replace") as stat:
                # The command in parentheses may hold spaces; what follows it begins with field 3.
                fields = stat.read().rpartition(")")[2].split()
                found[int(name)] = Process(int(fields[1]), sum(map(int, fields[11:15])) / _TICKS_PER_SECOND)
    return found


def forgets_children(pid: int) -> bool:
    """Whether the process ignores SIGCHLD: then the kernel reaps its children, and their seconds are lost."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", errors="replace") as status:
        return _SIGCHLD_IS_IGNORED.search(status.read()) is not None
    return False


@dataclass
class Family:
    """Counts the processor seconds of a process and of all its descendants, by looking at them from time to time.

    When a process ends, the kernel adds its seconds to those of its parent. If the parent ignores its children (Ray's raylet
    does) or ended earlier, the seconds seen at the last look count.
    """

    root: int
    _members: dict[int, Process] = field(default_factory=dict)
    _of_forgotten: float = 0.0

    def seconds(self, alive: Mapping[int, Process]) -> float:
        """Processor seconds of all members so far; `alive` are the processes of the machine at this moment."""
        before, self._members = self._members, {}
        # Members whose parent has ended are still members.
        candidates = {pid for pid in alive if pid == self.root or pid in before}
        while candidates:
            self._members |= {pid: alive[pid] for pid in candidates}
            candidates = {pid for pid, process in alive.items() if process.parent in candidates} - self._members.keys()
        for pid in before.keys() - self._members.keys():
            parent = before[pid].parent
            if parent not in before or forgets_children(parent):
                self._of_forgotten += before[pid].seconds
        return self._of_forgotten + sum(process.seconds for process in self._members.values())


if __name__ == "__main__":
    main()
