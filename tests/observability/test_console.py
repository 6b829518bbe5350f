"""The lines of a run, its progress bar, and how long it took to start."""

import subprocess
import sys

import pytest

from slime.observability import console as startup
from slime.observability.console import (
    Progress,
    StartupClock,
    evaluation_line,
    evaluation_name,
    has_line,
    rollout_line,
)
from slime.utils.misc import SingletonMeta


def test_line_of_a_step_has_its_id_the_progress_and_what_the_run_has():
    metrics = {"rollout/raw_reward": 0.5, "train/loss": 0.25, "perf/rollout_time": 2.0, "perf/step_time": 3.04}
    line = rollout_line(3, 10, metrics)
    assert line == "rollout 3 (4/10) | reward 0.500 | loss 0.2500 | seconds: generate 2.0, step 3.0"


def test_line_of_a_step_tells_what_did_not_go_as_usual():
    metrics = {
        "rollout/failed_samples": 2, "rollout/aborted_samples": 0, "rollout/surplus_groups": 1.0,
        "rollout/dynamic_filter/drop_zero_std_0.0": 3, "rollout/dynamic_filter/drop_zero_std_1.0": 4,
    }  # fmt: skip
    line = rollout_line(0, 1, metrics)
    assert line == "rollout 0 (1/1) | failed samples 2 | surplus groups 1 | filtered groups 7 | seconds: "


@pytest.mark.parametrize(
    "steps, interval, expected",
    [(1, 1, [0, 1, 2, 3, 4, 5, 6]), (1, 3, [2, 5, 6]), (2, 4, [1, 3, 5, 6]), (3, 4, [1, 2, 3, 5, 6]), (1, 100, [6])],
)
def test_a_line_stands_where_so_many_optimizer_steps_are_over_and_at_the_end(steps, interval, expected):
    assert [number for number in range(7) if has_line(number, 7, steps=steps, interval=interval)] == expected


def test_line_of_an_evaluation_shows_the_sets_only():
    metrics = {"eval/math": 0.5, "eval/math-truncated_ratio": 0.1, "eval/math/response_len/mean": 3, "eval/step": 7}
    assert evaluation_line(evaluation_name(6), metrics) == "evaluation after rollout 6: math 0.5000"
    assert evaluation_line(evaluation_name(0, before=True), metrics) == "evaluation before rollout 0: math 0.5000"


def test_lines_leave_out_what_users_log_that_is_no_number():
    metrics = {"eval/math": 0.5, "eval/table": [1], "eval/best": "x", "eval/none": None, "eval/step": 7}
    assert evaluation_line("evaluation", metrics) == "evaluation: math 0.5000"
    metrics = {
        "rollout/raw_reward": "high", "train/loss": float("nan"), "rollout/failed_samples": None,
        "rollout/dynamic_filter/drop_x": "3", "perf/step_time": 3.0,
    }  # fmt: skip
    assert rollout_line(0, 1, metrics) == "rollout 0 (1/1) | loss nan | seconds: step 3.0"


def test_snapshot_follows_the_task():
    progress = Progress()
    assert progress.snapshot() is None
    with progress.start("rollout 3", 8) as task:
        task.advance()
        task.advance(3)
        assert progress.snapshot() == ("rollout 3", 4, 8)
        assert Progress().snapshot() is None, "calls do not know of each other"
    assert progress.snapshot() is None


def test_a_new_task_replaces_the_old_one():
    progress = Progress()
    first = progress.start("first", 2)
    second = progress.start("second", 5)
    first.close()
    assert progress.snapshot() == ("second", 0, 5)
    second.close()
    assert progress.snapshot() is None


def test_stretches_add_up_from_the_start_of_the_process(monkeypatch):
    SingletonMeta.clear_instances()
    monkeypatch.setattr(startup, "_process_start", lambda: 100.0)
    now = iter([102.5, 110.0])
    monkeypatch.setattr(startup, "_since_boot", lambda: next(now))
    clock = StartupClock()
    clock.mark("parse")
    assert clock.close("push") == "first sample 10.0 s after the start (seconds: parse 2.5, push 7.5)"
    assert clock.close("again") is None
    SingletonMeta.clear_instances()


def test_the_start_of_the_process_lies_before_now_and_after_that_of_its_parent():
    program = "from slime.observability import console; print(console._process_start(), console._since_boot())"
    before = startup._since_boot()
    child = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True, timeout=120)
    started, now = map(float, child.stdout.split())
    # The kernel counts the start of a process in hundredths of a second.
    assert startup._process_start() < before - 0.01 < started < now < startup._since_boot()


def test_who_sets_the_clock_of_the_machine_changes_no_length_of_a_start(monkeypatch):
    SingletonMeta.clear_instances()
    clock = StartupClock()
    monkeypatch.setattr(startup.time, "time", lambda: 0.0)
    assert "-" not in clock.close("first sample")
    SingletonMeta.clear_instances()
