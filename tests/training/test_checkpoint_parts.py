"""Parts of a checkpoint that all backends read."""

import pytest
import torch

from slime.training import checkpoint_parts
from slime.training.checkpoint_parts import load_generators, save_generators
from slime.utils.errors import UserError


def test_generators_whose_file_is_damaged_are_told_with_the_way_out(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint_parts.dist, "get_rank", lambda: 3)
    save_generators(tmp_path, {"own": torch.arange(4, dtype=torch.uint8)})
    expected = torch.rand(2)
    assert load_generators(tmp_path)["own"].tolist() == [0, 1, 2, 3]
    assert torch.equal(torch.rand(2), expected)
    file = tmp_path / "rng_00003.safetensors"
    whole = file.read_bytes()
    for length in (0, 7, 40, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(UserError, match=f"{file} cannot be read .*--no-load-rng"):
            load_generators(tmp_path)
    file.unlink()
    assert load_generators(tmp_path) == {} and "saved without random generators" in caplog.text


@pytest.mark.parametrize(("rank", "seed", "told"), [(0, 9, True), (0, 5, False), (1, 9, False)])
def test_who_gives_another_seed_hears_once_that_generators_keep_theirs(tmp_path, monkeypatch, caplog, rank, seed, told):
    monkeypatch.setattr(checkpoint_parts.dist, "get_rank", lambda: rank)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        torch.rand(3)
        save_generators(tmp_path, {})
        expected = torch.rand(2)
        torch.manual_seed(seed)
        load_generators(tmp_path)
        assert torch.equal(torch.rand(2), expected)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [str(tmp_path)] * told
    assert not told or "--seed 5 " in caplog.text and "--no-load-rng" in caplog.text
