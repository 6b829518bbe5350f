"""The checkpoint that was published last survives every accident of a later save."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import re
import resource
import signal
from pathlib import Path

import pytest
import torch

from slime.arguments.checkpoints import WeightSource
from tests.support.processes.checkpoint_trainer import (
    LAYOUTS,
    ROLLOUTS_PER_STEP,
    Trainer,
    assert_same,
    make_args,
    resume,
)
from tests.support.processes.distributed import run_distributed
from tests.support.processes.waiting import wait_until


def save_on_full_disk(trainer, iteration, full_ranks) -> str | None:
    """Save while files of more than 2000 bytes cannot be written on some ranks; the message of the error."""
    from slime.utils.errors import RunError

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if torch.distributed.get_rank() in full_ranks:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))
    try:
        trainer.save(iteration)
        return None
    except RunError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def full_disk_of_one_rank_worker(args) -> tuple:
    trainer = Trainer(args)
    trainer.step()
    trainer.save(0)
    message = save_on_full_disk(trainer, 1, full_ranks=(1,))
    names = sorted(path.name for path in Path(args.save).iterdir())
    torch.distributed.barrier()
    trainer.save(2)
    return message, names, trainer.load(WeightSource("megatron", args.save))


def accidents_worker(args) -> dict:
    """Everything that may happen to a save, in one process. Files are looked at by the test, afterwards."""
    from slime.backends.megatron_utils.checkpoint import begin_checkpoint
    from slime.utils.errors import RunError

    results = {}
    trainer = Trainer(args)
    trainer.step()
    trainer.save(0)
    trainer.step()
    trainer.save(1)
    published = trainer.state()["weights"]
    trainer.step()

    # The process ends between the two.
    trainer.save(2, publish=False)
    results["before publication"] = (published, resume(args, WeightSource("megatron", args.save, resume=True)))

    # The run that resumed has left the groups of the one before it.
    trainer = Trainer(args)
    trainer.step()
    results["disk full"] = save_on_full_disk(trainer, 3, full_ranks=(0,))
    results["directory"] = sorted(path.name for path in Path(args.save).iterdir())
    results["after disk full"] = resume(args, WeightSource("megatron", args.save, resume=True))

    without = copy.copy(args)
    without.save, without.no_save_optim = args.save + "_without_optimizer", True
    trainer = Trainer(without)
    trainer.step()
    trainer.save(4)
    results["weights only"] = (trainer.state(), resume(without, WeightSource("megatron", without.save, resume=True)))

    results["no directory"] = []
    for below in ("", "/below"):
        nowhere = copy.copy(without)
        nowhere.save = f"{args.save}_file{below}"
        Path(f"{args.save}_file").touch()
        with pytest.raises(RunError) as error:
            begin_checkpoint(nowhere, 4, trainer.model, None, None, weight_version=7).finish()
        results["no directory"].append(str(error.value))

    keeping = copy.copy(args)
    keeping.save, keeping.keep_last = args.save + "_keep_last", 2
    trainer = Trainer(keeping)
    trainer.step()
    for iteration in (1, 3, 5):
        (Path(keeping.save) / f"rollout/global_dataset_state_dict_{iteration}").mkdir(parents=True)
        trainer.save(iteration)
    return results


def background_worker(args) -> dict:
    """Checkpoints whose writers are held, so that what happens meanwhile happens in this order. Messages and directories."""
    from slime.backends.megatron_utils.checkpoint import begin_checkpoint, publish_checkpoint, writing
    from slime.utils.errors import RunError
    from slime.weights.push import read_weight_version

    write = writing._write
    trainer = Trainer(args)
    trainer.step()
    results = {}

    def begin(iteration, room=resource.RLIM_INFINITY, **values):
        """An unfinished checkpoint, what lets its writers go on, and their process ids."""
        reader, writer = os.pipe()

        def wait_and_write(*arguments):
            os.close(writer)
            os.read(reader, 1)
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
            return write(*arguments)

        writing._write = wait_and_write
        changed = copy.copy(args)
        vars(changed).update(values)
        unfinished = begin_checkpoint(
            changed, iteration, trainer.model, trainer.optimizer, trainer.scheduler, weight_version=7
        )
        pids = [process.pid for process in multiprocessing.active_children()]
        assert len(pids) == 2 and unfinished.bytes_on_host > 0
        return unfinished, lambda: os.write(writer, b"22"), pids

    def message(unfinished):
        with pytest.raises(RunError) as error:
            unfinished.finish()
        with pytest.raises(RunError, match=re.escape(unfinished.error)):
            # A driver that was interrupted has not heard it, and asks again.
            unfinished.finish()
        assert not multiprocessing.active_children()
        return str(error.value), sorted(path.name for path in Path(args.save).iterdir())

    unfinished, release, _ = begin(0)
    results["saved"] = trainer.state()
    trainer.step()
    trainer.step()
    assert not unfinished.has_ended() and not (Path(args.save) / "iter_0000000").exists()
    release()
    wait_until(unfinished.has_ended)
    assert unfinished.finish() == unfinished.finish() == Path(args.save) / "iter_0000000"
    publish_checkpoint(args, 0)
    results["weight version"] = read_weight_version(Path(args.save) / "iter_0000000")

    unfinished, _, pids = begin(1)
    # Either of the two; the other one would go on for ever.
    os.kill(max(pids), signal.SIGKILL)
    results["killed"] = message(unfinished)
    unfinished, _, pids = begin(1)
    os.kill(min(pids), signal.SIGKILL)
    assert message(unfinished)[1] == results["killed"][1]

    unfinished, _, _ = begin(2, checkpoint_write_timeout=0.1)
    wait_until(unfinished.has_ended)
    results["hung"] = message(unfinished)

    unfinished, release, _ = begin(3, room=2000)
    release()
    results["disk full"] = message(unfinished)

    writing._write = write
    add, sizes = writing.UnfinishedCheckpoint.add, []

    def measure_and_add(unfinished, *arguments):
        sizes.append(unfinished.bytes_on_host)
        add(unfinished, *arguments)

    writing.UnfinishedCheckpoint.add = measure_and_add
    for changed in (copy.copy(args), copy.copy(args)):
        changed.async_save, changed.save = not sizes, args.save + "_with_states"
        of_model = trainer.model, trainer.optimizer, trainer.scheduler
        begin_checkpoint(changed, 4, *of_model, lambda name: contextlib.nullcontext(), ("first", "second")).finish()
    results["sizes"] = sizes

    results["loaded"] = resume(args, WeightSource("megatron", args.save, resume=True))
    return results


@pytest.fixture(scope="module")
def background(hf_dir, tmp_path_factory):
    args = make_args(hf_dir, tmp_path_factory.mktemp("background") / "checkpoints", async_save=True)
    return run_distributed(background_worker, 1, (args,))[0]


def test_a_checkpoint_holds_what_was_there_when_it_was_begun_while_training_goes_on(background):
    iteration, loaded, _ = background["loaded"]
    assert iteration == 0
    assert_same(loaded, background["saved"])
    assert loaded["random"] == background["saved"]["random"]
    assert background["weight version"] == 7


def test_without_the_background_a_part_is_on_the_disk_before_the_next_is_copied(background):
    together, one_by_one = background["sizes"][:3], background["sizes"][3:]
    assert 0 == together[0] < together[1] < together[2]
    assert one_by_one == [0, 0, 0]


FREE = r"\d+ MB are free there"


@pytest.mark.parametrize(
    "accident, iteration, cause, there",
    [
        ("killed", 1, r"its process: ended by SIGKILL \(.+\)", FREE),
        ("hung", 2, r"a writer needs more than 0\.1 s \(--checkpoint-write-timeout\)",
         r"What there is of it stays in /.+/\.iter_0000002\.writing"),
        ("disk full", 3, r"OSError: \[Errno 27\] File too large", FREE),
    ],
)  # fmt: skip
def test_a_writer_in_the_background_that_fails_is_told_and_leaves_the_old_checkpoint(
    background, accident, iteration, cause, there
):
    message, names = background[accident]
    expected = rf"checkpoint /.+/iter_000000{iteration} could not be written: {cause}\. {there}\. "
    assert re.fullmatch(expected + "Older checkpoints are untouched", message), message
    # The disk under a writer that hangs may hang itself: nobody deletes there.
    left = [] if accident == "killed" else [".iter_0000002.writing"]
    assert names == [*left, "iter_0000000", "latest_checkpointed_iteration.txt"]


@pytest.fixture(scope="module")
def accidents(hf_dir, tmp_path_factory):
    save = tmp_path_factory.mktemp("accidents") / "checkpoints"
    return save, run_distributed(accidents_worker, 1, (make_args(hf_dir, save),))[0]


def test_o5_the_pointer_is_written_last(accidents):
    save, results = accidents
    published, (iteration, loaded, _) = results["before publication"]
    assert not (save / "iter_0000002").exists()
    assert iteration == 1
    assert all((loaded["weights"][name] == weight).all() for name, weight in published.items())


def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(accidents):
    save, results = accidents
    message = results["disk full"]
    # What torch says of a failed write is "iostream error".
    cause = r"RuntimeError: .+\. \d+ MB are free there\. Older checkpoints are untouched"
    assert re.fullmatch(rf"checkpoint {save}/iter_0000003 could not be written: {cause}", message)
    assert results["directory"] == [
        ".iter_0000002.writing", "iter_0000000", "iter_0000001", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip
    iteration, loaded, _ = results["after disk full"]
    assert iteration == 1
    assert all((loaded["weights"][name] == w).all() for name, w in results["before publication"][0].items())


def test_a_save_that_cannot_begin_names_the_directory_and_the_cause(accidents):
    save, results = accidents
    for message in results["no directory"]:
        assert message.startswith(f"checkpoint {save}_file/") and "Not a directory" in message
        assert message.endswith(". Older checkpoints are untouched")


def test_o1_without_optimizer_state_the_weights_are_loaded_and_the_schedule_goes_on(accidents):
    saved, (iteration, loaded, _) = accidents[1]["weights only"]
    assert iteration == 4
    assert all((loaded["weights"][name] == weight).all() for name, weight in saved["weights"].items())
    assert saved["rollouts"] == loaded["rollouts"] == ROLLOUTS_PER_STEP
    assert saved["lr"] == loaded["lr"]


def test_keep_last_deletes_older_checkpoints_with_their_data_states(accidents):
    save = accidents[0].with_name("checkpoints_keep_last")
    assert sorted(path.name for path in save.glob("iter_*")) == ["iter_0000003", "iter_0000005"]
    assert sorted(path.name for path in (save / "rollout").iterdir()) == [
        "global_dataset_state_dict_3", "global_dataset_state_dict_5",
    ]  # fmt: skip


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_a_disk_that_is_full_on_one_node_fails_the_save_on_all(hf_dir, tmp_path, layout):
    args = make_args(hf_dir, tmp_path / "checkpoints", **LAYOUTS[layout])
    for message, names, iteration in run_distributed(full_disk_of_one_rank_worker, 2, (args,)):
        assert re.search(
            r"iter_0000001 could not be written: (rank 1: )?\w+Error: .*Older checkpoints are untouched", message
        )
        assert len(message.splitlines()) == 1 and "Traceback" not in message, message
        assert names == ["iter_0000000", "latest_checkpointed_iteration.txt"]
        # The ranks are still in step with each other.
        assert iteration == 2
