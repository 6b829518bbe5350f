"""The page on architectures beyond Megatron-Core: its table has every family with layers of its own, and its checks pass."""

import re
import shlex
import subprocess
import sys

import pytest

from slime.models.families import FAMILIES
from tests.support.tables.page import blocks
from tests.support.tables.shell_arrays import ROOT

PAGE = ROOT / "docs/en/advanced/arch-support-beyond-megatron.md"
MODELS = ROOT / "docs/en/advanced/models.md"


def test_every_family_with_layers_of_its_own_is_in_the_table():
    section = PAGE.read_text().partition("\n## Families with layers of their own\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \|", section, re.MULTILINE)
    written = {f"slime_plugins.models.{function}": re.findall(r"`(\w+)`", types) for function, types in rows}
    expected: dict[str, list[str]] = {}
    for name, family in FAMILIES.items():
        if family.layer_spec is not None:
            expected.setdefault(family.layer_spec, []).append(name)
    assert {function: sorted(types) for function, types in written.items()} == {
        function: sorted(types) for function, types in expected.items()
    }


COMMANDS = [line for kind, text in blocks(PAGE) if kind == "bash" for line in text.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_check_passes(command, tmp_path):
    """With the functions that the page on models shows."""
    for kind, text in blocks(MODELS):
        if kind == "python":
            (tmp_path / re.match(r"# (\w+\.py)\n", text)[1]).write_text(text)
    words = [sys.executable, *shlex.split(command)[1:]]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
