"""States of the shipped data sources on their way to checkpoints and back."""

import copy
import json
import logging
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from slime.rollout.data_source import (
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
)
from slime.rollout.data_source_files import write_state
from slime.utils.errors import UserError
from slime.utils.sample_fields import held
from slime.utils.types import Sample
from tests.support.models.data_sources import prompts


def save_pickled(args, state):
    directory = Path(args.load) / "rollout"
    directory.mkdir(parents=True)
    torch.save(state, directory / "global_dataset_state_dict_0.pt")


class TestState:
    def test_d7_three_and_three_equal_six(self, make_args):
        def steps(source, count):
            """Each step draws three groups and gives one back, half generated."""
            seen = []
            for _ in range(count):
                groups = source.get_samples(3)
                seen.append([(sample.prompt, sample.index, tuple(sample.tokens)) for g in groups for sample in g])
                partial = groups[1][0]
                partial.tokens = partial.tokens or [1]
                partial.append_response_tokens(
                    tokens=[partial.index],
                    log_probs=[-0.25],
                    meta_info={"finish_reason": {"type": "abort"}, "weight_version": "5"},
                )
                source.add_samples([groups[1]])
            return seen

        args = make_args(5, rollout_shuffle=True)
        whole = steps(RolloutDataSourceWithBuffer(args), 6)
        first = RolloutDataSourceWithBuffer(args)
        first.update_metadata({"round": 3})
        start = steps(first, 3)
        first.save(2)
        resumed = RolloutDataSourceWithBuffer(args)
        resumed.load(2)
        assert resumed.buffer == first.buffer and resumed.buffer[0][0].weight_version_spans == [("5", 0, 1)]
        assert resumed.get_metadata() == {"round": 3}
        assert start + steps(resumed, 3) == whole

    def test_a_snapshot_shares_nothing_with_the_source(self, make_args):
        source = RolloutDataSource(make_args())
        source.update_metadata({"seen": [1]})
        state = source.state_dict()
        resumed = RolloutDataSource(make_args())
        resumed.load_state_dict(state)
        for one in (source, resumed):
            one.get_metadata()["seen"].append(2)
        assert state["metadata"] == {"seen": [1]}

    def test_a_source_that_has_drawn_takes_the_order_of_the_state(self, make_args):
        saved = RolloutDataSource(make_args(8, rollout_shuffle=True))
        saved.get_samples(3)
        resumed = RolloutDataSource(make_args(8, rollout_shuffle=True, rollout_seed=7))
        resumed.get_samples(1)
        resumed.load_state_dict(saved.state_dict())
        assert prompts(resumed.get_samples(9)) == prompts(saved.get_samples(9))

    def test_d8_a_snapshot_of_an_earlier_rollout_can_be_saved(self, make_args):
        args = make_args(9)
        source = RolloutDataSourceWithBuffer(args)
        group = source.get_samples(2)[0]
        source.add_samples([group])
        snapshot = source.state_dict()
        group[0].metadata["later"] = 1
        source.get_samples(4)
        source.save(0, snapshot)
        resumed = RolloutDataSourceWithBuffer(args)
        resumed.load(0)
        assert resumed.buffer[0][0].metadata == {}
        assert prompts(resumed.get_samples(2)) == ["p0", "p2"] and source.buffer == []

    def test_the_directory_is_json_and_safetensors_without_pickle(self, make_args, tmp_path):
        source = RolloutDataSourceWithBuffer(make_args())
        (group,) = source.get_samples(1)
        group[0].rollout_routed_experts = np.arange(6, dtype=np.int32).reshape(1, 3, 2)[:0]
        group[0].note = {1: (np.float32(0.5), float("inf"))}
        group[1] = [group[1], Sample(tokens=[1, 2], response_length=1)]
        source.add_samples([group])
        source.save(3)
        directory = tmp_path / "checkpoint" / "rollout" / "global_dataset_state_dict_3"
        assert sorted(path.name for path in directory.iterdir()) == ["arrays.safetensors", "state.json"]
        assert [path.name for path in directory.parent.iterdir()] == [directory.name]
        state = json.loads((directory / "state.json").read_text())
        expected = {"sample_offset", "epoch_id", "sample_group_index", "sample_index", "metadata", "buffer"}
        assert expected | {"generators", "fingerprint", "format_version", "read_with", "rollout_batch_size"} == set(
            state
        )
        assert state["fingerprint"]["files"][0]["path"].endswith("prompts.jsonl")
        resumed = RolloutDataSourceWithBuffer(make_args())
        resumed.load(3)
        first, fan_out = resumed.buffer[0]
        assert first.note == {1: (0.5, float("inf"))}
        assert first.rollout_routed_experts.shape == (0, 3, 2) and first.rollout_routed_experts.dtype == np.int32
        assert [sample.tokens for sample in fan_out] == [[], [1, 2]]

    def test_tokens_are_written_as_arrays_of_nine_bytes_and_come_back_as_they_were(self, make_args, tmp_path):
        source = RolloutDataSourceWithBuffer(make_args())
        (group,) = source.get_samples(1)
        log_probs = np.random.default_rng(0).random(4000).astype(np.float32).tolist()
        for sample in group:
            sample.append_response_tokens(tokens=list(range(100_000, 104_000)), log_probs=log_probs)
        group[1].rollout_log_probs[0] = -0.1
        expected = copy.deepcopy(group)
        source.add_samples([group])
        source.save(0)
        directory = tmp_path / "checkpoint" / "rollout" / "global_dataset_state_dict_0"
        sizes = {path.name: path.stat().st_size for path in directory.iterdir()}
        # Log-probs that float32 would round take twice as much.
        assert sizes["state.json"] < 8192 and sizes["arrays.safetensors"] < (9 + 13) * 4000 + 2048
        resumed = RolloutDataSourceWithBuffer(make_args())
        resumed.load(0)
        assert all(isinstance(held(sample, "tokens"), np.ndarray) for sample in resumed.buffer[0])
        assert resumed.buffer == [expected] and resumed.buffer[0][1].rollout_log_probs[0] == -0.1

    def test_snapshots_share_the_arrays_of_the_samples(self, make_args):
        source = RolloutDataSourceWithBuffer(make_args())
        (group,) = source.get_samples(1)
        group[0].append_response_tokens(tokens=[1, 2], log_probs=[-0.5, -0.25])
        source.add_samples([group])
        first, second = source.state_dict(), source.state_dict()
        for name in ("tokens", "loss_mask", "rollout_log_probs"):
            arrays = [state["buffer"][0][0][name] for state in (first, second)]
            assert arrays[0] is arrays[1] is held(group[0], name) and not arrays[0].flags.writeable
        group[0].tokens[0] = 9
        assert first["buffer"][0][0]["tokens"].tolist() == [1, 2]

    def test_a_state_with_lists_of_tokens_is_read(self, make_args, tmp_path):
        source = RolloutDataSourceWithBuffer(make_args())
        (group,) = source.get_samples(1)
        group[0].append_response_tokens(tokens=[1, 2], log_probs=[-0.5, -0.1])
        state = {**source.state_dict(), "buffer": [[sample.to_dict() for sample in group]]}
        assert state["buffer"][0][0]["tokens"] == [1, 2]
        write_state(tmp_path / "checkpoint" / "rollout" / "global_dataset_state_dict_0", state)
        resumed = RolloutDataSourceWithBuffer(make_args())
        resumed.load(0)
        assert resumed.buffer == [group]

    def test_a_failed_save_leaves_the_old_state_whole(self, make_args, tmp_path):
        source = RolloutDataSourceWithBuffer(make_args())
        source.get_samples(1)
        source.save(0)
        source.update_metadata({"lock": object()})
        with pytest.raises(UserError, match=r"state\['metadata'\]\['lock'\] is a object"):
            source.save(0)
        resumed = RolloutDataSourceWithBuffer(make_args())
        resumed.load(0)
        assert resumed.sample_offset == 1
        assert len(list((tmp_path / "checkpoint" / "rollout").iterdir())) == 1

    def test_saving_again_replaces(self, make_args):
        source = RolloutDataSourceWithBuffer(make_args())
        for _ in range(2):
            source.get_samples(1)
            source.save(0)
        resumed = RolloutDataSource(make_args())
        resumed.load(0)
        assert resumed.sample_offset == 2

    @pytest.mark.parametrize("rollout_id", [None, -1])
    def test_a_fresh_start_loads_nothing(self, make_args, rollout_id):
        source = RolloutDataSource(make_args())
        source.load(rollout_id)
        assert source.sample_offset == 0

    def test_d6_a_missing_state_is_an_error_unless_fresh(self, make_args, caplog):
        with pytest.raises(UserError, match="--load .* no data-source state of rollout 4 .*--fresh-data-state"):
            RolloutDataSource(make_args()).load(4)
        with pytest.raises(UserError, match="--fresh-data-state"):
            RolloutDataSource(make_args(load=None)).load(0)
        source = RolloutDataSource(make_args(fresh_data_state=True))
        source.load(4)
        assert source.sample_offset == 0 and "starts from zero" in caplog.text

    def test_a_changed_file_is_an_error_with_both_fingerprints(self, make_args):
        source = RolloutDataSource(make_args(4))
        source.get_samples(1)
        source.save(0)
        old, new = source.state_dict()["fingerprint"], RolloutDataSource(make_args(5)).state_dict()["fingerprint"]
        with pytest.raises(UserError) as caught:
            RolloutDataSource(make_args(5)).load(0)
        for fingerprint in (old, new):
            assert fingerprint["files"][0]["sha256"] in str(caught.value)
        fresh = RolloutDataSource(make_args(5, fresh_data_state=True))
        fresh.load(0)
        assert fresh.sample_offset == 0
        with pytest.raises(UserError, match="--prompt-data is not what"):
            path = make_args(4).prompt_data
            RolloutDataSource(make_args(4, prompt_data=path + "@[:3]")).load(0)

    def test_a_moved_file_is_the_same_data(self, make_args, tmp_path):
        source = RolloutDataSource(make_args())
        source.get_samples(1)
        source.save(0)
        moved = tmp_path / "moved.jsonl"
        moved.write_text((tmp_path / "prompts.jsonl").read_text())
        resumed = RolloutDataSource(make_args(prompt_data=str(moved)))
        resumed.load(0)
        assert prompts(resumed.get_samples(1)) == ["p1"]

    def test_the_order_of_the_first_start_is_kept(self, make_args, caplog):
        caplog.set_level(logging.WARNING)
        args = make_args(16, rollout_shuffle=True)
        source = RolloutDataSource(args)
        source.get_samples(5)
        source.save(0)
        resumed = RolloutDataSource(make_args(16, rollout_shuffle=True, rollout_seed=7))
        resumed.load(0)
        assert prompts(resumed.get_samples(20)) == prompts(source.get_samples(20))
        assert "data order of the checkpoint is kept" in caplog.text

    def test_another_group_size_cannot_take_the_saved_buffer(self, make_args):
        source = RolloutDataSourceWithBuffer(make_args())
        source.add_samples(source.get_samples(1))
        source.save(0)
        with pytest.raises(
            UserError, match="--n-samples-per-prompt 3: the saved buffer holds groups of 2.*--fresh-data-st"
        ):
            RolloutDataSourceWithBuffer(make_args(n_samples_per_prompt=3)).load(0)
        fresh = RolloutDataSourceWithBuffer(make_args(n_samples_per_prompt=3, fresh_data_state=True))
        assert fresh.load(0) is False
        assert (fresh.sample_offset, fresh.sample_index, fresh.buffer) == (0, 0, [])

    @pytest.mark.parametrize(
        "content", ["{", "", '{"format_version": 99, "fingerprint": {"num_samples": 4, "files": []}}']
    )
    def test_a_broken_state_names_its_directory(self, make_args, tmp_path, content):
        directory = tmp_path / "checkpoint" / "rollout" / "global_dataset_state_dict_0"
        directory.mkdir(parents=True)
        (directory / "state.json").write_text(content)
        with pytest.raises(UserError, match="global_dataset_state_dict_0"):
            RolloutDataSource(make_args()).load(0)

    @pytest.mark.parametrize(("shuffle", "left_in_the_script"), [(False, False), (True, False), (False, True)])
    def test_a_state_of_another_program_with_a_pickle_is_gone_on_with(
        self, make_args, caplog, shuffle, left_in_the_script
    ):
        written = {
            "sample_offset": 3,
            "epoch_id": 1,
            "sample_group_index": 7,
            "sample_index": 14,
            "metadata": {"own": 1},
        }
        save_pickled(make_args(), written)
        args = make_args(rollout_shuffle=shuffle, fresh_data_state=left_in_the_script)
        source = RolloutDataSourceWithBuffer(args)
        source.load(0)
        (group,) = source.get_samples(1)
        assert (group[0].group_index, group[0].index, source.metadata) == (7, 14, {"own": 1})
        assert (source.epoch_id, source.sample_offset) == (1, 4)
        if not shuffle:
            assert prompts([group]) == ["p3"]
        assert "does not say which data it belongs to" in caplog.text and ("another order" in caplog.text) == shuffle
        # Its own states are whole, and win.
        source.save(0)
        resumed = RolloutDataSourceWithBuffer(make_args())
        resumed.load(0)
        assert resumed.sample_offset == 4

    @pytest.mark.parametrize(
        ("state", "message"),
        [
            ({"sample_offset": Fraction(1, 2)}, "cannot be read .UnpicklingError.: .*--fresh-data-state"),
            ([1], "holds list; expected the dict"),
            ({"sample_offset": 1, "epoch_id": 0, "sample_index": -1}, "sample_group_index, sample_index of the data state"),
            (dict.fromkeys(["sample_offset", "epoch_id", "sample_group_index", "sample_index"], 9), "had drawn 9 .* has 4"),
        ],
    )  # fmt: skip
    def test_a_pickled_state_that_is_of_no_use(self, make_args, state, message):
        save_pickled(make_args(), state)
        with pytest.raises(UserError, match=f"global_dataset_state_dict_0.pt.*{message}"):
            RolloutDataSource(make_args()).load(0)
        fresh = RolloutDataSource(make_args(fresh_data_state=True))
        fresh.load(0)
        assert fresh.sample_offset == 0

    def test_saving_needs_a_directory(self, make_args):
        with pytest.raises(UserError, match="--save"):
            RolloutDataSource(make_args(save=None)).save(0)
