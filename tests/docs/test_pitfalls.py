"""The page on pitfalls against the names of the tests."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "en" / "developer_guide" / "pitfalls.md"
ROWS = re.findall(r"^\| ([A-Z]\d+) \| (.+) \| `(\w+)` \|$", PAGE.read_text(), re.MULTILINE)
CODED = re.compile(r"test_([a-z]\d+)_")


@functools.cache
def names_of_tests() -> set[str]:
    """The names that have a code; files without one are not parsed."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    return {
        node.name
        for text in texts
        if CODED.search(text)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and CODED.match(node.name)
    }


def test_every_code_in_the_name_of_a_test_is_on_the_page():
    used = {CODED.match(name)[1].upper() for name in names_of_tests()}
    assert used == {code for code, _, _ in ROWS}


def test_every_row_names_a_test_of_its_code():
    names = names_of_tests()
    assert [test for code, _, test in ROWS if test not in names or CODED.match(test)[1].upper() != code] == []


def test_codes_stand_once_and_in_order():
    codes = [
        (re.findall(r"^## ([A-Z]):", PAGE.read_text(), re.MULTILINE).index(code[0]), int(code[1:]))
        for code, _, _ in ROWS
    ]
    assert codes == sorted(set(codes)) and len(codes) == PAGE.read_text().count("\n| ") - PAGE.read_text().count(
        "| Code |"
    )
