import json

import pytest
import torch
from safetensors.torch import save_file

from slime.utils.errors import UserError
from slime.weights.hf_reader import SafetensorsDirectory, StoredTensor, places_of_checkpoint

TENSORS = {
    "matrix": torch.arange(24, dtype=torch.bfloat16).view(6, 4),
    "vector": torch.arange(5.0),
}


@pytest.fixture
def directory(tmp_path):
    save_file({"matrix": TENSORS["matrix"]}, tmp_path / "one.safetensors")
    save_file({"vector": TENSORS["vector"]}, tmp_path / "two.safetensors")
    return tmp_path


@pytest.mark.parametrize("has_index", [False, True])
def test_tensors_of_all_files(directory, has_index):
    if has_index:
        files = {"matrix": "one.safetensors", "vector": "two.safetensors"}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    source = SafetensorsDirectory(directory)
    assert source.names() == set(TENSORS)
    for name, tensor in TENSORS.items():
        stored = source.tensor(name)
        assert (stored.shape, stored.dtype) == (tensor.shape, tensor.dtype)
        assert stored[:].equal(tensor) and stored[:].dtype == tensor.dtype


@pytest.mark.parametrize(
    "index",
    [
        slice(2, 5),
        slice(0, 0),
        slice(6, 6),
        (slice(None), slice(1, 3)),
        (slice(1, 2), slice(0, 4)),
        (slice(6, 6), slice(0, 4)),
    ],
)
def test_rows_and_columns_are_those_of_the_tensor(directory, index):
    assert SafetensorsDirectory(directory).tensor("matrix")[index].equal(TENSORS["matrix"][index])


def test_nothing_is_read_before_it_is_indexed(directory, monkeypatch):
    def read(stored, index):
        raise AssertionError("read")

    monkeypatch.setattr(StoredTensor, "__getitem__", read)
    assert SafetensorsDirectory(directory).tensor("matrix").shape == (6, 4)


def test_an_index_that_names_what_a_file_has_not_is_told_by_file_and_tensor(directory):
    files = {"matrix": "two.safetensors", "vector": "three.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    source = SafetensorsDirectory(directory)
    with pytest.raises(UserError, match="two.safetensors: tensor matrix cannot be read"):
        source.tensor("matrix")
    with pytest.raises(UserError, match="three.safetensors cannot be read"):
        source.tensor("vector")
    with pytest.raises(UserError, match=r"three.safetensors is not there, and the index .* names it; get"):
        places_of_checkpoint(directory)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"matrix": "two.safetensors"}}))
    with pytest.raises(UserError, match="index.json does not fit two.safetensors: it has no matrix"):
        places_of_checkpoint(directory)
    (directory / "model.safetensors.index.json").write_text("{")
    for read in (SafetensorsDirectory, places_of_checkpoint):
        with pytest.raises(UserError, match="index.json cannot be read"):
            read(directory)


def numbered(directory, *names):
    for name in names:
        save_file({f"tensor of {name}": torch.ones(2)}, directory / name)


@pytest.mark.parametrize("read", [SafetensorsDirectory, places_of_checkpoint])
def test_a_file_that_is_missing_is_known_by_the_numbers_of_the_others(tmp_path, read):
    """A download that broke off may have left the first of them, and no index."""
    numbered(tmp_path, "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors")
    with pytest.raises(UserError, match=rf"^{tmp_path}/model-00002-of-00003.safetensors is not there, "):
        read(tmp_path)
    numbered(tmp_path, "model-00002-of-00003.safetensors", "other-0-of-2.safetensors", "other-1-of-2.safetensors")
    read(tmp_path)


@pytest.mark.parametrize(
    "weight_map", ["{}", "null", '["one.safetensors"]', '{"matrix": 1}', '{"matrix": ["one.safetensors"]}']
)
def test_an_index_without_names_of_files_is_refused(directory, weight_map):
    (directory / "model.safetensors.index.json").write_text(f'{{"weight_map": {weight_map}}}')
    for read in (SafetensorsDirectory, places_of_checkpoint):
        with pytest.raises(UserError, match="index.json cannot be read: it is no index"):
            read(directory)


HEADERS = [
    "[1, 2]", '"text"', '{"a": 1}', '{"a": {"shape": [1]}}',
    '{"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}',
]  # fmt: skip


@pytest.mark.parametrize("header", HEADERS)
def test_a_file_with_the_header_of_no_safetensors_file_is_named(tmp_path, header):
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(UserError, match="model.safetensors cannot be read: it is no safetensors file"):
        places_of_checkpoint(tmp_path)


