"""Runs the command of the README as a user types it."""

import os
import re
import signal
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
_PAGE = ROOT / "docs/en/get_started/quick_start.md"
_ROWS = re.findall(r"^\| (.*) \| `bash scripts/quickstart\.sh([^`]*)` \|(.*)", _PAGE.read_text(), re.MULTILINE)
# The words after `bash scripts/quickstart.sh` in the rows of the page's tables.
COMMANDS = sorted({words for _, words, _ in _ROWS})
# Rows of the table of arrangements, which names a page for each: `tests/e2e/test_arrangements_learn.py` trains them.
ARRANGEMENTS = {row: words for row, words, page in _ROWS if page}
# Rows that only say how weights travel, with their flags: `tests/e2e/test_weight_transports.py` runs these.
WEIGHT_COMMANDS = {
    row: words for row, words, _ in _ROWS if re.fullmatch(r" --( --update-weight-\S+ [^-\s]\S*)+", words)
}

_END_SECONDS = 60


def quickstart(directory: Path, *words: str, timeout: float = 900) -> str:
    """Run `bash scripts/quickstart.sh --dir DIRECTORY WORDS` and return its output. AssertionError with the end of the output
    if it fails or takes longer than `timeout` seconds; in that case all its processes are ended."""
    process = subprocess.Popen(
        ["bash", "scripts/quickstart.sh", "--dir", str(directory), *words],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "TENSORBOARD_DIR")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=_END_SECONDS)
        raise AssertionError(f"not done after {timeout:.0f} s: {output[-4000:]}") from None
    assert process.returncode == 0, output[-4000:]
    return output
