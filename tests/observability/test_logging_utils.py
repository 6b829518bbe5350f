import asyncio
import contextlib
import contextvars
import datetime
import importlib
import json
import logging
import os
import resource
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slime.observability import logging_utils, trackers
from slime.observability.logging_utils import (
    collected_metrics,
    drain_outbox,
    finish_tracking,
    forget_lost_steps,
    init_tracking,
    log,
    logged_beside,
    tracking_directory,
    write_to_trackers,
)
from slime.utils.errors import RunError, UserError


def read_events(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # All values; by default some are drawn.
    events = EventAccumulator(str(directory), size_guidance={"tensors": 0})
    events.Reload()
    return {
        tag: [(e.step, e.tensor_proto.float_val[0]) for e in events.Tensors(tag)] for tag in events.Tags()["tensors"]
    }


def test_outbox_hands_metrics_over_once():
    log(None, {"rollout/x": 1, "rollout/step": 4}, "rollout/step")
    assert drain_outbox() == [({"rollout/x": 1, "rollout/step": 4}, "rollout/step")]
    assert drain_outbox() == []


def test_numbers_are_those_of_the_moment_in_which_they_are_logged():
    running, several = torch.tensor(1.0), torch.ones(2)
    log(None, {"mine/x": running, "mine/several": several, "mine/text": "a", "rollout/step": 0}, "rollout/step")
    running.add_(1)
    [(metrics, _)] = drain_outbox()
    assert metrics == {"mine/x": 1.0, "mine/several": several, "mine/text": "a", "rollout/step": 0}
    assert type(metrics["mine/x"]) is float


def test_metrics_of_another_stage_are_those_that_this_one_does_not_have():
    own = [({"train/loss": 1.0, "train/step": 3}, "train/step"), ({"mine/x": 1.0, "mine/step": 3}, "mine/step")]
    others = [
        ({"train/loss": 1.0, "mine/y": 2.0, "train/step": 3}, "train/step"), ({"mine/x": 1.0, "mine/step": 3}, "mine/step"),
        ({"mine/x": 4.0, "mine/step": 4}, "mine/step"),
    ]  # fmt: skip
    assert logged_beside(own, others) == [
        ({"mine/y": 2.0, "train/step": 3}, "train/step"), ({"mine/x": 4.0, "mine/step": 4}, "mine/step"),
    ]  # fmt: skip
    assert logged_beside(own, own) == []


@pytest.mark.parametrize("metrics", [{"mine/x": 1}, {"mine/x": 1, "rollout/step": None}])
def test_metrics_without_their_step_are_refused_where_they_are_logged(metrics):
    """The driver, which writes them, would end the run, and nobody would know whose they are."""
    with pytest.raises(ValueError, match="^metrics to log have .*'rollout/step'"):
        log(None, metrics, "rollout/step")
    assert drain_outbox() == []


def test_what_is_logged_in_a_block_stays_with_it_also_from_its_threads():
    def block(number, both_inside):
        with collected_metrics() as collected:
            both_inside.wait(60)
            log(None, {"rollout/x": number, "rollout/step": number}, "rollout/step")
            asyncio.run(asyncio.to_thread(log, None, {"eval/x": number, "eval/step": number}, "eval/step"))
        return [(metrics, key) for metrics, key in collected]

    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(block, (1, 2), (barrier, barrier)))
    for number, result in enumerate(results, start=1):
        steps = {"rollout": number, "eval": number}
        assert result == [({f"{name}/x": n, f"{name}/step": n}, f"{name}/step") for name, n in steps.items()]
    assert drain_outbox() == []


def test_what_outlives_its_block_or_has_no_context_goes_to_the_outbox():
    def ended():
        log(None, {"rollout/late": 1, "rollout/step": 0}, "rollout/step")

    with collected_metrics() as collected:
        late = contextvars.copy_context()
        stranger = threading.Thread(target=log, args=(None, {"rollout/x": 2, "rollout/step": 0}, "rollout/step"))
        stranger.start()
        stranger.join()
    late.run(ended)
    assert collected == []
    assert [metrics for metrics, _ in drain_outbox()] == [
        {"rollout/x": 2, "rollout/step": 0}, {"rollout/late": 1, "rollout/step": 0},
    ]  # fmt: skip


# Other trackers, and all points.
TENSORBOARD = {"use_tensorboard": True, "use_wandb": False, "tensorboard_log_interval": 1}


