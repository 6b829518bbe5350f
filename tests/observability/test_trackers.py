"""A W&B run that was written offline, read back from its files."""

import argparse
import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb

from slime.observability import trackers
from slime.observability.trackers import WandbTracker, run_name
from slime.utils.errors import UserError
from tests.support.tables.wandb_files import OfflineRun

ROOT = Path(__file__).resolve().parents[2]
KEY = "0123456789abcdef0123456789abcdefsecret00"
FLAGS = {
    "use_tensorboard": True, "use_wandb": True, "wandb_mode": "offline", "wandb_dir": None, "wandb_key": KEY,
    "wandb_host": "https://wandb.example.com", "wandb_team": "team", "wandb_group": "group", "wandb_project": "project",
    "typed_flags": [], "tensorboard_log_interval": 1,
    "wandb_run_id": None, "wandb_random_suffix": True, "wandb_always_use_train_step": False, "tb_experiment_name": None,
    "rollout_batch_size": 4, "n_samples_per_prompt": 2, "global_batch_size": 2, "num_steps_per_rollout": 4, "lr": 1e-5,
    "train_env_vars": {"HF_TOKEN": KEY},
}  # fmt: skip

# A process of its own: W&B keeps a service and settings for the whole life of one.
DRIVER = """
import argparse, json, pathlib, sys
from slime.observability.logging_utils import configure_logger, finish_tracking, init_tracking, write_to_trackers
configure_logger()
args = argparse.Namespace(**json.loads(sys.argv[1]))
init_tracking(args, pathlib.Path.cwd())
write_to_trackers([({"train/loss": 0.5, "train/step": 8}, "train/step")])
write_to_trackers([({"rollout/raw_reward": 0.25, "perf/rollout_time": 2.0, "text": "no", "rollout/step": 2}, "rollout/step")])
write_to_trackers([({"eval/aime": 0.75, "eval/step": 2}, "eval/step")])
finish_tracking(failed=args.fails)
print("given", args.wandb_run_id)

"""


def drive(directory, **changes):
    flags = json.dumps({**FLAGS, "fails": False, **changes})
    result = subprocess.run(
        [sys.executable, "-c", DRIVER, flags], cwd=directory, capture_output=True, text=True, timeout=60,
        env={"PATH": "/usr/bin:/bin", "HOME": str(directory), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wandb")
    return directory, drive(directory), OfflineRun(directory)


def test_the_run_is_filed_as_asked(finished):
    _, output, offline = finished
    run = offline.run
    assert (run.project, run.entity, run.run_group) == ("project", "team", "group")
    assert run.display_name.startswith("group_") and len(run.display_name) == len("group_") + 6
    assert f"W&B run {run.run_id}: files in " in output and "given None" in output.splitlines()
    assert offline.exit_code == 0


def test_every_metric_has_its_axis(finished):
    offline = finished[2]
    assert offline.history == [
        {"train/loss": 0.5, "train/step": 8},
        {"rollout/raw_reward": 0.25, "perf/rollout_time": 2.0, "rollout/step": 2},
        {"eval/aime": 0.75, "eval/step": 2},
    ]
    assert {name: offline.axes[name] for name in ("train/*", "rollout/*", "eval/*", "perf/*")} == {
        "train/*": "train/step", "rollout/*": "rollout/step", "eval/*": "eval/step", "perf/*": "rollout/step",
    }  # fmt: skip


def test_m1_the_configuration_is_there_and_no_secret_is_anywhere(finished):
    directory, output, offline = finished
    assert offline.config["lr"] == 1e-5 and offline.config["wandb_key"] == "<redacted>"
    # The child got the key on its command line, as a user may give it.
    holders = [path for path in directory.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert holders == [] and KEY not in output


def test_tensorboard_runs_beside_it(finished):
    assert list(finished[0].glob("events.out.tfevents.*"))


def test_everything_over_optimizer_steps(tmp_path):
    """4 prompts x 2 samples in steps of 2 rollouts: 4 optimizer steps per rollout, so rollout 2 begins at step 8."""
    changes = {"wandb_always_use_train_step": True, "wandb_run_id": "given", "wandb_dir": str(tmp_path / "there")}
    drive(tmp_path, use_tensorboard=False, fails=True, **changes)
    offline = OfflineRun(tmp_path / "there")
    # W&B writes the entries of a record in any order.
    axes = ("train/step", "rollout/step", "eval/step")
    assert [entry[axis] for entry, axis in zip(offline.history, axes, strict=True)] == [8, 8, 8]
    assert (offline.run.run_id, offline.exit_code) == ("given", 1)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"wandb_random_suffix": False}, "group"),
        ({"typed_flags": {"wandb_run_id"}}, "group"),
        ({"wandb_random_suffix": False, "wandb_group": None, "tb_experiment_name": "first"}, "first"),
        ({"wandb_random_suffix": False, "wandb_group": None}, "slime"),
    ],
)
def test_names(changes, name):
    assert run_name(argparse.Namespace(**{**FLAGS, **changes})) == name


