"""Files that are whole or absent, scratch directories, names with placeholders."""

import errno
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime.utils import filesystem as scratch
from slime.utils.child_process import environment_for_python
from slime.utils.filesystem import (
    existing_files,
    holding,
    overlapping,
    publishing_directory,
    replace_directory,
    write_json_atomically,
    write_text_atomically,
)


def test_text_replaces_the_old_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "deep" / "file.txt"
    write_text_atomically(path, "old")
    write_text_atomically(path, "new")
    assert path.read_text() == "new"
    assert os.listdir(path.parent) == ["file.txt"]


def test_json_that_cannot_be_written_keeps_the_old_file(tmp_path):
    path = tmp_path / "value.json"
    write_json_atomically(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json_atomically(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


def test_a_failed_rename_removes_the_temporary_file(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "full").write_text("x")
    with pytest.raises(OSError):
        write_text_atomically(tmp_path / "target", "text")
    assert os.listdir(tmp_path) == ["target"]


def test_directory_appears_whole(tmp_path):
    final = tmp_path / "state"
    with publishing_directory(final) as directory:
        (directory / "a").write_text("1")
        assert not final.exists()
    assert (final / "a").read_text() == "1"


def test_error_in_the_block_keeps_the_old_directory(tmp_path):
    final = tmp_path / "state"
    with publishing_directory(final) as directory:
        (directory / "a").write_text("old")
    with pytest.raises(ZeroDivisionError), publishing_directory(final) as directory:
        (directory / "a").write_text("new")
        raise ZeroDivisionError
    assert (final / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["state"]


def test_what_a_killed_process_has_left_of_a_directory_goes_when_it_is_published_again(tmp_path):
    final = tmp_path / "state"
    code = (
        "import os, sys; from slime.utils.filesystem import publishing_directory\n"
        "with publishing_directory(sys.argv[1]) as directory: (directory / 'old').touch(); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, final], env=environment_for_python(), timeout=60)
    assert killed.returncode == -signal.SIGKILL and len(os.listdir(tmp_path)) == 1
    with publishing_directory(final) as directory:
        (directory / "new").touch()
    assert os.listdir(tmp_path) == ["state"] and os.listdir(final) == ["new"]


@pytest.fixture
def old_and_new(tmp_path):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    return tmp_path / "old", tmp_path / "new"


@pytest.mark.parametrize("moment", ["before all", "before they change places", "behind it"])
def test_a_directory_that_is_replaced_is_there_at_every_moment(old_and_new, monkeypatch, moment):
    """Wherever a process is killed, and its successor clears up."""
    old, new = old_and_new
    exchange = scratch._exchange

    def killed(*paths):
        if moment == "behind it":
            exchange(*paths)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(*(("os.rename",) if moment == "before all" else (scratch, "_exchange")), killed)
        replace_directory(new, old)
    assert os.listdir(old) == (["new"] if moment == "behind it" else ["old"])
    assert new.exists() == (moment == "before all")
    new.mkdir(exist_ok=True)
    (new / "newest").touch()
    replace_directory(new, old)
    assert os.listdir(old.parent) == ["old"] and "newest" in os.listdir(old)


def test_where_directories_cannot_change_places_a_failure_brings_the_old_one_back(old_and_new, monkeypatch):
    old, new = old_and_new
    monkeypatch.setattr(scratch, "_exchange", lambda *paths: False)
    with monkeypatch.context() as patched, pytest.raises(OSError, match="busy"):
        rename = os.rename

        def refused(source, target):
            if source == new:
                raise OSError(errno.EBUSY, "busy")
            rename(source, target)

        patched.setattr("os.rename", refused)
        replace_directory(new, old)
    assert os.listdir(old) == ["old"]
    replace_directory(new, old)
    assert os.listdir(old.parent) == ["old"] and os.listdir(old) == ["new"]


def test_replaced_directory_is_gone(tmp_path):
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("")
    replace_directory(tmp_path / "new", tmp_path / "old")
    assert os.listdir(tmp_path) == ["old"] and os.listdir(tmp_path / "old") == ["new"]


OWNER = """
import sys
from slime.utils.filesystem import make_scratch_directory
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


SHARED_OWNER = """
import sys
from pathlib import Path
from slime.utils.filesystem import make_shared_scratch_directory
print(make_shared_scratch_directory(Path(sys.argv[1]), "check", 1000.0), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def shared_owner(tmp_path):
    """A process that has a directory below `tmp_path / "save"`, which other machines see too; and the directory."""
    with subprocess.Popen(
        [sys.executable, "-c", SHARED_OWNER, str(tmp_path / "save")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment_for_python(), text=True,
    ) as process:  # fmt: skip
        path = Path(process.stdout.readline().strip())
        (path / "hf").mkdir()
        yield process, path
        process.kill()


def made_beside(path):
    """What stands beside `path` when this process has made a directory of its own there, and deleted it."""
    own = scratch.make_shared_scratch_directory(path.parent, "check", 1000.0)
    assert own.is_dir() and own.name.startswith(".check-")
    scratch.remove_scratch_directory(own)
    return list(path.parent.iterdir())


def test_a_shared_directory_is_deleted_when_its_process_has_ended_and_not_before(shared_owner, monkeypatch):
    process, path = shared_owner
    (path.parent / ".check-of-nobody").mkdir()
    monkeypatch.setattr(scratch.time, "time", lambda: 1e12)
    assert set(made_beside(path)) == {path, path.parent / ".check-of-nobody"}, "its process lives, however late it is"
    monkeypatch.undo()
    process.kill()
    process.wait()
    assert made_beside(path) == [path.parent / ".check-of-nobody"]


@pytest.mark.parametrize("unknown", ["machine", "locks"])
def test_where_nothing_tells_whether_a_process_lives_its_directory_has_its_time(shared_owner, monkeypatch, unknown):
    """A free lock on another machine, or none on a disk without locks, say nothing."""

    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    process, path = shared_owner
    process.kill()
    process.wait()
    now = time.time()
    if unknown == "machine":
        monkeypatch.setattr(scratch, "_machine", lambda: "another one")
    else:
        monkeypatch.setattr(scratch.fcntl, "flock", refuse)
    for later, left in ((0.0, [path]), (1000.0 + 3000.0, [path]), (1000.0 + 4000.0, [])):
        monkeypatch.setattr(scratch.time, "time", lambda later=later: now + later)
        assert made_beside(path) == left


def test_what_cannot_be_owned_leaves_nothing(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(scratch.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        scratch.make_shared_scratch_directory(tmp_path, "check", 1.0)
    assert list(tmp_path.iterdir()) == []


CLAIM = """
import sys
from pathlib import Path
from slime.utils.filesystem import claim_directory
print(claim_directory(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


def test_a_directory_belongs_to_one_process_until_that_ends(tmp_path):
    path = tmp_path / "new"
    with subprocess.Popen(
        [sys.executable, "-c", CLAIM, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment_for_python(), text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "True\n"
        assert not scratch.claim_directory(path)
        process.kill()
        process.wait()
    assert scratch.claim_directory(path) and scratch.claim_directory(path / "." / ".." / "new")


def test_a_directory_that_was_let_go_of_can_be_claimed_by_others(tmp_path):
    """And two claims by different names are about different things."""
    assert scratch.claim_directory(tmp_path, "a.lock") and scratch.claim_directory(tmp_path, "b.lock")
    for lock, granted in (("a.lock", "False"), ("c.lock", "True")):
        command = [
            sys.executable,
            "-c",
            CLAIM.replace("Path(sys.argv[1])", f"Path(sys.argv[1]), {lock!r}"),
            str(tmp_path),
        ]
        found = subprocess.run(
            command, input="", capture_output=True, env=environment_for_python(), text=True, timeout=120
        )
        assert found.stdout == f"{granted}\n"
    scratch.release_directory(tmp_path, "a.lock")
    scratch.release_directory(tmp_path, "b.lock")
    scratch.release_directory(tmp_path, "b.lock")
    with (tmp_path / "a.lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert not scratch.claim_directory(tmp_path, "a.lock")


def test_the_lock_of_another_user_can_be_taken_when_he_is_gone(tmp_path, monkeypatch):
    open_file = os.open

    def refuse(path, flags, *mode):
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied", str(path))
        return open_file(path, flags, *mode)

    (tmp_path / ".lock").touch()
    monkeypatch.setattr(scratch.os, "open", refuse)
    assert scratch.claim_directory(tmp_path)
    monkeypatch.undo()
    with (tmp_path / ".lock").open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    scratch.release_directory(tmp_path)


def test_a_disk_without_locks_grants_every_claim(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(scratch.fcntl, "flock", refuse)
    assert scratch.claim_directory(tmp_path)


def test_files_in_the_order_of_their_ids(tmp_path):
    directory = tmp_path / "with [brackets]"
    directory.mkdir()
    for name in ("10.pt", "9.pt", "eval_2.pt", "3.txt"):
        (directory / name).touch()
    (directory / "4.pt").mkdir()
    names = [path.rsplit("/", 1)[1] for path in existing_files(str(directory / "{rollout_id}.pt"))]
    assert names == ["9.pt", "10.pt", "eval_2.pt"]


def test_templates_that_take_numbers_only_match_nothing(tmp_path):
    assert existing_files(str(tmp_path / "{rollout_id:04d}.pt")) == []
    assert existing_files(str(tmp_path / "{step}.pt")) == []


def test_directories_that_overlap(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "model")
    for template, directory, told in (
        ("model", "model", True),
        ("link", "model", True),
        ("model/export", "link", True),
        ("out", "out/model", True),
        ("out/{rollout_id}", "out/3", True),
        ("out/{rollout_id}", "out/3/model", True),
        ("out/{rollout_id}", "out/3b", False),
        ("out/{rollout_id}", "out/model", False),
        ("out/step.{rollout_id}", "out/step-3", False),
        ("model-2", "model", False),
    ):
        assert overlapping(str(tmp_path / template), tmp_path / directory) is told, (template, directory)
    assert not overlapping(tmp_path, None)


def test_directories_that_hold_others(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "model")
    for template, directory, told in (
        ("model", "link", True),
        ("model", "link/part", True),
        ("model/part", "model", False),
        ("out/{rollout_id}", "out/3/model", True),
        ("out/{rollout_id}", "out", False),
    ):
        assert holding(str(tmp_path / template), tmp_path / directory) is told, (template, directory)
    assert not holding(None, tmp_path) and not holding(tmp_path, None)
