"""The dump of what a rollout is trained on."""

import pytest
import torch
import torch.distributed as dist

from slime.training.train_dump import save_train_data


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def shard(**changes):
    """Two samples of one data-parallel rank; their column is a view, as it is in training."""
    column = torch.arange(5, dtype=torch.float32)
    return {
        "tokens": [torch.tensor([1, 2, 3]), torch.tensor([4, 5])],
        "advantages": [column[:3], column[3:]],
        "sample_indices": [7, 2],
        "partition": [0, 1],
        "micro_batch_indices": [[0], [1]],
        "num_microbatches": [2],
        "global_batch_sizes": [2],
        "raw_reward": [0.5, 1.0],
        **changes,
    }


def test_directories_are_made_and_both_placeholders_filled_in(tmp_path, group):
    save_train_data(f"{tmp_path}/new/dir/{{rollout_id}}_{{rank}}.pt", 3, shard(), group, 0)
    (path,) = (tmp_path / "new/dir").iterdir()
    assert path.name == "3_0.pt"
    dump = torch.load(path, weights_only=True)
    assert (dump["format_version"], dump["rollout_id"], dump["rank"], dump["raw_reward"]) == (2, 3, 0, [0.5, 1.0])
    assert [sample["sample_indices"] for sample in dump["samples"]] == [2, 7]
    assert dump["samples"][0]["advantages"].tolist() == [3.0, 4.0]
    assert dump["samples"][0]["advantages"].untyped_storage().nbytes() == 8
    assert dump["dp_shards"][0]["sample_indices"] == [7, 2]


def test_a_field_needs_one_entry_per_sample(tmp_path, group):
    data = shard(advantages=[torch.zeros(3)])
    with pytest.raises(ValueError, match="`advantages` has 1 entries for 2 samples; one tensor per sample"):
        save_train_data(f"{tmp_path}/{{rollout_id}}.pt", 0, data, group, 0)
