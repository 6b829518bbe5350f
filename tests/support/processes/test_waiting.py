"""What is asked of processes that are about to end."""

import subprocess

import psutil

from tests.support.processes.waiting import runs, wait_until


def test_a_process_runs_until_it_has_ended_whoever_collects_it():
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        process = psutil.Process(sleeper.pid)
        assert runs(process) and runs(sleeper.pid)
        sleeper.kill()
        wait_until(lambda: not runs(process))
        assert process.is_running() and not runs(sleeper.pid), "nobody has collected it"
    assert not runs(process) and not runs(sleeper.pid)


def test_a_process_that_goes_between_two_questions_does_not_run(monkeypatch):
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        process = psutil.Process(sleeper.pid)
        sleeper.kill()
    monkeypatch.setattr(process, "is_running", lambda: True)
    assert not runs(process)
