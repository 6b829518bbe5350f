import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from slime.utils import files as scratch
from slime.utils.child_process import environment_for_python

OWNER = """
import sys
from slime.utils.files import make_scratch_directory
print(make_scratch_directory("test"), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """The directory for temporary files, of this process and of those that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(scratch.tempfile, "tempdir", None)
    return tmp_path


@pytest.fixture
def shared_memory(tmp_path_factory, monkeypatch) -> Path:
    directory = tmp_path_factory.mktemp("shm")
    monkeypatch.setattr(scratch, "_SHARED_MEMORY", directory)
    return directory


@pytest.fixture
def owner(temporary):
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment_for_python(), text=True,
    ) as process:  # fmt: skip
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_a_directory_is_its_users_alone_and_gone_with_all_that_belongs_to_it(temporary, shared_memory):
    path = scratch.make_scratch_directory("test")
    assert path.parent == temporary and stat.S_IMODE(path.stat().st_mode) == 0o700
    (path / "file").touch()
    (shared_memory / f"loads_{path.name}_1.shm").touch()
    (shared_memory / "loads_of_somebody_else").touch()
    scratch.remove_scratch_directory(path)
    assert list(temporary.iterdir()) == []
    assert [file.name for file in shared_memory.iterdir()] == ["loads_of_somebody_else"]
    scratch.remove_scratch_directory(path)


def test_what_a_killed_process_left_is_swept(owner, temporary, shared_memory):
    process, path = owner
    (shared_memory / f"loads_{path.name}_1.shm").touch()
    assert scratch.sweep_scratch_directories() == []  # it lives
    assert path.exists() and list(shared_memory.iterdir())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    new = scratch.make_scratch_directory("test")
    assert list(temporary.iterdir()) == [new] and list(shared_memory.iterdir()) == []
    scratch.remove_scratch_directory(new)


def test_a_directory_of_this_process_is_not_swept(temporary):
    path = scratch.make_scratch_directory("test")
    assert scratch.sweep_scratch_directories() == [] and path.exists()
    scratch.remove_scratch_directory(path)


@pytest.mark.parametrize("content", [None, "link"])
def test_what_only_looks_like_ours_stays(temporary, tmp_path_factory, content):
    path = temporary / "slime-test-abc"
    path.mkdir()
    (path / "result").touch()
    if content == "link":
        (path / "owner").symlink_to(tmp_path_factory.mktemp("elsewhere") / "file")
    assert scratch.sweep_scratch_directories() == [] and (path / "result").exists()


def test_another_users_directory_stays(owner, monkeypatch):
    process, path = owner
    process.kill()
    process.wait()
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert scratch.sweep_scratch_directories() == [] and path.exists()


def test_a_disk_without_locks_leaves_the_result_of_a_run_alone(owner, temporary, monkeypatch):
    """A sweep is the last thing that a run does; nobody knows there whether the directory has an owner."""
    _, path = owner

    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(scratch.fcntl, "flock", refuse)
    assert scratch.sweep_scratch_directories() == [] and path.exists()