def test_numbers_reach_the_event_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    flags = {**TENSORBOARD, "wandb_always_use_train_step": False, "tensorboard_dir": None}
    init_tracking(SimpleNamespace(**flags, num_steps_per_rollout=1))
    metrics = {
        "a/x": 0.5,
        "a/text": "no",
        "a/nan": float("nan"),
        "a/several": torch.ones(2),
        "a/huge": 10**400,
        "a/step": 7,
    }
    log(None, {"a/y": 1, "a/step": 6}, "a/step")  # in the driver itself
    write_to_trackers([(metrics, "a/step")])
    log(None, {"a/y": 2, "a/step": 8}, "a/step")
    finish_tracking()
    assert read_events(tmp_path) == {"a/x": [(7, pytest.approx(0.5))], "a/y": [(6, 1.0), (8, 2.0)]}


@contextlib.contextmanager
def files_up_to(size):
    """Files grow no further in the block, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("room", [0, 100])
def test_a_start_that_finds_no_room_for_an_event_file_says_so(tmp_path, room):
    """100 bytes are enough for the file, and not for the note beside it."""
    flags = {**TENSORBOARD, "wandb_always_use_train_step": False, "num_steps_per_rollout": 10**60}
    with files_up_to(room), pytest.raises(RunError) as told:
        init_tracking(SimpleNamespace(**flags), tmp_path)
    assert str(tmp_path) in str(told.value) and "--tensorboard-dir" in str(told.value)
    assert logging_utils._trackers == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_restart_goes_on_without_a_tracker_that_cannot_be_opened(tmp_path, monkeypatch, caplog):
    import wandb

    def unreachable(**settings):
        raise wandb.errors.CommError("no route")

    monkeypatch.setattr("wandb.init", unreachable)
    flags = {
        **TENSORBOARD, "use_wandb": True, "wandb_always_use_train_step": False, "wandb_dir": None, "wandb_key": None,
        "wandb_host": None, "wandb_team": None, "wandb_group": None, "wandb_project": None, "wandb_mode": "online",
        "wandb_run_id": None, "wandb_random_suffix": False, "tb_experiment_name": None, "num_steps_per_rollout": 1,
        "typed_flags": set(),
    }  # fmt: skip
    with pytest.raises(UserError, match="--use-wandb: no route"):
        init_tracking(SimpleNamespace(**flags), tmp_path / "first")
    finish_tracking()
    init_tracking(SimpleNamespace(**flags), tmp_path / "again", again=True)
    write_to_trackers([({"a/x": 0.5, "a/step": 7}, "a/step")])
    finish_tracking()
    assert read_events(tmp_path / "again") == {"a/x": [(7, 0.5)]}
    assert "W&B gets no metrics any more; the run goes on without it: --use-wandb: no route" in caplog.text


def test_a_resumed_start_on_a_full_disk_goes_on_with_what_its_predecessor_told(tmp_path, monkeypatch, caplog):
    told_by_a_run(tmp_path, [0, 1, 2, 3])
    (events,) = tmp_path.glob("events*")
    before, drop = events.read_bytes(), trackers._drop_values

    def drop_without_room(*arguments):
        with files_up_to(len(before) // 2):
            drop(*arguments)

    monkeypatch.setattr(trackers, "_drop_values", drop_without_room)
    steps = told_by_a_run(tmp_path, [2, 3, 4])
    assert steps["perf/time"] == [0, 1, 2, 2, 3, 3, 4] and events.read_bytes() == before
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told.startswith(f"{events}: ") and "File too large" in told
    # TensorBoard takes everything with "tfevents" in its name for an event file.
    assert len([path for path in tmp_path.iterdir() if "tfevents" in path.name]) == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_costs_the_curves_of_a_tracker_and_not_the_run(tmp_path, monkeypatch, caplog):
    full, other = tmp_path / "full", SimpleNamespace(told=[], closed=[])
    other.add_scalars = lambda values, axis, step: other.told.append(step)
    other.close = lambda *, failed: other.closed.append(failed)
    flags = {**TENSORBOARD, "wandb_always_use_train_step": False, "tensorboard_dir": None}
    init_tracking(SimpleNamespace(**flags, num_steps_per_rollout=1), full)
    monkeypatch.setattr(logging_utils, "_trackers", [*logging_utils._trackers, other])
    write_to_trackers([({"a/x": 0.5, "a/step": 0}, "a/step")])
    (events,) = full.glob("events*")
    with files_up_to(events.stat().st_size):
        for step in (1, 2):
            write_to_trackers([({"a/x": 0.5, "a/step": step}, "a/step")])
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(
        f"TensorBoard in {full} takes no metrics any more, and the run goes on without it: OSError: "
    )
    finish_tracking(failed=True)
    assert (other.told, other.closed) == ([0, 1, 2], [True]) and read_events(full) == {"a/x": [(0, pytest.approx(0.5))]}


def test_a_tracker_that_cannot_be_closed_keeps_no_other_from_it(monkeypatch, caplog):
    def close(*, failed):
        raise OSError(28, "No space left on device")

    closed = []
    other = SimpleNamespace(close=lambda *, failed: closed.append(failed))
    monkeypatch.setattr(logging_utils, "_trackers", [other, SimpleNamespace(close=close)])
    finish_tracking()
    assert closed == [False] and "was not closed: [Errno 28] No space left on device" in caplog.text


def test_over_optimizer_steps_the_axes_of_a_run_agree_and_no_step_comes_twice(tmp_path):
    flags = {**TENSORBOARD, "wandb_always_use_train_step": True}
    # An own rollout function whose 3 x 4 rollouts are no whole number of batches: one step is announced.
    sizes = {"rollout_batch_size": 3, "n_samples_per_prompt": 4, "global_batch_size": 24, "num_steps_per_rollout": 1}
    for name, values in (("whole", {"num_steps_per_rollout": 2, "global_batch_size": 6}), ("part", {})):
        init_tracking(SimpleNamespace(**flags, **{**sizes, **values}), tmp_path / name)
        steps = values.get("num_steps_per_rollout", 1)
        for rollout in range(3):
            write_to_trackers([({"rollout/x": 1.0, "rollout/step": rollout}, "rollout/step")])
            write_to_trackers([({"eval/x": 1.0, "eval/step": rollout + 1}, "eval/step")])
        finish_tracking()
        events = read_events(tmp_path / name)
        assert [step for step, _ in events["rollout/x"]] == [0, steps, 2 * steps]
        assert [step for step, _ in events["eval/x"]] == [steps, 2 * steps, 3 * steps]


def told_by_a_run(directory, rollouts, start=None, num_rollout=9, again=False, **values):
    """Some optimizer steps per rollout (2) and an evaluation after each; returns the steps of every metric in `directory`."""
    defaults = {
        **TENSORBOARD, "wandb_always_use_train_step": False, "num_steps_per_rollout": 2,
        "initial_weights": SimpleNamespace(resume=rollouts[0] > 0),
    }  # fmt: skip
    args = SimpleNamespace(**{**defaults, **values})
    init_tracking(args, directory)
    forget_lost_steps(args, rollouts[0] if start is None else start, num_rollout, again=again)
    steps = args.num_steps_per_rollout
    for rollout in rollouts if num_rollout else ():
        for step in range(steps * rollout, steps * (rollout + 1)):
            write_to_trackers([({"train/loss": step, "train/step": step}, "train/step")])
        write_to_trackers([({"perf/time": rollout, "mine/x": rollout, "rollout/step": rollout}, "rollout/step")])
    for rollout in rollouts:
        write_to_trackers([({"eval/x": rollout + 1, "eval/step": rollout + 1}, "eval/step")])
    finish_tracking()
    return {tag: [step for step, _ in sorted(events)] for tag, events in read_events(directory).items()}


def test_a_resumed_run_takes_back_what_its_predecessor_told_about_the_rollouts_it_repeats(tmp_path):
    told_by_a_run(tmp_path, [0, 1, 2, 3])
    torn = next(tmp_path.glob("events*"))
    torn.write_bytes(torn.read_bytes()[:-3])
    steps = told_by_a_run(tmp_path, [2, 3, 4])
    assert steps["train/loss"] == list(range(10)) and steps["perf/time"] == [0, 1, 2, 3, 4]
    assert steps["eval/x"] == [1, 2, 3, 4, 5]
    # Over which axis a metric of the user's own stands is not known here: nothing of it is touched.
    assert steps["mine/x"] == [0, 1, 2, 2, 3, 3, 4]


def steps_of(rollouts, steps_per_rollout):
    return [
        step for rollout in rollouts for step in range(steps_per_rollout * rollout, steps_per_rollout * (rollout + 1))
    ]


def notes_in(directory):
    return sorted(directory.glob(".steps_per_rollout.*.json"))


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4)])
def test_what_was_told_before_the_checkpoint_stays_where_rollouts_get_another_number_of_steps(
    tmp_path, before, after, caplog
):
    told_by_a_run(tmp_path, range(12), num_steps_per_rollout=before)
    steps = told_by_a_run(tmp_path, range(10, 14), num_steps_per_rollout=after)
    assert steps["train/loss"] == sorted(steps_of(range(10), before) + steps_of(range(10, 14), after))
    assert steps["perf/time"] == list(range(14)) and steps["eval/x"] == list(range(1, 15))
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning.startswith(
        f"{tmp_path}: of train/step a rollout was {before} steps so far, and is {after} in this run"
    )
    # Each file by its own note: a third start, from an older checkpoint, with the number of the second one.
    steps = told_by_a_run(tmp_path, [5], num_steps_per_rollout=after)
    assert steps["train/loss"] == sorted(steps_of(range(5), before) + steps_of([5], after))
    assert len(notes_in(tmp_path)) == len(list(tmp_path.glob("events*"))) == 3


@pytest.mark.parametrize("before", [False, True])
def test_what_was_told_before_the_checkpoint_stays_where_its_axis_becomes_another(tmp_path, before, caplog):
    factor = {False: 1, True: 2}
    told_by_a_run(tmp_path, range(12), wandb_always_use_train_step=before)
    steps = told_by_a_run(tmp_path, range(10, 14), wandb_always_use_train_step=not before)
    first, second = factor[before], factor[not before]
    assert steps["train/loss"] == list(range(28))
    assert steps["perf/time"] == sorted([first * n for n in range(10)] + [second * n for n in range(10, 14)])
    assert steps["eval/x"] == sorted([first * n for n in range(1, 11)] + [second * n for n in range(11, 15)])
    told = [record.getMessage().split(": ")[1] for record in caplog.records]
    assert [line.split()[1] for line in told] == ["rollout/step", "eval/step"]


@pytest.mark.parametrize(
    "note",
    [None, "", "no JSON", "4", "{}", '{"train/step": 4, "rollout/step": 1, "eval/step": 0}',
     '{"train/step": "4", "rollout/step": 1, "eval/step": 1}'],
)  # fmt: skip
def test_an_event_file_without_a_note_is_taken_to_have_the_axes_of_this_run(tmp_path, note, caplog):
    told_by_a_run(tmp_path, range(12), num_steps_per_rollout=4)
    [path] = notes_in(tmp_path)
    assert json.loads(path.read_text()) == {"train/step": 4, "rollout/step": 1, "eval/step": 1}
    path.unlink() if note is None else path.write_text(note)
    steps = told_by_a_run(tmp_path, range(10, 12), num_steps_per_rollout=1)
    assert steps["train/loss"] == list(range(12))
    assert [record.getMessage().startswith(f"{path} does not say") for record in caplog.records] == [True] * (
        note is not None
    )


LIVE_RUN = """
import sys
from pathlib import Path
from slime.observability.trackers import TensorBoardTracker

