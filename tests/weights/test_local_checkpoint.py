"""The directory of a host, between engines, runs and boots of the machine. What is published comes from the real transport."""

import errno
import json
import multiprocessing
import resource
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from slime.utils.errors import RunError, UserError
from slime.weights import local_checkpoint
from slime.weights.local_checkpoint import LocalCheckpoint
from slime.weights.transports.disk import DiskTransport


@pytest.fixture
def args(tmp_path):
    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "config.json").write_text("{}")
    save_file({"a": torch.zeros(4)}, hf / "model.safetensors")
    return SimpleNamespace(
        hf_checkpoint=str(hf), update_weight_disk_dir=str(tmp_path / "pushes"), update_weight_disk_keep_files=True,
        update_weight_local_checkpoint_dir=str(tmp_path / "local"), distributed_timeout_minutes=1, release_train=False,
    )  # fmt: skip


@pytest.fixture
def local(tmp_path):
    return tmp_path / "local"


def publish(args, value, version=1, name="a"):
    transport = DiskTransport(args, 0, 1)
    transport.begin(version)
    transport.send([(name, torch.full((4,), value) if isinstance(value, float) else value)])
    transport.finish()
    return DiskTransport.directory(args, version)


def host_of(args, timeout=60.0):
    return LocalCheckpoint(args.update_weight_local_checkpoint_dir, args.hf_checkpoint, timeout)


def value(local):
    (path,) = local.glob("*.safetensors")
    return load_file(path)["a"].unique().item()


def test_the_engines_of_a_host_copy_once(args, local, monkeypatch):
    published = publish(args, 3.0)
    assert host_of(args).bring_to(published) is None
    monkeypatch.setattr(local_checkpoint.shutil, "copyfile", None)
    assert host_of(args).bring_to(published) is None
    assert value(local) == 3.0


def test_a_copy_from_before_the_machine_was_started_is_made_anew(args, local, tmp_path, monkeypatch):
    published = publish(args, 3.0)
    assert host_of(args).bring_to(published) is None
    (path,) = local.glob("*.safetensors")
    # As after a loss of power: the state was on the disk, the bytes were not.
    path.write_bytes(b"")
    boot = tmp_path / "boot"
    boot.write_text("another one")
    monkeypatch.setattr(local_checkpoint, "_BOOT", boot)
    assert host_of(args).bring_to(published) is None
    assert value(local) == 3.0


def test_a_copy_that_breaks_off_is_of_no_version(args, local, monkeypatch):
    host, first = host_of(args), publish(args, 3.0)
    assert host.bring_to(first) is None
    second = publish(args, 4.0, version=2)

    def full(*paths):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(local_checkpoint.shutil, "copyfile", full)
        with pytest.raises(RunError, match="make room there"):
            host.bring_to(second)
    assert host.bring_to(first) is None
    assert value(local) == 3.0


def test_a_directory_of_somebody_is_left_alone(args, local):
    local.mkdir()
    (local / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"^--update-weight-local-checkpoint-dir .*local holds files that no run has"):
        host_of(args).bring_to(publish(args, 3.0))
    assert [path.name for path in local.iterdir()] == ["thesis.tex"]
    args.update_weight_local_checkpoint_dir = args.hf_checkpoint
    with pytest.raises(UserError, match="name an empty directory"):
        host_of(args).bring_to(publish(args, 3.0))


def bring(args, published, holding, ending):
    host_of(args).bring_to(published)
    holding.set()
    ending.wait(600)


def test_two_runs_do_not_share_a_directory_and_one_that_ended_leaves_it(args, local):
    context = multiprocessing.get_context("spawn")
    holding, ending = context.Event(), context.Event()
    first = publish(args, 3.0)
    engine = context.Process(target=bring, args=(args, first, holding, ending))
    engine.start()
    assert holding.wait(300)
    sibling = host_of(args)
    assert sibling.bring_to(first) is None
    other = publish(args, 4.0, version=2)
    with pytest.raises(UserError, match="another run has its weights here"):
        host_of(args).bring_to(other)
    assert value(local) == 3.0
    # Killed in the middle of its work, with a sibling alive: the run goes on.
    engine.kill()
    engine.join(60)
    (local / ".slime-state.json").unlink()
    assert sibling.bring_to(first) is None
    with pytest.raises(UserError, match="another run"):
        host_of(args).bring_to(other)
    sibling.close()
    assert host_of(args).bring_to(other) is None
    assert value(local) == 4.0


