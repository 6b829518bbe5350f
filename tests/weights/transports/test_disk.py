"""The checkpoint that sources leave for the engines."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from slime.utils import filesystem
from slime.utils.errors import RunError, UserError
from slime.weights.local_checkpoint import LocalCheckpoint
from slime.weights.publication import PushDirectory
from slime.weights.transports import disk
from slime.weights.transports.disk import DiskTransport
from slime.weights.transports.transport import Background

BUCKETS = [
    [[("a", torch.arange(6.0).view(2, 3))], [("b", torch.ones(4, dtype=torch.bfloat16)), ("c", torch.zeros(1))]],
    [[("d", torch.arange(3))]],
]
TENSORS = {name: tensor for source in BUCKETS for bucket in source for name, tensor in bucket}


@pytest.fixture
def args(tmp_path):
    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "config.json").write_text("{}")
    (hf / "model.safetensors").write_text("weights of somebody else")
    return SimpleNamespace(
        hf_checkpoint=str(hf), update_weight_disk_dir=str(tmp_path / "pushes"), update_weight_disk_keep_files=False,
        update_weight_local_checkpoint_dir=None, distributed_timeout_minutes=1, release_train=False,
    )  # fmt: skip


def send(args, version, sources=BUCKETS, transports=None):
    transports = transports or [DiskTransport(args, index, len(sources)) for index in range(len(sources))]
    for transport, buckets in zip(transports, sources, strict=True):
        transport.connect([])
        transport.begin(version)
        for bucket in buckets:
            transport.send(bucket)
        transport.finish()
    return transports


def contents(directory):
    """The names in a directory of pushes, which always has the lock."""
    names = sorted(path.name for path in directory.iterdir())
    assert names.pop(0) == ".lock"
    return names


def test_all_sources_make_one_checkpoint(args, tmp_path):
    transports = send(args, 12)
    directory = tmp_path / "pushes" / "weight_v000012"
    order = DiskTransport.placing_order(args, 12)
    assert order == ("update_weights_from_disk", str(directory), "12")
    assert DiskTransport.opening_order(args, 12) is None
    assert DiskTransport.fetching_order(args, 12) is None
    files = [f"model-0000{index}-of-00003.safetensors" for index in (1, 2, 3)]
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", *files, "model.safetensors.index.json"]
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {"a": files[0], "b": files[1], "c": files[1], "d": files[2]}
    assert (index["metadata"]["version"], index["metadata"]["base_version"]) == (12, None)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    written = {name: tensor for file in files for name, tensor in load_file(directory / file).items()}
    assert written.keys() == TENSORS.keys() and all(written[name].equal(TENSORS[name]) for name in TENSORS)
    for transport in transports:
        transport.settle()
    assert contents(tmp_path / "pushes") == []


def test_a_listing_that_lacks_what_another_node_has_written_leaves_nothing_out(args, tmp_path, monkeypatch):
    glob = Path.glob
    monkeypatch.setattr(
        Path, "glob", lambda path, pattern: (found for found in glob(path, pattern) if "shard-00000" not in found.name)
    )
    send(args, 1)
    index = json.loads((tmp_path / "pushes" / "weight_v000001" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == TENSORS.keys()


@pytest.mark.parametrize("lost", ["shard-00000-00001", "shards-00000"])
def test_what_another_source_has_written_and_is_not_there_is_named(args, tmp_path, lost):
    first, last = (DiskTransport(args, index, 2) for index in range(2))
    for transport, buckets in zip((first, last), BUCKETS, strict=True):
        transport.begin(1)
        for bucket in buckets:
            transport.send(bucket)
        if transport is first:
            first.finish()
    (tmp_path / "pushes" / ".weight_v000001" / lost).unlink()
    message = (
        rf"^/.*\.weight_v000001/{lost} is not there on every node: --update-weight-disk-dir has to be on a disk that"
    )
    with pytest.raises(RunError, match=message):
        last.finish()
    assert contents(tmp_path / "pushes") == [".weight_v000001"], "nothing is published"


def test_where_the_trainer_ends_the_last_files_stay_and_the_next_one_goes_on_with_its_chain(args, tmp_path):
    args.release_train = True
    directory = PushDirectory(args.update_weight_disk_dir)
    directory.claim()
    foreign = tmp_path / "pushes" / "weight_v000000"
    foreign.mkdir(parents=True)
    send(args, 9)
    kept = ["weight_v000009"]
    chains = set()
    for version in (1, 2, 3):
        transports = [DiskTransport(args, index, 2) for index in range(2)]
        if version > 1:
            assert contents(tmp_path / "pushes") == ["weight_v000000", f"weight_v00000{version - 1}", *kept]
            (chain,) = chains
            for transport in transports:
                transport.continue_from(version - 1, chain)
        send(args, version, transports=transports)
        for transport in transports:
            transport.settle()
        assert transports[0].chain() is None, "the last source publishes"
        chains.add(transports[1].chain())
    (chain,) = chains
    directory.require(3, chain)
    with pytest.raises(RunError, match="weight_v000007 holds no weights"):
        DiskTransport(args, 0, 1).continue_from(7, chain)
    # Engines that take weights 3 once more are told that they have them.
    transports[-1].settle()
    # What no push has made stays, and what an earlier run has kept.
    assert contents(tmp_path / "pushes") == ["weight_v000000", "weight_v000003", *kept]


def test_weights_that_another_run_has_put_in_place_of_those_of_this_one_are_not_gone_on_with(args, tmp_path):
    transports = send(args, 1)
    send(args, 1)
    replaced = (
        r"^--update-weight-disk-dir .*pushes: weight_v000001 is not what this run has pushed as version 1: another run"
    )
    with pytest.raises(RunError, match=replaced):
        PushDirectory(args.update_weight_disk_dir).require(1, transports[-1].chain())
    with pytest.raises(RunError, match=replaced):
        DiskTransport(args, 1, 2).continue_from(1, transports[-1].chain())


def test_hosts_copy_what_is_published_and_engines_load_the_copy(args, tmp_path):
    args.update_weight_local_checkpoint_dir = str(tmp_path / "local")
    directory = tmp_path / "pushes" / "weight_v000001"
    assert DiskTransport.fetching_order(args, 1) == ("fetch_weights", str(directory))
    assert DiskTransport.placing_order(args, 1) == ("update_weights_from_disk", str(tmp_path / "local"), "1")
    host = LocalCheckpoint(tmp_path / "local", args.hf_checkpoint, 5.0)
    for version in (1, 2):
        transports = send(args, version, BUCKETS if version == 1 else BUCKETS[:1])
        assert host.bring_to(DiskTransport.directory(args, version)) is None
        for transport in transports:
            transport.settle()
        index = json.loads((tmp_path / "local" / "model.safetensors.index.json").read_text())
        written = {name: load_file(tmp_path / "local" / file)[name] for name, file in index["weight_map"].items()}
        assert written.keys() == (TENSORS.keys() if version == 1 else {"a", "b", "c"})
        assert all(written[name].equal(TENSORS[name]) for name in written)
        assert len(list((tmp_path / "local").glob("*.safetensors"))) == len(set(index["weight_map"].values()))


def test_nothing_is_published_before_the_last_source_has_finished(args, tmp_path):
    first, second = (DiskTransport(args, index, 2) for index in range(2))
    first.begin(1)
    first.send(BUCKETS[0][0])
    first.finish()
    assert contents(tmp_path / "pushes") == [".weight_v000001"]
    second.begin(1)
    second.send(BUCKETS[1][0])
    second.finish()
    assert contents(tmp_path / "pushes") == ["weight_v000001"]


def test_what_no_engine_took_goes_with_the_next_weights(args, tmp_path):
    """The engines that had missed weights 1 died of them; those of another run stay."""
    send(args, 7, BUCKETS[:1])
    transport = send(args, 1, BUCKETS[:1])[0]
    transport.settle()
    send(args, 1, BUCKETS[:1], [transport])
    assert contents(tmp_path / "pushes") == ["weight_v000001", "weight_v000007"]
    send(args, 2, BUCKETS[:1], [transport])
    transport.settle()
    assert contents(tmp_path / "pushes") == ["weight_v000007"]


def test_files_that_cannot_be_removed_fail_no_push(args, tmp_path, monkeypatch, caplog):
    """As on a network disk, where an engine that is being ended has them open."""
    transport = send(args, 1, BUCKETS[:1])[0]

    def refuse(directory, **options):
        raise OSError(39, "Directory not empty", str(directory))

    with monkeypatch.context() as patch:
        patch.setattr(disk.shutil, "rmtree", refuse)
        transport.settle()
    assert "weight_v000001 could not be removed: [Errno 39] Directory not empty" in caplog.text
    send(args, 2, BUCKETS[:1], [transport])
    transport.settle()
    assert contents(tmp_path / "pushes") == []


def test_files_are_kept_where_asked_for(args, tmp_path):
    args.update_weight_disk_keep_files = True
    for version in (1, 2):
        for transport in send(args, version):
            transport.settle()
    assert contents(tmp_path / "pushes") == ["weight_v000001", "weight_v000002"]


def test_a_push_begins_afresh(args, tmp_path):
    """What a push left that failed in its middle, and a whole one that a killed run left."""
    send(args, 1, [[[("old", torch.zeros(2))]]])
    left = DiskTransport(args, 0, 1)
    left.begin(1)
    left.send([("other", torch.zeros(2))])
    left._wait()
    send(args, 1)
    (name,) = contents(tmp_path / "pushes")
    directory = tmp_path / "pushes" / name
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == ["a", "b", "c", "d"]


def test_a_disk_that_cannot_be_written_is_named(args, tmp_path):
    transport = DiskTransport(args, 0, 1)
    transport.begin(1)
    (tmp_path / "pushes" / ".weight_v000001").rmdir()
    transport.send(BUCKETS[0][0])
    with pytest.raises(RunError, match=r"writing .*pushes/\.weight_v000001/shard-00000-00000 failed: "):
        transport.finish()


def test_the_next_bucket_waits_for_the_last_one_and_no_longer_than_its_limit(args, monkeypatch):
    class Hanging(Background):
        def __init__(self, function, name):
            pass

        def ended_within(self, timeout):
            assert timeout == 60.0
            return False

    monkeypatch.setattr(disk, "Background", Hanging)
    transport = DiskTransport(args, 0, 1)
    transport.begin(1)
    transport.send(BUCKETS[0][0])
    with pytest.raises(RunError, match=r"not written to .* within 60 s \(--distributed-timeout-minutes\)"):
        transport.send(BUCKETS[0][1])


def test_a_second_run_is_refused_a_directory_while_the_first_one_lives(args, tmp_path, monkeypatch):
    first = DiskTransport(args, 0, 2)
    first.begin(1)
    first.send(BUCKETS[0][0])
    first.finish()
    DiskTransport(args, 1, 2).begin(1)  # of the same run
    with monkeypatch.context() as second_run:
        second_run.setattr(filesystem, "_locks", {})
        second = DiskTransport(args, 0, 1)
        with pytest.raises(UserError, match=r"^--update-weight-disk-dir .*pushes: another run "):
            second.begin(1)
        second.discard()
    assert contents(tmp_path / "pushes") == [".weight_v000001"], "the draft of the first run"


def test_a_trainer_that_ends_leaves_the_claim_to_who_lives_as_long_as_the_run(args, tmp_path, monkeypatch):
    args.release_train = True
    PushDirectory(args.update_weight_disk_dir).claim()
    with monkeypatch.context() as a_rank:
        a_rank.setattr(filesystem, "_locks", {})
        send(args, 1)
    assert contents(tmp_path / "pushes") == ["weight_v000001"]


def test_a_failed_push_leaves_no_draft(args, tmp_path):
    transport = DiskTransport(args, 0, 2)
    transport.begin(1)
    transport.send(BUCKETS[0][0])
    transport.discard()
    assert contents(tmp_path / "pushes") == []
