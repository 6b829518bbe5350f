import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from slime.arguments.help_text import default_of, matching_entries
from slime.arguments.parser import ArgumentParser, build_parser, parse_known
from slime.observability.run_record import REDACTED
from slime.utils.child_process import environment_for_python
from slime.utils.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    return build_parser()


def run(*words: str, interpreter: Sequence[str] = ()) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *interpreter, "train.py", *words], cwd=ROOT, env=environment_for_python(), capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip


def test_help_needs_no_flag_and_lists_own_flags_first(parser):
    result = run("--help")
    assert result.returncode == 0 and result.stderr == ""
    titles = [line for line in result.stdout.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles.index("rollout:") < titles.index("Megatron: parallelism:")
    assert "--sglang-mem-fraction-static FLOAT" in result.stdout and "(default: " in result.stdout


def test_help_waits_for_no_library_that_loads_slowly(parser):
    """The flags of Megatron and SGLang come from a cache, which the fixture has filled."""
    result = run("--help", interpreter=["-X", "importtime"])
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "slime" in imported
    assert not imported & {"torch", "megatron.core", "sglang", "transformers", "pandas", "sympy"}


def test_help_grep_shows_what_contains_the_word():
    result = run("--help-grep", "over_SAMPLING")
    assert result.returncode == 0
    assert result.stdout.startswith("rollout:\n") and "--over-sampling-batch-size INT" in result.stdout
    assert "--lr " not in result.stdout and "usage" not in result.stdout


def test_help_grep_looks_into_the_texts(parser):
    page = matching_entries(parser, "byte")
    assert "--update-weight-buffer-size" in page and "--rollout-seed" not in page


def test_help_grep_looks_at_the_beginnings_of_words(parser):
    page = matching_entries(parser, "fault")
    assert "--use-fault-tolerance" in page and "(default" not in page.replace("fault tolerance", "")
    assert matching_entries(parser, "ault") == ""


@pytest.mark.parametrize("form", [("--help-grep", "--lr"), ("--help-grep=--lr",)])
def test_help_grep_of_a_whole_flag(form):
    result = run(*form)
    assert result.returncode == 0 and "  --lr FLOAT\n" in result.stdout and "--lr-decay-style {" not in result.stdout


def test_help_grep_without_a_match_says_so(parser):
    with pytest.raises(UserError, match="--help-grep xyzzy: no flag"):
        parse_known(parser, ["--help-grep", "xyzzy"])


def test_a_reader_that_stops_early_is_no_error():
    command = f"{sys.executable} train.py --help | head -n 1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment_for_python(), capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_help_fits_the_terminal(parser, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = parser.format_help().splitlines()
    spellings = {line for line in lines if line.strip().startswith("-")}
    assert [line for line in lines if len(line) > 80 and line not in spellings and " " in line.strip()] == []


def test_defaults_are_shown_as_they_are_typed_but_no_secrets(parser):
    group = parser.add_argument_group("more")
    shown = {
        group.add_argument("--words", nargs="+", default=["a", "b"], help="h"): "a b",
        group.add_argument("--off", action="store_true", help="h"): "",
        group.add_argument("--unset", default=None, help="h"): "",
        group.add_argument("--zero", type=int, default=0, help="h"): "0",
        group.add_argument("--my-api-key", default="hunter2", help="h"): REDACTED,
    }
    assert {action: default_of(action) for action in shown} == shown
    assert "hunter2" not in parser.format_help()
    assert "%%" not in parser.format_help()


def test_a_run_without_flags_says_what_it_needs():
    result = run()
    assert result.returncode == 2
    assert "--rollout-batch-size" in result.stderr and "quickstart.sh" in result.stderr and result.stdout == ""
    assert "Traceback" not in result.stdout + result.stderr
