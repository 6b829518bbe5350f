"""`train_async.py` as a command: its plan, its refusals, its help."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models.args import command_line

ROOT = Path(__file__).parents[1]


def train_async(directory, *words):
    command = [sys.executable, str(ROOT / "train_async.py"), *command_line(directory), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=directory)


def test_a_plan_of_the_asynchronous_loop(tmp_path):
    done = train_async(tmp_path, "--async-buffer-size", "2", "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not built" not in done.stdout


def test_a_run_on_shared_devices_is_refused(tmp_path):
    done = train_async(tmp_path, "--colocate")
    assert done.returncode == 2
    assert "--colocate, --offload and --release-train: train_async.py generates while it trains" in done.stderr
    assert "ERROR" not in done.stdout
    assert not (tmp_path / "outputs").exists()


def test_the_help_names_the_command():
    command = [sys.executable, str(ROOT / "train_async.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("usage: python train_async.py [FLAGS ...]\n")


@pytest.mark.parametrize("program", ["train.py", "train_async.py"])
def test_outside_of_the_environment_one_line_says_what_to_do(program, tmp_path):
    # -S: without the packages of the environment, as the Python of the system.
    command = [sys.executable, "-S", str(ROOT / program), "--help-grep", "lr"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{program}: the package ") and line.endswith(("/.venv/bin/python", "the environment .venv"))
