"""The recipes of the contributors' page, followed word for word in a copy of the tree."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "en" / "developer_guide" / "contributing.md"
# Heading of a recipe -> what holds in a tree in which it was followed.
CHECKS = {
    "An advantage estimator": "an_estimator_can_be_asked_for_and_trains",
    "A reward": "a_reward_can_be_asked_for_and_grades",
    "A family of models": "a_family_is_loaded_trained_and_exported",
    "A transport": "a_transport_can_be_asked_for_and_carries_a_push",
}
_NEW_FILE = re.compile(r"^The file `([^`]+)`:\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CHANGE = re.compile(r"^In `([^`]+)`:\n\n```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def recipe(heading: str) -> str:
    """The part of the page under a heading of the third level."""
    return re.search(rf"^### {heading}\n(.*?)(?=^##)", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1]


def follow(text: str, tree: Path) -> set[str]:
    """Do in `tree` what a recipe says; the files that it touched."""
    for name, content in _NEW_FILE.findall(text):
        assert not (tree / name).exists()
        (tree / name).write_text(content)
    for name, change in _CHANGE.findall(text):
        old = "".join(f"{line[1:]}\n" for line in change.splitlines() if not line.startswith("+"))
        new = "".join(f"{line[1:]}\n" for line in change.splitlines())
        content = (tree / name).read_text()
        assert content.count(f"\n{old}") == 1, f"{name} has no such place, or several:\n{old}"
        (tree / name).write_text(content.replace(f"\n{old}", f"\n{new}"))
    return {name for name, _ in [*_NEW_FILE.findall(text), *_CHANGE.findall(text)]}


def run_check(tree: Path, name: str) -> subprocess.CompletedProcess[str]:
    program = f"from tests.support.processes.recipe_checks import check; check('{name}')"
    environment = {"PYTHONPATH": str(tree), "SLIME_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=tree, env=environment, capture_output=True, text=True, timeout=300
    )  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    # With their times, by which what Python has compiled of them stays good; what it is writing has a number behind its name.
    for directory in ("slime", "tests/support"):
        shutil.copytree(ROOT / directory, tmp_path / directory, ignore=shutil.ignore_patterns("*.pyc.*"))
    return tmp_path


@pytest.mark.parametrize("heading", CHECKS)
def test_a_recipe_does_what_it_promises(heading: str, tree: Path) -> None:
    text = recipe(heading)
    touched = follow(text, tree)
    assert len(touched) <= 3, "a row and a function, or a file and a row for it here and there"
    assert len(text.splitlines()) < 100
    result = run_check(tree, CHECKS[heading])
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    ruff = [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), *sorted(touched)]
    result = subprocess.run(ruff, cwd=tree, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout


def test_without_its_recipe_a_promise_does_not_hold(tree: Path) -> None:
    result = run_check(tree, CHECKS["An advantage estimator"])
    assert result.returncode != 0 and "reinforce" in result.stderr


def test_every_file_that_the_page_names_is_there() -> None:
    named = re.findall(r"`((?:slime|tests|tools|docs|scripts|requirements)/[\w./-]*)`", PAGE.read_text())
    created = {name for name, _ in _NEW_FILE.findall(PAGE.read_text())}
    assert len(named) > 30
    assert sorted({name for name in named if not (ROOT / name).exists()} - created) == []
