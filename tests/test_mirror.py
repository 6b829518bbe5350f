"""Tests mirror the tree: those of `slime/algorithms/kl.py` stand in `tests/algorithms/test_kl.py`."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
# Of what is no room of `slime/`.
ELSEWHERE = {"docs", "e2e", "examples", "scripts", "slime_plugins", "support", "tools"}
FILES = [path.relative_to(ROOT / "tests") for path in sorted((ROOT / "tests").rglob("test_*.py"))]
OF_A_ROOM = [path for path in FILES if len(path.parts) > 1 and path.parts[0] not in ELSEWHERE]


def test_every_directory_of_tests_is_that_of_a_room():
    assert sorted({str(path.parent) for path in OF_A_ROOM if not (ROOT / "slime" / path.parent).is_dir()}) == []


def test_what_has_the_name_of_a_module_stands_where_it_does():
    """A test of several modules has a name of its own, which none of them has."""
    rooms = {}
    for module in (ROOT / "slime").rglob("*.py"):
        rooms.setdefault(module.stem, set()).add(module.parent.relative_to(ROOT / "slime"))
    named = {
        path: rooms[path.stem.removeprefix("test_")] for path in OF_A_ROOM if path.stem.removeprefix("test_") in rooms
    }
    assert len(named) > 100
    assert {str(path): sorted(map(str, there)) for path, there in named.items() if path.parent not in there} == {}