def test_what_stands_in_the_place_of_a_file_is_told(directory):
    """A directory, a link that leads nowhere, as in a copy of a cache, and what Git leaves without its large files."""
    file = directory / "one.safetensors"
    file.unlink()
    file.mkdir()
    with pytest.raises(UserError, match="one.safetensors cannot be read"):
        places_of_checkpoint(directory)
    file.rmdir()
    file.symlink_to(directory / "blobs/one")
    with pytest.raises(UserError, match=r"one.safetensors is not there: it is a link to .*/blobs/one; get") as error:
        places_of_checkpoint(directory)
    assert "index" not in str(error.value)
    file.unlink()
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 5020144\n")
    with pytest.raises(UserError, match="one.safetensors cannot be read: .*git lfs pull"):
        places_of_checkpoint(directory)


def test_a_directory_without_weights_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds no \*.safetensors"):
        SafetensorsDirectory(tmp_path)


def test_one_tensor_of_all_experts_is_given_expert_by_expert(tmp_path):
    """Rows of gate come before those of up; what is indexed is read of the one expert alone."""
    gate_up, down = torch.arange(48.0).view(2, 6, 4), torch.arange(24.0).view(2, 4, 3)
    save_file(
        {"l.experts.gate_up_proj": gate_up, "l.experts.down_proj": down, "l.gate.weight": torch.ones(2, 4)},
        tmp_path / "one.safetensors",
    )
    source = SafetensorsDirectory(tmp_path)
    parts = {
        f"l.experts.{expert}.{part}_proj.weight": tensor
        for expert in (0, 1)
        for part, tensor in (("gate", gate_up[expert, :3]), ("up", gate_up[expert, 3:]), ("down", down[expert]))
    }
    assert source.names() == {"l.gate.weight", *parts}
    for name, tensor in parts.items():
        stored = source.tensor(name)
        assert (stored.shape, stored.dtype) == (tensor.shape, tensor.dtype)
        for index in (slice(None), ..., slice(1, 2), (slice(None), slice(1, 3)), slice(2, 2)):
            assert stored[index].equal(tensor[index])


def stacks(directory, hidden_size, *, is_exchanged, **changes):
    """A checkpoint of a family that stacks two experts of one layer, 3 wide; returns them as they are one by one."""
    parts = {"gate": torch.randn(2, 3, 4), "up": torch.randn(2, 3, 4), "down": torch.randn(2, 4, 3)}
    stored = {"gate_up_proj": torch.cat([parts["gate"], parts["up"]], dim=1), "down_proj": parts["down"]}
    save_file(
        {f"l.experts.{name}": tensor.mT.contiguous() if is_exchanged else tensor for name, tensor in stored.items()},
        directory / "one.safetensors",
    )
    text = {"hidden_size": hidden_size, "num_experts": 2}
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3_vl_moe", "text_config": text, **changes}))
    return {
        f"l.experts.{expert}.{part}_proj.weight": of_expert
        for part, of_all in parts.items()
        for expert, of_expert in enumerate(of_all)
    }


@pytest.mark.parametrize("is_exchanged", [True, False])
def test_experts_that_a_family_stacks_are_read_either_way_round(tmp_path, is_exchanged):
    expected = stacks(tmp_path, 4, is_exchanged=is_exchanged)
    source = SafetensorsDirectory(tmp_path)
    assert source.names() == expected.keys()
    for name, tensor in expected.items():
        stored = source.tensor(name)
        assert (stored.shape, stored.dtype) == (tensor.shape, tensor.dtype)
        for index in (slice(None), ..., slice(1, 2), (slice(None), slice(1, 3)), slice(2, 2)):
            assert stored[index].equal(tensor[index])


@pytest.mark.parametrize("hidden_size", [6, 5, None])
def test_stacked_experts_whose_rows_nothing_tells_from_their_columns_are_refused(tmp_path, hidden_size):
    stacks(tmp_path, hidden_size, is_exchanged=True)
    save_file({"l.experts.gate_up_proj": torch.zeros(2, 6, 6)}, tmp_path / "one.safetensors")
    with pytest.raises(UserError, match=r"gate_up_proj is \[2, 6, 6\], and hidden_size .* does not tell"):
        SafetensorsDirectory(tmp_path)
    # Of other families one form is known.
    stacks(tmp_path, hidden_size, is_exchanged=False, model_type="qwen3_5_moe")
    assert len(SafetensorsDirectory(tmp_path).names()) == 6
