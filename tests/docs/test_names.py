"""What pages name is there: import paths of ours, and files of the repository."""

import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
_DOTTED = re.compile(r"(?<![\w./-])slime(?:_plugins)?(?:\.[A-Za-z_]\w*)+(?![\w/])")
_IMPORTED = re.compile(r"^from (slime[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)
_FILE = re.compile(
    r"(?<![\w./-])(?:slime|slime_plugins|tests|tools|scripts|examples|requirements)/[\w/.-]+\.(?:py|sh|txt|md)\b"
)
# A recipe makes it.
NOT_THERE = {"slime.models.seed_oss", "slime.weights.transports.host_memory"}


def is_there(name: str) -> bool:
    """Whether a module or something in it has this name."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_import_paths_lead_somewhere(page):
    text = page.read_text()
    named = set(_DOTTED.findall(text))
    for module, names in _IMPORTED.findall(text):
        named |= {f"{module}.{name}" for name in re.findall(r"\w+", re.sub(r" as \w+", "", names))}
    assert sorted(name for name in named if not name.startswith(tuple(NOT_THERE)) and not is_there(name)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_are_there(page):
    named = set(_FILE.findall(page.read_text())) - {name.replace(".", "/") + ".py" for name in NOT_THERE}
    assert sorted(name for name in named if "NAME" not in name and not (ROOT / name).exists()) == []


def test_the_readers_find_what_pages_name():
    text = "See `slime.data.Sample` and `tools/no.py`.\nfrom slime.data import (Sample,\n    Nothing)\n"
    assert _DOTTED.findall(text)[0] == "slime.data.Sample" and _FILE.findall(text) == ["tools/no.py"]
    assert _IMPORTED.findall(text) == [("slime.data", "(Sample,\n    Nothing)")]
    assert is_there("slime.data") and is_there("slime.data.Sample") and not is_there("slime.data.Nothing")
    assert not is_there("slime.nowhere.Sample")


def test_what_is_excepted_is_not_there():
    assert not [name for name in NOT_THERE if is_there(name)]
