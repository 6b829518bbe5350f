import datetime
import decimal

import numpy as np
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
    with pytest.raises(UserError, match="0.pt does not exist$"):
        load_rollout(str(tmp_path / "{rollout_id}.pt"), 0)
    save_rollout(str(tmp_path / "there/{rollout_id}.pt"), 2, samples(1))
    with pytest.raises(UserError, match=r"0.pt does not exist; there is 2.pt … 2.pt; --num-rollout and"):
        load_rollout(str(tmp_path / "there/{rollout_id}.pt"), 0)
    torch.save([1], tmp_path / "1.pt")
    with pytest.raises(UserError, match="is no rollout dump"):
        load_rollout(str(tmp_path / "{rollout_id}.pt"), 1)
    (tmp_path / "2.pt").write_bytes(b"not a dump")
    torch.save({"samples": [{"metadata": datetime.date(2024, 1, 2)}]}, tmp_path / "3.pt")
    for rollout_id in (2, 3):
        with pytest.raises(UserError, match=f"^--load-debug-rollout-data: .*{rollout_id}.pt is no readable") as caught:
            load_rollout(str(tmp_path / "{rollout_id}.pt"), rollout_id)
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("value", [datetime.datetime(2024, 1, 2), decimal.Decimal("1.5"), {1, 2}, object()])
def test_values_that_would_not_load_again_are_refused_when_saving(tmp_path, value):
    (sample,) = samples(1)
    sample.metadata["when"] = [1, {"deep": value}]
    match = rf"--save-debug-rollout-data: sample 0: metadata\['when'\]\[1\]\['deep'\] is a {type(value).__name__};"
    with pytest.raises(UserError, match=match):
        save_rollout(str(tmp_path / "{rollout_id}.pt"), 0, [sample])
    assert list(tmp_path.iterdir()) == []


def test_plain_values_and_arrays_of_users_are_kept(tmp_path):
    (sample,) = samples(1)
    sample.metadata = {"a": [1, "x", None, np.float64(0.5)], 2: (True, [1.5])}
    sample.note = np.arange(3)
    save_rollout(str(tmp_path / "{rollout_id}.pt"), 0, [sample])
    (loaded,) = load_rollout(str(tmp_path / "{rollout_id}.pt"), 0)
    assert loaded.metadata == {"a": [1, "x", None, 0.5], 2: [True, [1.5]]} and loaded.note == [0, 1, 2]
