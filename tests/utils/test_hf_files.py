"""The sizes of checkpoints."""

from slime.utils.hf_files import checkpoint_bytes


def test_the_size_is_that_of_the_files_that_are_loaded(tmp_path):
    assert checkpoint_bytes(None) == checkpoint_bytes(str(tmp_path / "nowhere")) == checkpoint_bytes(str(tmp_path)) == 0
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert checkpoint_bytes(str(tmp_path)) == 0
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(9))
    assert checkpoint_bytes(str(tmp_path)) == 9
    for part in (1, 2):
        (tmp_path / f"model-{part}.safetensors").write_bytes(bytes(5))
    assert checkpoint_bytes(str(tmp_path)) == 10
