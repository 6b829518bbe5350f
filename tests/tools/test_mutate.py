"""The tool that changes the code: what it changes, and what it says of changes that a test notices or none does."""

import ast
import sys

import pytest

from tools import mutate

SOURCE = '''"""A module."""

LIMIT = 10.0


def clipped(value: float, low: float = 0.0) -> float:
    """At most LIMIT."""
    if value > LIMIT and not value < low:
        return min(LIMIT, value)
    log(value)
    return value - low
'''
TESTS = """
from slime.algorithms.made_up import clipped


def test_values_above_the_limit_become_it():
    assert clipped(12.0) == 10.0
    assert clipped(3.0, 1.0) == 2.0
"""


def test_every_kind_of_change_is_made_one_at_a_time():
    mutants = mutate.mutants_of("slime/x.py", SOURCE)
    changes = [(mutant.line, mutant.change) for mutant in mutants]
    assert (3, "constant: LIMIT = 10.0  →  LIMIT = 11.0") in changes
    assert (
        8,
        "comparison: if value > LIMIT and (not value < low):  →  if value >= LIMIT and (not value < low):",
    ) in changes
    assert (8, "sign: if value > LIMIT and (not value < low):  →  if value > LIMIT and value < low:") in changes
    assert (8, "operator: if value > LIMIT and (not value < low):  →  if value > LIMIT or not value < low:") in changes
    assert (9, "arguments: return min(LIMIT, value)  →  return min(value, LIMIT)") in changes
    assert (10, "statement left out: log(value)  →  pass") in changes
    assert (11, "operator: return value - low  →  return value + low") in changes
    unchanged = ast.unparse(ast.parse(SOURCE))
    assert len({mutant.source for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        different = [a for a, b in zip(unchanged.splitlines(), mutant.source.splitlines(), strict=False) if a != b]
        assert len(different) >= 1, mutant.change


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A repository of one module and its tests."""
    for file, text in {
        "slime/__init__.py": "",
        "slime/algorithms/__init__.py": "",
        "slime/algorithms/made_up.py": SOURCE.replace("    log(value)\n", ""),
        "tests/algorithms/test_made_up.py": TESTS,
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\npythonpath = ["."]\n',
    }.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    # A fork has what this process has imported: it is to find the module of its own tree.
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.mark.slow
def test_survivors_are_named_by_file_and_line_and_the_tree_stays_as_it_is(tree, capsys):
    before = (tree / "slime/algorithms/made_up.py").read_text()
    assert mutate.main(["slime/algorithms/made_up.py"]) == 1
    *survivors, total = capsys.readouterr().out.splitlines()
    assert total.endswith("changes were not noticed") and total.startswith(f"{len(survivors)} of ")
    # No test has a value at the limit, or one below the lower bound.
    assert any("made_up.py:8: comparison: if value > LIMIT" in line for line in survivors)
    # What the tests do see.
    assert not any("LIMIT = 11.0" in line or "value + low" in line for line in survivors)
    assert (tree / "slime/algorithms/made_up.py").read_text() == before


def test_tests_that_fail_without_a_change_are_refused(tree, capsys):
    (tree / "tests/algorithms/test_made_up.py").write_text("def test_it():\n    assert False\n")
    assert mutate.main(["slime/algorithms/made_up.py"]) == 2
    assert "fails without any change" in capsys.readouterr().err
    assert mutate.main(["slime/algorithms", "--tests", "tests/nowhere.py"]) == 2
    assert "no tests/nowhere.py" in capsys.readouterr().err
