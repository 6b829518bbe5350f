"""Publishing a checkpoint: whenever the process ends, the pointer names a checkpoint that is there whole."""

import itertools
import os
import signal
from types import SimpleNamespace

import pytest

from slime.training.checkpoint_publication import publish_checkpoint, unpublished
from slime.utils.checkpoint_directory import POINTER, iteration_directory, latest_iteration

# What changes the disk. A process that is killed before the n-th of them has done the n − 1 before it.
CALLS = ("rename", "replace", "fsync", "chmod")


def write(save, iteration):
    """A checkpoint that is written, and not yet published."""
    directory = unpublished(iteration_directory(save, iteration))
    directory.mkdir(parents=True)
    (directory / "metadata.json").write_text(str(iteration))


def deadly(call, made, deadly_call):
    """`call`, in a process that is killed before its call number `deadly_call`; `made` counts over all calls."""

    def counted(*arguments, **keywords):
        if next(made) == deadly_call:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **keywords)

    return counted


def publish_until(args, iteration, deadly_call):
    """Publish in a child process that is killed before its call number `deadly_call`; whether it was."""
    child = os.fork()
    if child == 0:
        try:
            made = itertools.count(1)
            for name in CALLS:
                setattr(os, name, deadly(getattr(os, name), made, deadly_call))
            publish_checkpoint(args, iteration)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status == signal.SIGKILL


def newest(args):
    """The iteration that a resume would take; what is on disk belongs to it."""
    iteration = latest_iteration(args.save)
    assert (iteration_directory(args.save, iteration) / "metadata.json").read_text() == str(iteration)
    return iteration


@pytest.fixture
def args(tmp_path):
    args = SimpleNamespace(save=str(tmp_path), save_hf=None, keep_last=None)
    write(args.save, 0)
    publish_checkpoint(args, 0)
    return args


def test_o5_the_pointer_is_never_early(args):
    found, iteration = [], 0
    killed = True
    while killed:
        iteration += 1
        write(args.save, iteration)
        killed = publish_until(args, iteration, iteration)
        found.append(newest(args) == iteration)
    # The pointer moves once, and a process that was not killed has moved it.
    assert found == sorted(found) and found[-1] and not found[0]
    assert len(found) > 4


def test_keep_last_deletes_what_belongs_to_older_ones(args, tmp_path):
    args.keep_last, args.save_hf = 1, str(tmp_path / "hf_{rollout_id}")
    for iteration in (1, 2):
        write(args.save, iteration)
        for other in (f"rollout/global_dataset_state_dict_{iteration}", f"hf_{iteration}"):
            (tmp_path / other).mkdir(parents=True)
        publish_checkpoint(args, iteration)
        assert newest(args) == iteration
    kept = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert kept == {
        POINTER, "iter_0000002", "iter_0000002/metadata.json", "rollout", "rollout/global_dataset_state_dict_2", "hf_2",
    }  # fmt: skip


def test_keep_last_leaves_newer_ones_of_another_course_alone(args):
    """A run that went back to an older checkpoint neither deletes those behind it nor counts them."""
    args.keep_last = 1
    newer = iteration_directory(args.save, 9)
    newer.mkdir()
    (newer / "metadata.json").write_text("9")
    write(args.save, 1)
    publish_checkpoint(args, 1)
    assert newest(args) == 1
    assert sorted(path.name for path in newer.parent.glob("iter_*")) == ["iter_0000001", newer.name]
