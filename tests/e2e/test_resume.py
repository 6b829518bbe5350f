"""A run that is killed and started again with the same command goes on as if nothing had happened."""

from __future__ import annotations

import json
import signal

import pytest
import torch

RESUMED = (3, 4, 5)


@pytest.fixture(scope="module")
def resumed_run(loop_command, tmp_path_factory):
    """Killed while rollout 5 of 6 generates, when the checkpoint of rollout 3 is there; then run to its end."""
    directory = tmp_path_factory.mktemp("killed")
    killed = loop_command.run(directory, {"E2E_HOLD_ROLLOUT": "4"})
    with killed.process as process:
        process.wait_for_line("holding rollout 4", 300)
        left_alone = process.processes()
        process.send_signal_to_driver(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
        process.assert_no_process_left(60)
    # Engines, ranks and Ray's own processes were there and followed their driver.
    assert any("server_process" in command for command in left_alone.values())
    assert any("RankProcess" in command for command in left_alone.values())
    assert (killed.checkpoints / "latest_checkpointed_iteration.txt").read_text().strip() == "2"

    resumed = loop_command.run(directory)
    with resumed.process as process:
        process.wait_for_success(300)
        process.assert_no_process_left()
    return resumed


def samples(run, rollout_id):
    return torch.load(run.dumps / f"{rollout_id}.pt", weights_only=True)["samples"]


def test_it_goes_on_after_the_published_checkpoint(resumed_run):
    output = resumed_run.process.output()
    assert ", resuming" in output
    assert "rollout 2 (3/6) |" not in output and "rollout 3 (4/6) |" in output and "rollout 5 (6/6) |" in output
    # No second evaluation before training.
    assert "evaluation before" not in output


@pytest.mark.parametrize("rollout_id", RESUMED)
def test_prompts_tokens_and_rewards_are_those_of_the_whole_run(finished_run, resumed_run, rollout_id):
    whole, resumed = samples(finished_run, rollout_id), samples(resumed_run, rollout_id)
    assert [sample["prompt"] for sample in resumed] == [sample["prompt"] for sample in whole]
    assert [sample["tokens"].tolist() for sample in resumed] == [sample["tokens"].tolist() for sample in whole]
    for name in ("index", "group_index", "label", "reward", "metadata"):
        assert [sample[name] for sample in resumed] == [sample[name] for sample in whole]


@pytest.mark.parametrize("tag", ["train/loss", "train/pg_loss", "train/kl_loss", "train/grad_norm"])
def test_what_was_learned_is_bitwise_the_same(finished_run, resumed_run, tag):
    whole, resumed = finished_run.process.scalars(tag), resumed_run.process.scalars(tag)
    # The event files of both starts lie in one directory: all steps are there.
    assert sorted(resumed) == sorted(whole)
    assert [resumed[step] for step in RESUMED] == [whole[step] for step in RESUMED]


def test_data_state_and_weights_end_the_same(finished_run, resumed_run):
    def state(run):
        return json.loads((run.checkpoints / "rollout/global_dataset_state_dict_5/state.json").read_text())

    assert state(resumed_run) == state(finished_run)
    assert tensor_bytes(resumed_run) == tensor_bytes(finished_run)


def tensor_bytes(run):
    """Every tensor of the last checkpoint, by name."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict = {}
    directory = run.checkpoints / "iter_0000005"
    _load_state_dict(state, FileSystemReader(directory), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return {name: value.numpy().tobytes() for name, value in _flatten("", state) if torch.is_tensor(value)}


def _flatten(prefix, value):
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _flatten(f"{prefix}/{name}", item)
    else:
        yield prefix, value