tracker = TensorBoardTracker(Path(sys.argv[1]))
for step in map(int, sys.stdin):
    tracker.add_scalars({"perf/time": 0.5}, "rollout/step", step)
    print(step, flush=True)
"""


def test_nothing_is_taken_out_of_an_event_file_that_another_run_writes(tmp_path, caplog):
    """It would go on to write into a file that is no more."""
    told_by_a_run(tmp_path, [0, 1, 2])
    command = [sys.executable, "-c", LIVE_RUN, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as live:
        tell(live, 7)
        [file_of_live_run] = [path for path in tmp_path.glob("events*") if f".{live.pid}." in path.name]
        told_by_a_run(tmp_path, [1])
        tell(live, 8)
        live.stdin.close()
    steps = [step for step, _ in sorted(read_events(tmp_path)["perf/time"])]
    assert steps == [0, 1, 7, 8], "what is over gave way, and what goes on lost nothing"
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"{file_of_live_run}: another run writes this event file")
    # When it has ended, its values give way like all others.
    assert told_by_a_run(tmp_path, [1])["perf/time"] == [0, 1]


def tell(live, step):
    live.stdin.write(f"{step}\n")
    live.stdin.flush()
    assert live.stdout.readline() == f"{step}\n"


def test_an_evaluation_of_a_checkpoint_replaces_the_one_that_was_made_with_the_same_weights(tmp_path):
    told_by_a_run(tmp_path, [0, 1, 2, 3])
    # `--num-rollout 0` after rollout 1: the evaluation before rollout 2.
    steps = told_by_a_run(tmp_path, [1], start=2, num_rollout=0)
    assert steps["eval/x"] == [1, 2, 3, 4] and steps["train/loss"] == list(range(8))
    # Over optimizer steps it is another one.
    steps = told_by_a_run(tmp_path, [1], start=2, num_rollout=0, wandb_always_use_train_step=True)
    assert steps["eval/x"] == [1, 3, 4, 4]


def test_of_optimizer_steps_as_many_are_told_as_the_interval_says(tmp_path):
    steps = told_by_a_run(tmp_path, [0, 1, 2], tensorboard_log_interval=3)
    assert steps == {"train/loss": [2, 5], "perf/time": [0, 1, 2], "mine/x": [0, 1, 2], "eval/x": [1, 2, 3]}
    # The next run in this process tells of all again.
    assert told_by_a_run(tmp_path / "next", [0])["train/loss"] == [0, 1]


def test_a_new_run_leaves_the_event_files_of_another_one_alone(tmp_path):
    told_by_a_run(tmp_path, [0, 1])
    assert told_by_a_run(tmp_path, [0])["perf/time"] == [0, 0, 1]


def test_a_run_that_starts_anew_takes_back_what_it_told_and_nothing_of_others(tmp_path):
    """Where a part of it failed before its first checkpoint, the evaluation before training is made again as well."""
    told_by_a_run(tmp_path, [0])
    event_file = next(tmp_path.glob("events*"))
    event_file.rename(event_file.with_name(event_file.name.replace(f".{os.getpid()}.", ".1.")))
    told_by_a_run(tmp_path, [0, 1, 2])
    flags = {**TENSORBOARD, "wandb_always_use_train_step": False}
    init_tracking(SimpleNamespace(**flags, num_steps_per_rollout=2), tmp_path)
    write_to_trackers([({"eval/x": 0, "eval/step": 0}, "eval/step")])
    finish_tracking()
    steps = told_by_a_run(tmp_path, [0, 1], again=True)
    assert steps["perf/time"] == [0, 0, 1] and steps["train/loss"] == [0, 0, 1, 1, 2, 3]
    assert steps["eval/x"] == [1, 1, 2]


def test_default_directory(monkeypatch):
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    args = SimpleNamespace(tb_project_name=None, tb_experiment_name="first", tensorboard_dir=None)
    assert str(tracking_directory(args)) == "outputs/slime/first"
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("TENSORBOARD_DIR", "~/events")
    assert str(tracking_directory(args)) == "/home/me/events"


def test_runs_that_begin_in_the_same_second_have_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    now = SimpleNamespace(now=lambda: datetime.datetime(2026, 11, 27, 13, 5, 59))
    monkeypatch.setattr("slime.observability.logging_utils.datetime", SimpleNamespace(datetime=now))
    args = SimpleNamespace(tb_project_name=None, tb_experiment_name=None, tensorboard_dir=None)
    found = [str(tracking_directory(args)) for _ in range(3)]
    assert found == [f"outputs/slime/20261127-130559{number}" for number in ("", "-2", "-3")]
    assert all(Path(path).is_dir() for path in found)


@pytest.mark.parametrize(
    ("module", "name", "arguments"),
    [
        ("slime.ray.rollout_manager", "RolloutManager", ()),
        ("slime.serving.engines", "EngineActor", (0, "logs")),
        ("slime.training.train_rank", "TrainRank", (0, 1, 0)),
    ],
)
def test_every_process_of_a_run_logs_at_its_level(monkeypatch, module, name, arguments):
    # What lifts assumptions of Megatron is for processes of ranks, not for this one.
    monkeypatch.setattr("slime.backends.megatron_utils.initialize.prepare", lambda: None)
    levels = []
    process = importlib.import_module(module)
    monkeypatch.setattr(process, "configure_logger", levels.append)
    args = SimpleNamespace(log_level="DEBUG", train_backend="megatron", release_train=False)
    getattr(process, name)(args, *arguments)
    assert levels == ["DEBUG"]


@pytest.mark.parametrize(
    ("level", "debug", "own", "library"),
    [("INFO", "0", logging.INFO, logging.ERROR), ("WARNING", "0", logging.WARNING, logging.ERROR),
     ("INFO", "1", logging.DEBUG, logging.DEBUG)],
)  # fmt: skip
def test_levels(level, debug, own, library):
    code = (
        "import logging; from slime.observability.logging_utils import configure_logger; "
        f"configure_logger({level!r}); "
        "print(logging.getLogger('slime').getEffectiveLevel(), logging.getLogger('ray').getEffectiveLevel())"
    )
    environment = {**os.environ, "SLIME_DEBUG": debug}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert result.stdout.split() == [str(own), str(library)], result.stderr
