"""The report reads event files of either kind, takes the value written last, and says what is missing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slime.observability.trackers import TensorBoardTracker
from tools.report import main, read_arguments, read_run

TOOL = Path(__file__).parents[2] / "tools" / "report.py"


def write_events(directory: Path, scalars: list[tuple[str, float, int]]) -> None:
    from tensorboard.summary import Writer

    writer = Writer(str(directory))
    for tag, value, step in scalars:
        writer.add_scalar(tag, value, step)
    writer.close()


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    evaluations = [("eval/held_out", 0.41, 0), ("eval/held_out/response_len/mean", 19.0, 0), ("eval/held_out", 0.93, 3)]
    rewards = [("rollout/raw_reward", value, step) for step, value in enumerate((0.5, 0.75, 0.9))]
    write_events(directory / "tensorboard", [*evaluations, ("eval/held_out-truncated_ratio", 0.25, 3), *rewards])
    checkpoint = directory / "checkpoints"
    checkpoint.mkdir()
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("2")
    return directory


def test_report_shows_before_and_after_and_where_everything_lies(run_directory: Path, capsys) -> None:
    (run_directory / "train.sh").write_text("#!/usr/bin/env bash\n")
    assert main([str(run_directory)]) == 0
    text = capsys.readouterr().out
    assert "accuracy on held_out, before → after: 0.410 → 0.930 (before rollout 0 to after rollout 2)" in text
    assert "reward per rollout, first → last: 0.500 → 0.900 (rollout 0 to rollout 2)" in text
    assert f"event files: {run_directory / 'tensorboard'}" in text
    assert f"checkpoint: {run_directory / 'checkpoints'} (rollout 2)" in text
    assert "train.sh --num-rollout 13" in text
    assert "response_len" not in text and "truncated" not in text


def test_steps_of_optimizers_are_told_as_rollouts(run_directory: Path, capsys) -> None:
    """With --wandb-always-use-train-step a run of 3 rollouts of 4 steps."""
    directory = run_directory.parent / "counted"
    rewards = [("rollout/raw_reward", value, 4 * rollout_id) for rollout_id, value in enumerate((0.5, 0.75, 0.9))]
    evaluations = [("eval/held_out", 0.41, 0), ("eval/held_out", 0.93, 12)]
    write_events(directory / "tensorboard", [*evaluations, *rewards, ("train/loss", 1.0, 11)])
    values = {"wandb_always_use_train_step": {"value": True}, "num_steps_per_rollout": {"value": 4}}
    (directory / "tensorboard" / "args.json").write_text(json.dumps({"arguments": values}))
    assert main([str(directory)]) == 0
    text = capsys.readouterr().out
    assert "0.410 → 0.930 (before rollout 0 to after rollout 2)" in text
    assert "0.500 → 0.900 (rollout 0 to rollout 2)" in text
    assert read_run(directory).curves["train/loss"] == {11: 1.0}


def test_each_event_file_counts_as_the_note_beside_it_says(tmp_path: Path) -> None:
    """A run that went on with other steps per rollout; the steps of its last start would be wrong for the first."""
    for steps, rollouts in ((1, (0, 1, 2)), (4, (2, 3))):
        tracker = TensorBoardTracker(tmp_path, {"train/step": 4, "rollout/step": steps, "eval/step": steps})
        for rollout_id in rollouts:
            tracker.add_scalars({"rollout/raw_reward": steps + rollout_id / 8}, "rollout/step", rollout_id * steps)
            tracker.add_scalars({"eval/held_out": rollout_id / 8}, "eval/step", (rollout_id + 1) * steps)
            tracker.add_scalars({"train/loss": 1.0}, "train/step", rollout_id * 4)
        tracker.close()
    curves = read_run(tmp_path).curves
    assert curves["rollout/raw_reward"] == {0: 1.0, 1: 1.125, 2: 4.25, 3: 4.375}
    assert curves["eval/held_out"] == {1: 0.0, 2: 0.125, 3: 0.25, 4: 0.375}
    assert list(curves["train/loss"]) == [0, 4, 8, 12]
    values = {"wandb_always_use_train_step": {"value": True}, "num_steps_per_rollout": {"value": 2}}
    (tmp_path / "args.json").write_text(json.dumps({"arguments": values}))
    assert read_run(tmp_path).curves == curves


def test_what_a_run_was_asked_for_stands_beside_its_checkpoints(run_directory: Path) -> None:
    """Not beside the event files of an evaluation of them."""
    for place, steps in (("checkpoints", 4), ("tensorboard", 1)):
        values = {"num_steps_per_rollout": {"value": steps}}
        (run_directory / place / "args.json").write_text(json.dumps({"arguments": values}))
    assert read_arguments(run_directory)[1] == {"num_steps_per_rollout": 4}


def test_picture_is_a_png(run_directory: Path, tmp_path: Path) -> None:
    assert main([str(run_directory), "--png", str(tmp_path / "curve.png")]) == 0
    content = (tmp_path / "curve.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) > 5000


def test_resumed_run_overrides_what_it_repeats(run_directory: Path) -> None:
    write_events(run_directory / "tensorboard2", [("rollout/raw_reward", 0.25, 2), ("rollout/raw_reward", 0.125, 3)])
    curve = read_run(run_directory).curves["rollout/raw_reward"]
    assert curve == {0: 0.5, 1: 0.75, 2: 0.25, 3: 0.125}


def test_directory_without_events_is_refused_by_name(tmp_path: Path) -> None:
    for directory, expected in ((tmp_path, "no TensorBoard event files"), (tmp_path / "absent", "no such directory")):
        result = subprocess.run([sys.executable, TOOL, directory], capture_output=True, text=True, timeout=60)
        assert result.returncode == 2
        assert str(directory) in result.stderr and expected in result.stderr
        assert "Traceback" not in result.stderr