def test_who_has_a_directory_alone_shares_it_with_nobody(args, local):
    first = publish(args, 3.0)
    engine, others = host_of(args), [host_of(args), LocalCheckpoint(local, args.hf_checkpoint, 5.0, alone=True)]
    alone = LocalCheckpoint(local, args.hf_checkpoint, 5.0, alone=True)
    assert engine.bring_to(first) is None
    with pytest.raises(UserError, match="another run has its weights here"):
        alone.bring_to(first)
    engine.close()
    assert alone.bring_to(first) is None and alone.bring_to(first) is None
    for other in others:
        with pytest.raises(UserError, match="another run has its weights here"):
            other.bring_to(first)
    alone.close()
    assert others[0].bring_to(first) is None


def test_a_full_disk_is_named_and_room_on_it_is_enough(args, local, monkeypatch):
    published = publish(args, 3.0)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(local_checkpoint.shutil, "copyfile", full)
        with pytest.raises(RunError, match=r"--update-weight-local-checkpoint-dir .*No space left .*make room there"):
            host_of(args).bring_to(published)
    assert host_of(args).bring_to(published) is None
    assert value(local) == 3.0


@pytest.mark.parametrize("reason", ["File too large", "No space left on device"])
def test_a_full_disk_is_named_also_where_stacked_experts_are_taken_apart(args, local, monkeypatch, reason):
    """What writes tensors has an error of its own: here a real one, whose reason is another, or with that of a full disk."""
    (Path(args.hf_checkpoint) / "config.json").write_text('{"hidden_size": 16}')
    published = publish(args, torch.ones(2, 16, 80), name="model.layers.0.mlp.experts.down_proj")
    write_shard = local_checkpoint.write_shard

    def refuse(path, bucket):
        def write():
            try:
                write_shard(path, bucket)()
            except SafetensorError as error:
                raise SafetensorError(str(error).replace("File too large", reason)) from None

        return write

    local.mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as disk:
        disk.setattr(local_checkpoint, "write_shard", refuse)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
        try:
            with pytest.raises(RunError, match=f"--update-weight-local-checkpoint-dir {local}: .*{reason}") as told:
                host_of(args).bring_to(published)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (" MB are free there; make room there" in str(told.value)) is (reason == "No space left on device")
    assert host_of(args).bring_to(published) is None
    (path,) = local.glob("*.safetensors")
    assert {name: tensor.shape for name, tensor in load_file(path).items()} == {
        f"model.layers.0.mlp.experts.{expert}.down_proj.weight": (16, 80) for expert in range(2)
    }


def test_nobody_waits_forever_for_another_engine_of_the_host(args, local):
    published = publish(args, 3.0)
    started = time.monotonic()
    with host_of(args)._turn(), pytest.raises(RunError, match=r"within 0 s \(--engine-load-timeout\)"):
        host_of(args, timeout=0.2).bring_to(published)
    assert time.monotonic() - started < 5
    assert host_of(args).bring_to(published) is None


def test_what_is_no_push_is_asked_for_again(args, tmp_path):
    assert "holds no weights of a push" in host_of(args).bring_to(tmp_path / "pushes" / "weight_v000009")
    published = publish(args, 3.0)
    index = published / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {}}))
    assert "holds no weights of a push" in host_of(args).bring_to(published)


def test_engines_that_begin_at_the_same_moment_do_not_take_each_other_for_a_stranger(args, local, monkeypatch):
    published, listed = publish(args, 1.0), type(local).iterdir

    def another_begins(path):
        if path == local:
            (local / local_checkpoint._TURN).touch()
        return listed(path)

    monkeypatch.setattr(type(local), "iterdir", another_begins)
    assert host_of(args).bring_to(published) is None
    assert value(local) == 1.0


def test_a_function_of_the_user_is_called_before_what_a_push_wrote_is_read(args, local, tmp_path):
    """As with a store whose files appear when they are asked for."""
    published = publish(args, 3.0, version=7)
    (tmp_path / "hook.py").write_text(
        "import os\n"
        "def fetch(source_dir, target_version):\n"
        "    os.rename(f'{source_dir}-far', source_dir) if os.path.exists(f'{source_dir}-far') else None\n"
        "    open(f'{os.path.dirname(__file__)}/called', 'a').write(f'{target_version} ')\n"
        "def fail(source_dir, target_version): raise KeyError('no store')\n"
    )
    published.rename(f"{published}-far")
    for _ in range(2):
        host = LocalCheckpoint(local, args.hf_checkpoint, 5.0, f"{tmp_path}/hook.py:fetch")
        assert host.bring_to(published) is None
    assert value(local) == 3.0 and (tmp_path / "called").read_text() == "7 7 "
    with pytest.raises(UserError, match="--sglang-custom-pull-weights-pre-read-hook .*hook.py:fail .*weights 7"):
        LocalCheckpoint(local, args.hf_checkpoint, 5.0, f"{tmp_path}/hook.py:fail").bring_to(published)
