import json

import pytest
import torch
from safetensors.torch import load_file

from slime.utils.errors import RunError, UserError
from slime.weights.hf_writer import write_hf_checkpoint


@pytest.fixture
def source(tmp_path):
    directory = tmp_path / "source"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"):
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

    with pytest.raises(OSError, match="no space left"):
        write_hf_checkpoint(target, failing(), source, max_shard_bytes=1)
    assert torch.equal(read_back(target)[1]["a"], torch.ones(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "source"]


def test_only_the_weight_files_of_an_old_checkpoint_are_replaced(tmp_path, source):
    target = tmp_path / "checkpoint"
    write_hf_checkpoint(target, iter([("a", torch.ones(3)), ("b", torch.ones(3))]), source, max_shard_bytes=12)
    (target / "notes.txt").write_text("mine")
    write_hf_checkpoint(target, iter([("a", torch.zeros(3))]), source)
    assert (target / "notes.txt").read_text() == "mine"
    assert [path.name for path in target.glob("*.safetensors")] == ["model-00001-of-00001.safetensors"]
    assert torch.equal(read_back(target)[1]["a"], torch.zeros(3))


def test_a_name_that_occurs_twice_is_an_error(tmp_path, source):
    with pytest.raises(RunError, match="a occurs twice"):
        write_hf_checkpoint(tmp_path / "out", iter([("a", torch.ones(1)), ("a", torch.ones(1))]), source)
    assert not (tmp_path / "out").exists()


def test_nothing_to_write_is_an_error(tmp_path, source):
    with pytest.raises(RunError, match="no tensors"):
        write_hf_checkpoint(tmp_path / "out", iter([]), source)
