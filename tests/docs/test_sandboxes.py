"""The page on sandboxes: its programs run, its commands find nothing to object to, and what it says of variables is so."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from slime.plugins.__main__ import main as try_functions
from slime.utils import env
from tests.support.tables.page import blocks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/en/advanced/sandboxes.md"
FILES = {re.match(r"# (\S+\.py)\n", text)[1]: text for kind, text in blocks(PAGE) if kind == "python"}
COMMANDS = [text for kind, text in blocks(PAGE) if kind == "bash"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)


def test_the_program_of_the_page_prints_what_was_computed(here):
    done = subprocess.run(
        [sys.executable, "work.py"], env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("0 42\n0 6\n", 0), done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_classes_of_the_page_pass_the_check_that_it_shows(here, monkeypatch, capsys, command):
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "slime.plugins"]
    monkeypatch.setattr(sys, "argv", words[2:])
    assert try_functions() == 0, capsys.readouterr().out
    assert "\n  fine\n" in capsys.readouterr().out


def test_every_file_of_the_page_is_used():
    assert sorted(FILES) == ["my_harness.py", "my_sandbox.py", "work.py"] and len(COMMANDS) == 2


def test_variables_have_the_names_and_defaults_that_the_page_tells(monkeypatch):
    rows = re.findall(r"^\| `(SLIME_AGENT_\w+)` \| `(SWE_\w+)` \| (\S+)", PAGE.read_text(), re.MULTILINE)
    read = {
        "SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY": env.sandbox_image_metadata_key,
        "SLIME_AGENT_SANDBOX_LIFETIME_SEC": env.sandbox_lifetime_sec,
        "SLIME_AGENT_SANDBOX_RPC_RETRIES": env.sandbox_rpc_retries,
        "SLIME_AGENT_E2B_SANDBOX_SIZE": env.e2b_sandbox_size,
    }
    assert {name for name, *_ in rows} == set(read)
    for name, older, default in rows:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(older, raising=False)
        if default != "it":
            assert str(read[name]()) == default.strip("`")
        monkeypatch.setenv(older, "17")
        assert str(read[name]()) == "17"
        monkeypatch.setenv(name, "18")
        assert str(read[name]()) == "18"
