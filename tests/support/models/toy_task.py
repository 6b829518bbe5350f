"""The runs of the quick start with the flags of its script: its task, the supervised start, and the runs that follow."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.processes.train_process import REPOSITORY, TrainProcess

# Replaces the Python interpreter of a copy of the script: it prints the command that it was to run.
_TELLING = f"""#!/bin/sh
exec {sys.executable} -c 'import json, sys; print("told " + json.dumps(sys.argv[1:]))' "$@"
"""


class ToyTask:
    """A task below `directory`, with its `model`. `start` is the supervised run; all others begin with its checkpoint."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()
        self._copy = self._directory / "script"
        shutil.copytree(REPOSITORY / "scripts/lib", self._copy / "scripts/lib")
        shutil.copy(REPOSITORY / "scripts/quickstart.sh", self._copy / "scripts")
        interpreter = self._copy / ".venv/bin/python"
        interpreter.parent.mkdir(parents=True)
        interpreter.write_text(_TELLING)
        interpreter.chmod(0o755)
        # If there is no task, the plan makes one in a directory of its own.
        program, _, *arguments = self._told("unused")[0]
        task = self._directory / "seed-0/task"
        self.model = task / "model"
        subprocess.run([sys.executable, str(REPOSITORY / program), str(task), *arguments], check=True)

    def start(self) -> TrainProcess:
        """The supervised run."""
        return self._process("supervised", 0)

    def run(self, name: str, *words: str) -> TrainProcess:
        """The GRPO run of `scripts/quickstart.sh {words}`."""
        return self._process(name, 1, *words)

    def _process(self, name: str, position: int, *words: str) -> TrainProcess:
        program, *flags = self._told_runs(name, *words)[position]
        return TrainProcess(flags, self._directory / f"process-{name}", program=program)

    def command(self, *words: str) -> tuple[str, list[str]]:
        """The program of the GRPO run of `scripts/quickstart.sh {words}`, and its flags."""
        program, *flags = self._told_runs("command", *words)[1]
        return program, flags

    def _told_runs(self, name: str, *words: str) -> list[list[str]]:
        """The programs and flags of the supervised run and of the GRPO run."""
        runs = [told for told in self._told(name, *words) if "make_toy_task" not in told[0]]
        return [[word for word in run if word != "--dry-run"] for run in runs]

    def _told(self, name: str, *words: str) -> list[list[str]]:
        """The commands that the script runs for a plan."""
        script = str(self._copy / "scripts/quickstart.sh")
        done = subprocess.run(
            ["bash", script, "--dir", str(self._directory), "--run", name, "--dry-run", *words],
            stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, check=True,
        )  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith("told ")]
        return [json.loads(line.removeprefix("told ")) for line in lines]
