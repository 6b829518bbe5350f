"""Seconds of the processor of a run: all of its processes, each once. Trees take turns."""

import os
import signal
import subprocess
import sys

import pytest

from tests.support.tables.shell_arrays import ROOT
from tools.bench import bench_start
from tools.bench.bench_start import Family, Process

# In place of `train.py`: the seconds that it tells, and where it says that it was started. A child has a fifth of a second of
# the processor; then it waits until somebody has looked.
PROGRAM = """
import subprocess, sys, time
from pathlib import Path

place = Path({place!r})
with open(place / "order", "a") as order:
    # Modules are looked for in the tree that it stands in.
    assert Path.cwd().name == "{name}"
    order.write("{name} ")
subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.2: pass"], check=True)
print("first sample {seconds} s after the start (seconds: arguments 0.1, Ray 0.2)", flush=True)
while not (place / "looked").exists():
    time.sleep(0.01)
sys.exit({status})
"""


@pytest.fixture
def tree_of(tmp_path, monkeypatch):
    """Makes a tree that has nothing but its `train.py`."""
    real = bench_start.processes

    def processes():
        found = real()
        # Who looks reads the log first.
        if any("first sample" in log.read_text() for log in tmp_path.glob("*.log")):
            (tmp_path / "looked").touch()
        return found

    monkeypatch.setattr(bench_start, "processes", processes)

    def make(name, text):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(text)
        return tmp_path / name

    return make


def test_trees_take_turns_and_seconds_are_those_until_the_first_sample(tree_of, tmp_path):
    trees = []
    for name, seconds in (("late", "600.0"), ("early", "0.0")):
        place = str(tmp_path)
        trees.append(tree_of(name, PROGRAM.format(place=place, name=name, seconds=seconds, status=0)))
    found = bench_start.measure(trees, 2, tmp_path / "task", tmp_path)
    assert (tmp_path / "order").read_text().split() == ["late", "early"] * 2
    assert [len(starts) for starts in found.values()] == [2, 2]
    late, early = found[trees[0]][0], found[trees[1]][0]
    assert (late.seconds, early.seconds) == (600.0, 0.0)
    assert late.processor >= 0.2 and early.processor == 0.0
    assert late.stretches == "arguments 0.1, Ray 0.2"
    assert bench_start.row(trees[0], found[trees[0]])[:2] == [str(trees[0]), "600.0, 600.0 (median 600.0)"]


@pytest.mark.parametrize(
    "text",
    [
        "print('no GPU here'); raise SystemExit(3)",
        "print('no GPU here')",
        "print('first sample 0.1 s after the start (seconds: Ray 0.1)\\nno GPU here'); raise SystemExit(3)",
    ],
)
def test_a_start_that_fails_or_has_no_sample_ends_the_bench_with_what_it_said(text, tree_of, tmp_path):
    with pytest.raises(SystemExit, match=r"(?s)train.py ended with [30]:.*no GPU here"):
        bench_start.measure([tree_of("broken", text)], 1, tmp_path / "task", tmp_path)


def test_another_tree_is_one_of_this_project(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench_start.main(["--beside", str(tmp_path)])
    assert f"--beside {tmp_path}: there is no train.py" in capsys.readouterr().err


def test_what_has_ended_counts_once(monkeypatch):
    monkeypatch.setattr(bench_start, "forgets_children", lambda pid: pid == 3)
    family = Family(1)
    stranger = {9: Process(0, 1000.0)}
    assert family.seconds({1: Process(0, 1.0), 2: Process(1, 2.0), 3: Process(1, 4.0), **stranger}) == 7
    # A grandchild may have a smaller number than its parent.
    children = {8: Process(2, 8.0), 5: Process(3, 16.0), 4: Process(8, 32.0)}
    assert family.seconds({1: Process(0, 1.0), 2: Process(1, 2.0), 3: Process(1, 4.0), **children, **stranger}) == 63
    # 2 has what 8 had, 3 has forgotten 5; the child of 8 belongs to the first of all processes now.
    orphan = {4: Process(0, 32.0)}
    assert family.seconds({1: Process(0, 1.0), 2: Process(1, 10.0), 3: Process(1, 4.0), **orphan, **stranger}) == 63
    assert family.seconds({1: Process(0, 1.0), 2: Process(1, 10.0), 3: Process(1, 5.0), **stranger}) == 64
    assert family.seconds({1: Process(0, 16.0), **stranger}) == 64
    assert family.seconds(stranger) == 64


def test_the_kernel_tells_parents_seconds_and_who_forgets_children():
    source = "import signal, sys\nsignal.signal(signal.SIGCHLD, signal.{})\nprint(flush=True)\nsys.stdin.read()"
    for disposition, forgets in ((signal.SIG_IGN, True), (signal.SIG_DFL, False)):
        command = [sys.executable, "-c", source.format(disposition.name)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            child.stdout.readline()
            assert bench_start.processes()[child.pid].parent == os.getpid()
            assert bench_start.forgets_children(child.pid) is forgets
            child.stdin.close()
            child.wait(60)
    assert bench_start.forgets_children(child.pid) is False
    before, found, after = sum(os.times()[:4]), bench_start.processes()[os.getpid()].seconds, sum(os.times()[:4])
    # Of each of the four numbers the kernel tells whole hundredths.
    assert before - 0.05 < found < after + 0.05


@pytest.mark.slow
def test_a_start_of_this_tree(tmp_path):
    subprocess.run([sys.executable, ROOT / "tools/make_toy_task.py", tmp_path / "task"], check=True, timeout=120)
    (found,) = bench_start.measure([ROOT], 1, tmp_path / "task", tmp_path)[ROOT]
    # A rank and an engine alone import for longer.
    assert found.seconds > 0 and found.processor > 5
    assert "engines and ranks" in found.stretches
