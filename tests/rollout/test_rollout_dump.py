import pytest
import torch

from slime.rollout.rollout_dump import load_rollout, save_rollout
from slime.utils.errors import UserError
from slime.utils.types import Sample


def samples(count=7):
    made = []
    for index in range(count):
        sample = Sample(index=index, group_index=index // 2, prompt="p", tokens=[1, 2, 3 + index], response_length=2)
        sample.rollout_log_probs, sample.loss_mask, sample.reward = [-1.0, -0.5], [1, 0], {"score": 1.0}
        sample.metadata = {"kind": "toy"}
        sample.status = Sample.Status.TRUNCATED
        made.append(sample)
    return made


def test_round_trip(tmp_path):
    template = str(tmp_path / "dump_{rollout_id}.pt")
    path = save_rollout(template, 3, samples())
    assert path.name == "dump_3.pt"
    dump = torch.load(path, weights_only=True)
    assert dump["rollout_id"] == 3 and torch.is_tensor(dump["samples"][0]["tokens"])
    assert [sample.to_dict() for sample in load_rollout(template, 3)] == [sample.to_dict() for sample in samples()]


def test_subsample_takes_first_and_last_halves(tmp_path):
    template = str(tmp_path / "{rollout_id}.pt")
    save_rollout(template, 0, samples(8))
    assert [s.index for s in load_rollout(template, 0, 0.5)] == [0, 1, 6, 7]


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(UserError, match="0.pt does not exist"):
        load_rollout(str(tmp_path / "{rollout_id}.pt"), 0)
    torch.save([1], tmp_path / "1.pt")
    with pytest.raises(UserError, match="is no rollout dump"):
        load_rollout(str(tmp_path / "{rollout_id}.pt"), 1)
