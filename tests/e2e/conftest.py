"""What the end-to-end tests share: the task, and one finished run of the whole loop."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiny_task import PLUG_INS, TinyTask, make_tiny_task
from tests.support.train_process import ListeningSocket, TrainProcess


@dataclasses.dataclass(frozen=True)
class LoopRun:
    """A run of six rollouts: where it keeps what, and the process."""

    process: TrainProcess
    checkpoints: Path
    dumps: Path
    # What was seen while it ran: every socket that listened, and the directory of its Ray.
    listening: list[ListeningSocket] = dataclasses.field(default_factory=list)
    ray_sessions: set[Path] = dataclasses.field(default_factory=set)
    shared_memory: set[Path] = dataclasses.field(default_factory=set)
    # Its directory for temporary files, of which only the whole run knows.
    temporary: Path | None = None


PLANTED_SECRET = "a-secret-that-may-stand-nowhere"


@dataclasses.dataclass(frozen=True)
class LoopCommand:
    """The command of that run, the same but for the directories."""

    task: TinyTask

    def run(self, directory: Path, env: dict[str, str] | None = None) -> LoopRun:
        checkpoints, dumps = directory / "checkpoints", directory / "dumps"
        flags = [
            *self.task.loop_flags,
            "--num-rollout", "6",
            "--custom-generate-function-path", f"{PLUG_INS}:marked_generate",
            "--check-weight-update-equal",
            "--save", checkpoints, "--load", checkpoints, "--save-interval", "3",
            "--eval-interval", "6", "--eval-prompt-data", "held_out", self.task.evaluation,
            "--save-debug-rollout-data", dumps / "{rollout_id}.pt",
            "--rollout-data-postprocess-path", f"{PLUG_INS}:hashed_token",
            "--train-env-vars", json.dumps({"HUB_TOKEN": PLANTED_SECRET}),
        ]  # fmt: skip
        return LoopRun(TrainProcess(flags, directory, env), checkpoints, dumps)


@pytest.fixture(scope="session")
def task(tmp_path_factory) -> TinyTask:
    return make_tiny_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="session")
def loop_command(task) -> LoopCommand:
    return LoopCommand(task)


@pytest.fixture(scope="session")
def finished_run(loop_command, tmp_path_factory) -> Iterator[LoopRun]:
    """Six rollouts on one training rank and two engines, with everything checked that can be."""
    directory = tmp_path_factory.mktemp("whole")
    # The paths of Unix sockets in it must stay short.
    temporary = Path(tempfile.mkdtemp(prefix="e2e-", dir="/tmp"))
    run = loop_command.run(directory, {"E2E_KEY_FILE": str(directory / "key"), "TMPDIR": str(temporary)})
    run = dataclasses.replace(run, temporary=temporary)
    with run.process as process:
        process.wait_for_line(r"rollout \d \(\d/6\)", 300)
        run.listening.extend(process.listening())
        run.ray_sessions.update(process.ray_sessions())
        scratch = [path.name for path in temporary.glob("slime-*")]
        run.shared_memory.update(
            path for path in Path("/dev/shm").iterdir() if any(name in path.name for name in scratch)
        )
        process.wait_for_success(400)
        process.assert_no_process_left()
    yield run
    shutil.rmtree(temporary, ignore_errors=True)