def test_an_upload_that_does_not_end_holds_up_no_exit(tmp_path, monkeypatch, caplog):
    """W&B's own hook at the exit of the process waits as long as this setting says, 0: without an end."""
    assert trackers._settings(wandb, argparse.Namespace(**FLAGS)).finish_timeout == 120.0
    monkeypatch.setattr(trackers, "_FINISH_SECONDS", 0.1)
    monkeypatch.setattr(trackers, "_HANG_SECONDS", 0.1)
    tracker, ends = WandbTracker.__new__(WandbTracker), threading.Event()
    tracker._run, tracker.directory = SimpleNamespace(finish=lambda exit_code: ends.wait(60)), tmp_path
    tracker.close()
    ends.set()
    assert "W&B did not take the rest of the run" in caplog.text


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        WandbTracker(SimpleNamespace(**FLAGS), tmp_path, {}, {})


def test_refused_settings_are_told_without_the_key(tmp_path):
    args = SimpleNamespace(**{**FLAGS, "wandb_host": "nonsense"})
    with pytest.raises(UserError, match="--use-wandb: base_url: Input should be a valid URL") as caught:
        WandbTracker(args, tmp_path, {}, {})
    assert KEY not in str(caught.value)


@pytest.fixture
def tracker_of(tmp_path, monkeypatch):
    """Makes the tracker of a start of one W&B run; `summary` is what W&B knows of it, `logged` gets what it is told."""
    monkeypatch.setattr(trackers, "_last_told", {})

    def tracker_of(logged, summary=None, resumed=True, **steps_per_rollout):
        summary = {} if summary is None else summary
        run = SimpleNamespace(
            id="one", resumed=resumed, summary=summary, log=logged.append, define_metric=lambda *names, **options: None
        )
        monkeypatch.setattr("wandb.init", lambda **settings: run)
        steps = {"train/step": 2, "rollout/step": 1, "eval/step": 1, **steps_per_rollout}
        return WandbTracker(SimpleNamespace(**FLAGS), tmp_path, {}, steps)

    return tracker_of


LOST = {"train/step": range(2, 99), "rollout/step": range(2, 99), "eval/step": range(3, 99)}


def test_a_continued_run_is_not_told_twice_about_one_step(tracker_of):
    logged = []
    tracker = tracker_of(logged, {"train/step": 5, "eval/step": 2})
    tracker.forget(LOST, own=False)
    for step in (4, 5, 6):
        tracker.add_scalars({"train/loss": 0.5}, "train/step", step)
    tracker.add_scalars({"rollout/raw_reward": 0.5}, "rollout/step", 2)
    assert logged == [{"train/loss": 0.5, "train/step": 6}, {"rollout/raw_reward": 0.5, "rollout/step": 2}]


@pytest.mark.parametrize(
    ("axis", "before", "told", "now", "first"),
    [
        # The last rollout that was told is 11, so 12 is the next one to tell.
        ("train/step", 4, 47, 1, 12),
        ("train/step", 1, 11, 4, 48),
        ("rollout/step", 4, 44, 1, 12),
        ("rollout/step", 1, 11, 4, 48),
    ],
)
def test_a_continued_run_with_other_axes_is_told_what_follows_the_last_rollout(
    tracker_of, caplog, axis, before, told, now, first
):
    summary, logged = {}, []
    tracker_of([], summary, resumed=False, **{axis: before})
    summary[axis] = told
    tracker = tracker_of(logged, summary, **{axis: now})
    tracker.forget(LOST, own=False)
    for step in range(10 * now, first + 1):
        tracker.add_scalars({"x": 0.5}, axis, step)
    assert logged == [{"x": 0.5, axis: first}]
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"W&B run one: of {axis} a rollout was {before} steps so far, and is {now} in this run")


def test_a_continued_run_that_ended_before_it_told_anything_changes_no_axis(tracker_of):
    """As one that runs out of memory in its first step, with more samples in it."""
    summary, logged = {}, []
    tracker_of([], summary, resumed=False, **{"train/step": 4})
    summary |= {"train/step": 47, "rollout/step": 11}
    tracker_of([], summary, **{"train/step": 1}).add_scalars({"x": 0.5}, "rollout/step", 12)
    tracker = tracker_of(logged, summary, **{"train/step": 1})
    tracker.forget(LOST, own=False)
    for step in (11, 12):
        tracker.add_scalars({"x": 0.5}, "train/step", step)
    assert [entry["train/step"] for entry in logged] == [12]


@pytest.mark.parametrize("note", ["no JSON", "{}", 4])
def test_a_continued_run_without_a_note_is_taken_to_have_the_axes_of_this_one(tracker_of, note):
    logged = []
    tracker = tracker_of(logged, {"steps per rollout": note, "train/step": 5})
    tracker.forget(LOST, own=False)
    for step in (5, 6):
        tracker.add_scalars({"x": 0.5}, "train/step", step)
    assert [entry["train/step"] for entry in logged] == [6]


def test_a_run_that_is_offline_is_not_told_twice_either_when_it_starts_anew_by_itself(tracker_of):
    """W&B does not know there what the run was told; a tracker of another run does not care."""
    logged = []
    for steps in (range(6), range(4, 8)):
        tracker = tracker_of(logged, resumed=False)
        if steps.start:
            tracker.forget(LOST, own=True)
        for step in steps:
            # More than once a step: rewards first, then times.
            for name in ("a", "b"):
                tracker.add_scalars({name: 0.5}, "train/step", step)
    assert [entry["train/step"] for entry in logged] == [step for step in range(8) for _ in range(2)]
    another = tracker_of(logged, resumed=False)
    another.run_id = "another"
    another.forget(LOST, own=True)
    another.add_scalars({"a": 0.5}, "train/step", 0)
    assert logged[-1]["train/step"] == 0
