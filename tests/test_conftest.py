"""What a run of the tests says before the first of them."""

import os
import subprocess
import sys
from pathlib import Path


def test_a_run_tells_the_vector_instructions_and_threads_that_it_has():
    """As `scripts/test.sh` starts it, which `.ci/run` calls. Every processor has those that are chosen here."""
    here = Path(__file__)
    command = [sys.executable, "-m", "pytest", str(here), "-k", "nothing_has_this_name"]
    env = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2"}
    run = subprocess.run(command, cwd=here.parents[1], env=env, capture_output=True, text=True, timeout=120)
    lines = [line for line in run.stdout.splitlines() if line.startswith("numerics: ")]
    assert lines == ["numerics: CPU capability DEFAULT (ATEN_CPU_CAPABILITY), 2 thread(s) a process (OMP_NUM_THREADS)"]
