"""The page on what runs when: its commands are taken, and run what it says."""

import re
import shlex
import subprocess

import pytest

from tests.support.tables.page import blocks
from tests.support.tables.shell_arrays import ROOT

PAGE = ROOT / "docs/en/developer_guide/ci.md"
ONE_TEST = [line for kind, text in blocks(PAGE) if kind == "bash" for line in text.splitlines()]
TIERS = re.findall(r"`(bash scripts/test\.sh[^`]*)`", PAGE.read_text())
MARKS = {"": "not slow and not gpu and not learns", "--all": "not gpu and not learns", "--examples": "learns"}


@pytest.mark.parametrize("command", sorted({*TIERS, *ONE_TEST}))
def test_a_command_runs_the_tier_that_it_says(command):
    words = shlex.split(command)
    told = subprocess.run(
        [*words, *([] if "--dry-run" in words else ["--dry-run"])],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    tier = next((word for word in words if word in ("--all", "--examples")), "")
    called = shlex.split(told.splitlines()[-1])
    assert called[called.index("-m", called.index("pytest")) + 1] == MARKS[tier]
    assert {"SLIME_ACCELERATOR=cpu", "OMP_NUM_THREADS=1"} <= set(called)
    files = [word for word in words if word.startswith("tests/")]
    assert all((ROOT / file).exists() and file in called for file in files)
    assert ("-n" in called) == (not files)


def test_what_runs_on_every_change_is_what_ci_runs():
    assert "bash scripts/test.sh" in TIERS
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "bash scripts/test.sh"


def test_no_test_is_skipped_where_a_package_is_missing_that_is_not_installed_with_the_others():
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "requirements/cpu.txt").read_text(), re.MULTILINE))
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path.name != "test_ci.py"]
    asked = {name for text in texts for name in re.findall(r'importorskip\("([\w.]+)"', text)}
    assert len(asked) > 2 and asked <= pinned
    assert not [text for text in texts if re.search(r"skipif\([^)]*find_spec", text)]
