"""Every tool that is shipped starts: none is left behind by a module that was moved or removed."""

import json
import subprocess
import sys

import pytest

from tests.support.tables.shell_arrays import ROOT

TOOLS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "tools").rglob("*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)
# All in one process, as several of them import torch. Arguments: the tools; output: what each printed, or its error.
HELP = """
import contextlib, io, json, runpy, sys, traceback
from pathlib import Path

said = {}
for tool in sys.argv[1:]:
    sys.argv, output = [tool, "--help"], io.StringIO()
    sys.path.insert(0, str(Path(tool).parent))
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(tool, run_name="__main__")
    except SystemExit as end:
        said[tool] = [end.code or 0, output.getvalue()]
    except BaseException:
        said[tool] = [1, traceback.format_exc()]
    else:
        said[tool] = [1, "it went on after --help"]
    sys.path.pop(0)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said():
    command = [sys.executable, "-W", "ignore", "-c", HELP, *TOOLS]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("tool", TOOLS)
def test_o10_every_tool_explains_itself(said, tool):
    status, output = said[tool]
    assert status == 0, output
    assert output.startswith("usage: ")
