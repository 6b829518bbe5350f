"""Saved in parts and mapped when read: the bytes are those that torch writes, and what it wrote is read."""

import io
import pickle

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from slime.models.families import ALL
from slime.models.tensor_layouts import PerKeyHead, TensorSizes
from slime.utils.errors import UserError
from tools.conversion.torch_dist_files import TorchDistDirectory, save_in_parts, split_parts


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
        (found,) = stored.read(key, ())
        assert found.equal(state[key])
    (found,) = stored.read("decoder.layers.mlp.weight", (1,))
    assert found.equal(state["decoder.layers.mlp.weight"][1])
    stored.require_files()


LAYOUTS = {f"{type(rule.layout).__name__} {vars(rule.layout)}": rule.layout for family in ALL for rule in family.rules}
SIZES = TensorSizes(
    num_attention_heads=8, num_query_groups=2, vocab_size=45, padded_vocab_size=48, linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=3, linear_value_head_dim=3, dsa_indexer_head_dim=6, qk_pos_emb_head_dim=2,
)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("cuts", [1, 2, (1, 5)])
def test_rows_in_parts_are_split_as_whole_ones_and_not_copied(layout, cuts):
    rows = sum(map(sum, layout._widths(SIZES))) * 2 if isinstance(layout, PerKeyHead) else 120
    whole = torch.randn(rows, 4)
    expected = layout.split(whole, SIZES)
    found = split_parts(layout, whole.tensor_split(cuts), SIZES)
    assert len(found) == len(expected)
    for cut, tensor in zip(found, expected, strict=True):
        assert torch.cat(cut).equal(tensor)
        storages = {part.untyped_storage().data_ptr() for part in cut}
        assert layout.moves_columns or storages == {whole.untyped_storage().data_ptr()}


class Harmful:
    def __reduce__(self):
        return (open, ("harm", "w"))


def test_metadata_runs_nothing_of_what_it_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(UserError, match=".metadata cannot be read"):
        TorchDistDirectory(tmp_path)
    assert not (tmp_path / "harm").exists()
