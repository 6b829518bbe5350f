"""What a bench runs ends with it, `kill -9` included, whatever kind of program it is."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.processes.waiting import runs, wait_until
from tools.tied import ROOT, run_tied, tied

# Tells the processes that there are, and waits.
PROGRAM = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
with open("running.draft", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename("running.draft", "running")
child.wait()
"""
BENCH = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tools import tied
from tools.bench import bench_learning
{start}
"""
# As most benches run a program, through a shell here; and as the one that reads what its program writes.
STARTS = {
    "waits": "tied.run_tied(['bash', '-c', '\"$0\" program.py; true', sys.executable], Path('log'))",
    "reads": "bench_learning.tied = lambda words: tied.tied([sys.executable, 'program.py']); "
    "bench_learning.ROOT = '.'; bench_learning.quickstart()",
}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("start", STARTS)
def test_no_program_outlives_its_bench(tmp_path, start, number):
    (tmp_path / "program.py").write_text(PROGRAM)
    code = BENCH.format(root=str(ROOT), start=STARTS[start])
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as bench:  # fmt: skip
        try:
            wait_until((tmp_path / "running").exists, 60)
            started = [psutil.Process(int(pid)) for pid in (tmp_path / "running").read_text().split()]
            bench.send_signal(number)
            bench.wait(60)
            wait_until(lambda: not any(map(runs, started)), 30)
        finally:
            bench.kill()
            for process in filter(runs, started):
                process.kill()


def test_a_program_that_ends_is_told_with_what_it_wrote(tmp_path):
    words = [sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); print(sys.stdin.read())"]
    assert sorted(run_tied(words, tmp_path / "log").split()) == ["err", "out"]
    with pytest.raises(SystemExit, match="cannot"):
        run_tied(["bash", "-c", "echo cannot; exit 3"], tmp_path / "other.log")
    assert tied([Path("a")])[-1] == "a"
