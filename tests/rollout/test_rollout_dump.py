import datetime
import decimal
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slime.rollout.forge_load import generate_rollout as replay
from slime.rollout.rollout_dump import load_rollout, save_rollout
from slime.utils import plain_files
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


def test_under_another_name_a_dump_is_json_and_safetensors(tmp_path):
    template = str(tmp_path / "dump_{rollout_id}.json")
    written = samples()
    written[0].metadata, written[0].note = {"a": (1, [2.5]), 2: None, "__b": "c"}, np.arange(3)
    path = save_rollout(template, 3, written)
    dump = json.loads(path.read_text())
    assert dump["rollout_id"] == 3 and dump["samples"][1]["metadata"] == {"kind": "toy"}
    tensors = load_file(f"{path}.safetensors")
    assert tensors[dump["samples"][1]["tokens"]["__tensor__"]].tolist() == [1, 2, 4]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["dump_3.json", "dump_3.json.safetensors"]
    loaded = load_rollout(template, 3)
    assert [sample.to_dict() for sample in loaded[1:]] == [sample.to_dict() for sample in samples()[1:]]
    assert loaded[0].metadata == {"a": [1, [2.5]], 2: None, "__b": "c"} and loaded[0].note == [0, 1, 2]
    path.write_text("{")
    with pytest.raises(UserError, match="dump_3.json is no readable rollout dump .JSONDecodeError"):
        load_rollout(template, 3)
    torch.save({"rollout_id": 3, "samples": []}, path)
    assert load_rollout(template, 3) == [], "what torch wrote is read under any name"


@pytest.mark.parametrize("ends_at", range(4))
def test_a_dump_that_is_written_again_is_never_half_of_one_and_half_of_another(tmp_path, monkeypatch, ends_at):
    template = str(tmp_path / "{rollout_id}.json")
    save_rollout(template, 3, samples(2))
    steps = iter(range(9))

    def until_it_ends(work):
        def step(*arguments, **keywords):
            if next(steps) == ends_at:
                raise KeyboardInterrupt
            return work(*arguments, **keywords)

        return step

    for owner, name in ((plain_files, "_written"), (plain_files.os, "replace")):
        monkeypatch.setattr(owner, name, until_it_ends(getattr(owner, name)))
    with pytest.raises(KeyboardInterrupt):
        save_rollout(template, 3, samples(3))
    monkeypatch.undo()
    if ends_at < 2:
        assert [sample.to_dict() for sample in load_rollout(template, 3)] == [one.to_dict() for one in samples(2)]
    else:
        with pytest.raises(UserError, match="3.json does not exist"):
            load_rollout(template, 3)


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


@pytest.mark.parametrize(
    "value", [datetime.datetime(2024, 1, 2), decimal.Decimal("1.5"), {1, 2}, object(), np.array(["a"])]
)
def test_values_that_would_not_load_again_are_refused_when_saving(tmp_path, value):
    (sample,) = samples(1)
    sample.metadata["when"] = [1, {"deep": value}]
    match = rf"--save-debug-rollout-data: sample 0: metadata\['when'\]\[1\]\['deep'\] is a {type(value).__name__}( of <U1)?;"
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


def replaying(template, *sets):
    configs = [SimpleNamespace(name=name) for name in sets]
    return SimpleNamespace(
        load_forge_rollout_data=template and str(template),
        eval_datasets=configs,
        reward_key="score",
        eval_reward_key=None,
    )


def test_dumps_are_handed_out_by_rollout_and_that_of_rollout_0_where_there_is_none(tmp_path):
    template = tmp_path / "{rollout_id}.pt"
    save_rollout(str(template), 0, samples(4))
    save_rollout(str(template), 2, samples(3))
    groups = [replay(replaying(template), rollout_id, None).samples for rollout_id in (0, 1, 2)]
    assert [[[s.index for s in group] for group in step] for step in groups] == [
        [[0, 1], [2, 3]],
        [[0, 1], [2, 3]],
        [[0, 1], [2]],
    ]
    groups[0][0][0].metadata["kind"] = "changed"
    assert replay(replaying(template), 0, None).samples[0][0].metadata == {"kind": "toy"}, "the same data each time"


def test_a_plain_path_is_the_same_data_each_time_and_samples_without_group_are_groups(tmp_path):
    ungrouped = samples(2)
    for sample in ungrouped:
        sample.group_index = None
    path = save_rollout(str(tmp_path / "one.pt"), 0, ungrouped)
    for rollout_id in (0, 9):
        assert [[s.index for s in g] for g in replay(replaying(path), rollout_id, None).samples] == [[0], [1]]
    with pytest.raises(UserError, match="has no place for one; give --eval-function-path"):
        replay(replaying(path, "aime"), 0, None, evaluation=True)


def test_an_evaluation_is_replayed_by_its_sets_and_never_another_one(tmp_path):
    template = tmp_path / "{rollout_id}.pt"
    mixed = samples(3)
    mixed[1].metadata["source_name"] = "gpqa"
    save_rollout(str(template), "eval_5", mixed)
    save_rollout(str(template), 0, samples(1))
    data = replay(replaying(template, "aime"), 5, None, evaluation=True).data
    assert {name: [s.index for s in result["samples"]] for name, result in data.items()} == {
        "aime": [0, 2],
        "gpqa": [1],
    }
    assert data["aime"]["rewards"] == [1.0, 1.0] and data["aime"]["truncated"] == [True, True]
    with pytest.raises(UserError, match="--load-forge-rollout-data: .*eval_6.pt does not exist"):
        replay(replaying(template, "aime"), 6, None, evaluation=True)


def test_replaying_needs_a_dump(tmp_path):
    with pytest.raises(UserError, match="give its path by --load-forge-rollout-data"):
        replay(replaying(None), 0, None)
    with pytest.raises(UserError, match="--load-forge-rollout-data: .*0.pt does not exist"):
        replay(replaying(tmp_path / "{rollout_id}.pt"), 3, None)
