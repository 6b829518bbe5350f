import itertools
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.utils.errors import RunError, UserError
from slime.weights import hf_writer
from slime.weights.hf_writer import write_hf_checkpoint
from tests.support.processes.distributed import run_distributed


@pytest.fixture
def source(tmp_path):
    directory = tmp_path / "source"
    directory.mkdir()
    copied = ("config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja")
    # The last ones speak of weights that are not written: those of a checkpoint of ours too.
    for name in (*copied, "checksums.json", "metadata.json", "weight_version.json"):
        (directory / name).write_text(f"content of {name}")
    (directory / "model.safetensors").write_bytes(b"old weights")
    (directory / "model.safetensors.index.json").write_text("{}")
    (directory / "pytorch_model.bin").write_bytes(b"old weights")
    return directory


def read_back(directory):
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    tensors = {}
    for name, file_name in index["weight_map"].items():
        tensors[name] = load_file(directory / file_name)[name]
    return index, tensors


def test_shards_index_and_auxiliary_files(tmp_path, source):
    wide = torch.arange(12.0).reshape(3, 4)
    tensors = [("a", wide[:, :2]), ("b", wide[:, 2:]), ("c", torch.ones(5, dtype=torch.bfloat16))]
    target = tmp_path / "out" / "checkpoint"
    write_hf_checkpoint(target, iter(tensors), source, max_shard_bytes=50)
    index, written = read_back(target)
    assert index["metadata"]["total_size"] == 24 + 24 + 10
    assert index["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00001-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }
    for name, tensor in tensors:
        assert torch.equal(written[name], tensor) and written[name].dtype == tensor.dtype
    assert sorted(path.name for path in target.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert (target / "config.json").read_text() == "content of config.json"


@pytest.mark.parametrize("relative", [".", "inside", "..", "../source/../source"])
def test_o6_the_source_checkpoint_is_never_written_to(source, relative):
    with pytest.raises(UserError, match="overwrite the source checkpoint"):
        write_hf_checkpoint(source / relative, iter([("a", torch.ones(1))]), source)
    assert (source / "model.safetensors").read_bytes() == b"old weights"


def test_o6_a_link_to_the_source_is_the_source(tmp_path, source):
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(UserError, match="overwrite the source checkpoint"):
        write_hf_checkpoint(tmp_path / "link", iter([("a", torch.ones(1))]), source)


def test_a_failure_leaves_the_old_checkpoint_whole(tmp_path, source):
    target = tmp_path / "checkpoint"
    write_hf_checkpoint(target, iter([("a", torch.ones(3))]), source)

    def failing():
        yield "a", torch.zeros(3)
        raise OSError("no space left on device")

    with pytest.raises(RunError, match=r"checkpoint could not be written: rank 0: no space left .* is untouched"):
        write_hf_checkpoint(target, failing(), source, max_shard_bytes=1)
    assert torch.equal(read_back(target)[1]["a"], torch.ones(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "source"]


def test_only_the_weight_files_of_an_old_checkpoint_are_replaced(tmp_path, source):
    target = tmp_path / "checkpoint"
    write_hf_checkpoint(target, iter([("a", torch.ones(3)), ("b", torch.ones(3))]), source, max_shard_bytes=12)
    (target / "notes.txt").write_text("mine")
    (target / "of_others/deeper").mkdir(parents=True)
    others = [target / "of_others/common.pt", target / "of_others/deeper/model.safetensors"]
    for path in others:
        path.write_text("theirs")
    write_hf_checkpoint(target, iter([("a", torch.zeros(3))]), source)
    assert (target / "notes.txt").read_text() == "mine"
    assert [path.read_text() for path in others] == ["theirs"] * 2
    assert [path.name for path in target.glob("*.safetensors")] == ["model-00001-of-00001.safetensors"]
    assert torch.equal(read_back(target)[1]["a"], torch.zeros(3))


def test_a_name_that_occurs_twice_is_an_error(tmp_path, source):
    with pytest.raises(RunError, match="a occurs twice"):
        write_hf_checkpoint(tmp_path / "out", iter([("a", torch.ones(1)), ("a", torch.ones(1))]), source)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("writers", "of_one", "files"),
    [(1, 1, 1), (2, 1, 2), (4, 1, 4), (4, 80, 2), (4, 1000, 1)],
)
def test_the_ranks_that_write_share_the_bytes_of_a_shard(monkeypatch, tmp_path, source, writers, of_one, files):
    monkeypatch.setattr(hf_writer, "_LEAST_SHARD_BYTES", of_one)
    tensors = [(name, torch.ones(10)) for name in "abcd"]

    def exchange(value):
        return [True] * writers + [False] if value is True else [value]

    write_hf_checkpoint(tmp_path / "out", iter(tensors), source, max_shard_bytes=160, exchange=exchange)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == files


@pytest.mark.parametrize(
    ("rank", "message"), [(0, "But the new one is in place, whole"), (1, "The new one may be in place already")]
)
def test_a_rank_that_is_lost_after_the_last_shard_takes_no_checkpoint_away(tmp_path, source, rank, message):
    exchanged = []

    def exchange(value):
        exchanged.append(value)
        if len(exchanged) == 5:
            raise ConnectionError("rank 2 was lost")
        return [value]

    if rank == 1:
        (tmp_path / ".out.writing").mkdir()
    with pytest.raises(RunError, match=rf"rank 2 was lost\. {message}$"):
        write_hf_checkpoint(tmp_path / "out", iter([("a", torch.ones(1))]), source, rank=rank, exchange=exchange)
    if rank == 0:
        assert list(read_back(tmp_path / "out")[1]) == ["a"]


def test_nothing_to_write_is_an_error(tmp_path, source):
    with pytest.raises(RunError, match="no tensors"):
        write_hf_checkpoint(tmp_path / "out", iter([]), source)


def test_shards_are_asked_for_by_name_because_a_listing_may_lack_them(monkeypatch, tmp_path, source):
    monkeypatch.setattr(hf_writer.Path, "glob", lambda self, pattern: iter(()))
    write_hf_checkpoint(tmp_path / "out", iter([("a", torch.ones(1))]), source)
    assert list(read_back(tmp_path / "out")[1]) == ["a"]


def test_what_a_killed_run_has_left_is_removed(tmp_path, source):
    left = tmp_path / ".out.writing"
    left.mkdir()
    (left / "shard-00009-00000").write_bytes(b"a part of a shard")
    write_hf_checkpoint(tmp_path / "out", iter([("a", torch.ones(1))]), source)
    assert list(read_back(tmp_path / "out")[1]) == ["a"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def _of_all_ranks(value):
    import torch.distributed as dist

    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


OF_RANKS = [["a", "b", "c"], ["d", "e"], ["f"]]
TROUBLES = (None, "full", "make", "again", "another", "left")


def write_with_others(directory, trouble=None):
    """The first two of three ranks write; 80 bytes, shared by both, are a tensor per shard.

    Returns what this rank made, and what it was told.

    `trouble` befalls the second one: its disk is "full", it cannot "make" a tensor, it writes one of the first rank's "again",
    its disk is "another" than the first one's, also with what a killed run has "left" there, or it is "killed".
    """
    import os
    import signal

    import torch.distributed as dist

    from slime.weights import hf_writer

    rank, made = dist.get_rank(), []
    write_shard = hf_writer.write_shard
    hf_writer._LEAST_SHARD_BYTES = 1

    def troubled(path, bucket):
        if trouble == "full" and path.name.endswith("00000"):
            raise OSError(28, "No space left on device")
        if trouble == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return write_shard(path, bucket)

    def tensors():
        for name in OF_RANKS[rank]:
            if trouble == "make" and name == "e":
                raise RuntimeError("out of memory")
            made.append(name)
            yield ("a" if trouble == "again" and name == "e" else name), torch.full((10,), float(ord(name)))

    target = directory / "out"
    if rank == 1:
        hf_writer.write_shard = troubled
        if trouble in ("another", "left"):
            target = directory / "another" / "out"
        if trouble == "left":
            (directory / "another" / ".out.writing").mkdir(parents=True)
    try:
        hf_writer.write_hf_checkpoint(
            target,
            tensors(),
            directory / "source",
            80,
            rank=rank,
            writes=rank < 2,
            exchange=_of_all_ranks,
        )
    except RunError as error:
        return made, str(error)
    finally:
        hf_writer.write_shard = write_shard
    return made, None


def write_often(directory):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return {trouble: write_with_others(directory, trouble) for trouble in TROUBLES}


def test_ranks_share_the_shards_and_fail_together(tmp_path, source):
    told = run_distributed(write_often, 3, (tmp_path,))
    index, written = read_back(tmp_path / "out")
    assert {name: tensor[0].item() for name, tensor in written.items()} == {name: ord(name) for name in "abcde"}
    assert index["weight_map"] == {name: f"model-0000{i + 1}-of-00005.safetensors" for i, name in enumerate("abcde")}
    assert index["metadata"]["total_size"] == 5 * 40
    for trouble, message in {
        "full": "rank 1: .*No space left on device",
        "make": "rank 1: out of memory",
        "again": "rank 0: tensor a occurs twice",
        "another": "rank 1: .*another/.out.writing, which rank 0 has made, is not there: .* disk that all nodes share",
        "left": "rank 0: .*shard-00001-00000, which another rank has written, is not there: .* disk that all nodes share",
    }.items():
        errors = [of_rank[trouble][1] for of_rank in told]
        assert all(re.search(message + ".* untouched$", error) for error in errors), errors
    # Also after an error all tensors are made, with the help of others.
    for trouble in set(TROUBLES) - {"make"}:
        assert [of_rank[trouble][0] for of_rank in told] == OF_RANKS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "out", "source"], (
        "the first one is there still"
    )


def write_until_killed(directory):
    """The second rank lives in a process of its own."""
    import os
    from datetime import timedelta

    import torch.distributed as dist

    if os.environ["RANK"] == "1" and (child := os.fork()):
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    return write_with_others(directory, "killed")


def test_a_rank_that_is_killed_fails_the_others_and_leaves_nothing(tmp_path, source):
    first, killed, third = run_distributed(write_until_killed, 3, (tmp_path,))
    assert killed == -9
    for made, error in (first, third):
        assert made in OF_RANKS and re.search(
            "out could not be written: .* What was there is untouched", error, re.DOTALL
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


STACK = "model.layers.0.mlp.experts"


def a_layer(source, form):
    """Of two experts, 3 wide, by expert; and what a checkpoint has that stacks them as `source`, which is written, does."""
    parts = {"gate": torch.randn(2, 3, 4), "up": torch.randn(2, 3, 4), "down": torch.randn(2, 4, 3)}
    apart = {
        f"{STACK}.{expert}.{part}_proj.weight": of_all[expert] for expert in (1, 0) for part, of_all in parts.items()
    }
    gate_up = torch.cat([parts["gate"], parts["up"]], dim=1)
    whole = {f"{STACK}.gate_up_proj": gate_up, f"{STACK}.down_proj": parts["down"]}
    exchanged = {name: tensor.mT.contiguous() for name, tensor in whole.items()}
    expected = {"published": exchanged, "exchanged": exchanged, "as computed with": whole, "apart": apart}[form]
    for path in source.glob("*.safetensors*"):
        path.unlink()
    if form != "published":
        save_file({name: torch.zeros_like(tensor) for name, tensor in expected.items()}, source / "model.safetensors")
    text = {"hidden_size": 4, "num_experts": 2}
    (source / "config.json").write_text(json.dumps({"model_type": "qwen3_vl_moe", "text_config": text}))
    return apart, expected


@pytest.mark.parametrize("form", ["published", "exchanged", "as computed with", "apart"])
def test_experts_are_stacked_as_in_the_source(tmp_path, source, form):
    """One without weights has a config alone."""
    apart, expected = a_layer(source, form)
    tensors = {"a": torch.ones(2), **apart, "b": torch.zeros(2)}
    write_hf_checkpoint(tmp_path / "out", iter(tensors.items()), source)
    _, written = read_back(tmp_path / "out")
    assert written.keys() == {"a", "b", *expected}
    assert all(written[name].equal(tensor) for name, tensor in expected.items())


def test_a_stack_that_lacks_an_expert_is_not_written(tmp_path, source):
    apart, _ = a_layer(source, "exchanged")
    del apart[f"{STACK}.1.up_proj.weight"]
    with pytest.raises(RunError, match=r"layers\.0\.mlp\.experts\.gate_up_proj lacks expert 1\. What was there"):
        write_hf_checkpoint(tmp_path / "out", iter(apart.items()), source)


def test_ranks_that_only_help_stack_nothing(tmp_path, source):
    apart, _ = a_layer(source, "exchanged")
    given = []
    half = (given.append(name) or (name, tensor) for name, tensor in itertools.islice(apart.items(), 3))
    with pytest.raises(RunError, match="there are no tensors to write"):
        write_hf_checkpoint(tmp_path / "out", half, source, writes=False)
    assert len(given) == 3
