"""Runs programs that end with the tool that started them, however it ends: even after `kill -9` none of them is left."""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from slime.utils.child_process import ChildProcess

ROOT = Path(__file__).resolve().parents[1]
# The program replaces this one. It inherits a copy of the watched standard input, under another number.
_BECOME = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from slime.utils.child_process import exit_when_parent_dies
os.set_inheritable(os.dup(0), True)
exit_when_parent_dies()
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error:
    print(f"{{sys.argv[1]}}: {{error.strerror}}", file=sys.stderr)
    raise SystemExit(127)
"""


def tied(words: Sequence[str | Path]) -> list[str]:
    """The command with which `ChildProcess` runs any program so that it ends with this process. The exit status is 127 if there
    is no such program.

    Without a `ChildProcess`, run the command as leader of a process group, with a pipe as standard input that stays open.
    """
    return [sys.executable, "-c", _BECOME, *map(str, words)]


def run_tied(words: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None) -> str:
    """Run a program to its end and return its output. If it fails, this process ends too, with the end of the output.

    Args:
        log: a new file for the output.
        environment: all variables of the program; None: those of this process.
    """
    child = ChildProcess(log.stem, tied(words), log, environment)
    child.start()
    try:
        status = child.wait(math.inf)
    finally:
        child.terminate()
    text = log.read_text(errors="replace")
    if status != 0:
        sys.exit(text[-3000:])
    return text
