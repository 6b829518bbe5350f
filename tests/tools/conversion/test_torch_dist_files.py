"""Saved in parts and mapped when read: the bytes are those that torch writes, and what it wrote is read."""

import io
import pickle

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from slime.utils.errors import UserError
from tools.conversion.torch_dist_files import TorchDistDirectory, save_in_parts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_saved_in_parts_is_what_torch_saves(dtype):
    options = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        tensor, whole, parts = torch.randn(1, 7, 300).to(dtype), io.BytesIO(), io.BytesIO()
        torch.save(tensor, whole)
        save_in_parts(parts, tensor.shape, tensor.flatten().split(500))
        assert parts.getvalue() == whole.getvalue()
        with pytest.raises(RuntimeError):
            save_in_parts(io.BytesIO(), tensor.shape, tensor.flatten().split(500)[1:])
    finally:
        torch.serialization.set_crc32_options(options)


def test_what_torch_has_written_is_read(tmp_path):
    """Also where numbers lie at odd places, transposed, or of several dtypes."""
    state = {
        "odd": torch.arange(3, dtype=torch.uint8),
        "bf16": torch.randn(5, 3).bfloat16(),
        "transposed": torch.randn(4, 6).T,
        "decoder.layers.mlp.weight": torch.randn(2, 3, 4),
        "nothing": torch.empty(0, 4),
        "optimizer.state": torch.randn(2),
    }
    save(state, storage_writer=FileSystemWriter(tmp_path, single_file_per_rank=True), no_dist=True)
    stored = TorchDistDirectory(tmp_path)
    assert stored.tensors.keys() == state.keys() - {"optimizer.state"}
    for key in stored.tensors:
        assert stored.read(key, ()).equal(state[key])
    assert stored.read("decoder.layers.mlp.weight", (1,)).equal(state["decoder.layers.mlp.weight"][1])
    stored.require_files()


class Harmful:
    def __reduce__(self):
        return (open, ("harm", "w"))


def test_metadata_runs_nothing_of_what_it_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(UserError, match=".metadata cannot be read"):
        TorchDistDirectory(tmp_path)
    assert not (tmp_path / "harm").exists()
