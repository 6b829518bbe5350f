"""Programs that a tool runs, and that end with it, in whatever way it ends: `kill -9` leaves none of them."""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from slime.utils.child_process import ChildProcess

ROOT = Path(__file__).resolve().parents[1]
# The program takes the place of this one. What the kernel was asked to watch is open in it too, under another number.
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
    """What has `ChildProcess` run a program of any kind so that it ends with this process; 127 where there is no such program.

    Without a `ChildProcess`: as the leader of a process group, with a pipe for standard input that stays open.
    """
    return [sys.executable, "-c", _BECOME, *map(str, words)]


def run_tied(words: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None) -> str:
    """What a program has written by its end. Where it fails, the end of that is the end of this process too.

    Args:
        log: a new file for it.
        environment: all of its variables; None: ours.
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
