"""A page in Chinese has what the English one of the same path has: all but the words."""

import re
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGLISH, CHINESE = ROOT / "docs/en", ROOT / "docs/zh"
PAGES = sorted(path.relative_to(CHINESE) for path in CHINESE.rglob("*.md"))
# Tables that a tool writes stand on the English page alone.
_GENERATED = re.compile(r"<!-- (\w[\w ]*): begin -->.*?<!-- \1: end -->", re.DOTALL)
_HEADING = re.compile(r"(#{1,6}) (.+)")
_SPAN = re.compile(r"`([^`]+)`")
_FLAG = re.compile(r"(?<![\w-])--\w")
_COLUMN = re.compile(r"(?<!\\)\|")
_IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)#\s]+)")


@dataclass
class Section:
    """What stands under a heading; before the first one `heading` is empty."""

    level: int = 0
    heading: str = ""
    blocks: list[str] = field(default_factory=list)
    # Of each table the columns of each row.
    tables: list[list[int]] = field(default_factory=list)
    # Inline code with a flag in it.
    flags: set[str] = field(default_factory=set)
    images: set[Path] = field(default_factory=set)


def sections(text: str, folder: Path) -> list[Section]:
    """The parts of a page in `folder`, in order."""
    found, prose, block, table = [Section()], "", None, None
    for line in [*_GENERATED.sub("", text).splitlines(), "# end"]:
        last = found[-1]
        if block is not None or line.startswith("```"):
            whole = line if block is None else f"{block}\n{line}"
            block, table = (None if block is not None and line == "```" else whole), None
            if block is None:
                last.blocks.append(whole)
        elif heading := _HEADING.fullmatch(line):
            last.flags = {" ".join(span.split()) for span in _SPAN.findall(prose) if _FLAG.search(span)}
            last.images = {(folder / target).resolve() for target in _IMAGE.findall(prose)}
            found.append(Section(len(heading[1]), heading[2]))
            prose, table = "", None
        else:
            prose += f"{line}\n"
            if not line.startswith("|"):
                table = None
            elif table is None:
                last.tables.append(table := [])
            if table is not None:
                table.append(len(_COLUMN.findall(line.rstrip())) - 1)
    assert block is None, f"a fenced block does not end: {block[:60]}"
    return found[:-1]


def _missing(kind: str, english: set, chinese: set) -> list[str]:
    lacks = [f"{kind} of the English page is missing: {what}" for what in sorted(english - chinese)]
    return lacks + [f"{kind} is not in the English page: {what}" for what in sorted(chinese - english)]


def differences(english: list[Section], chinese: list[Section]) -> list[str]:
    """What to change in a Chinese page, each with the heading that it stands under."""
    for left, right in zip_longest(english, chinese, fillvalue=Section(heading="no heading")):
        if left.level != right.level:
            marks = [f"{'#' * section.level} {section.heading}".strip() for section in (left, right)]
            return [f"headings differ, from here on: '{marks[0]}' in English, '{marks[1]}' in Chinese"]
    told = []
    for left, right in zip(english, chinese, strict=True):
        found = []
        if left.blocks != right.blocks:
            places = [i for i, (a, b) in enumerate(zip_longest(left.blocks, right.blocks), start=1) if a != b]
            found.append(f"fenced blocks {places} are not those of the English page: copy them")
        for number, (a, b) in enumerate(zip_longest(left.tables, right.tables, fillvalue=()), start=1):
            if len(a) != len(b):
                found.append(f"table {number} has {len(a)} rows in English, {len(b)} in Chinese")
            elif a != b:
                rows = [i + 1 for i, (wide, narrow) in enumerate(zip(a, b, strict=True)) if wide != narrow]
                found.append(f"table {number} has other numbers of columns in rows {rows}")
        found += _missing("code with flags", left.flags, right.flags)
        found += _missing("image", left.images, right.images)
        told += [f"under '{right.heading}' ('{left.heading}'): {what}" for what in found]
    return told


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_has_all_that_the_english_one_has(page):
    assert (ENGLISH / page).is_file(), f"docs/en/{page} is no more: move docs/zh/{page} where it went, or remove it"
    english, chinese = (sections((tree / page).read_text(), (tree / page).parent) for tree in (ENGLISH, CHINESE))
    told = differences(english, chinese)
    assert not told, f"change docs/zh/{page} as docs/en/{page} is (words may stay):\n" + "\n".join(told)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_stay_in_the_language(page):
    """A page names its English one above all else, and leads to Chinese pages where there are any."""
    text, folder = (CHINESE / page).read_text(), (CHINESE / page).parent
    targets = [(target, (folder / target).resolve()) for target in _LINK.findall(text)]
    assert targets and targets[0][1] == ENGLISH / page, f"the first link of docs/zh/{page} has to be its English page"
    foreign = {
        target for target, path in targets[1:] if path.is_relative_to(ENGLISH) and path.relative_to(ENGLISH) in PAGES
    }
    assert not foreign, f"docs/zh/{page} can lead to the Chinese pages of these: {sorted(foreign)}"


_ENGLISH = """# A page

Give `--one 1`, or
`--two
2`; ![a curve](curve.svg)

```bash
# no heading
run --three
```

| Flag | Why |
|---|---|
| `--four` | none |
| `a\\|b` | `bash run.sh --five` |

## More

```yaml
a: 1
```
"""


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("Give", "给出", None),
        ("`--two\n2`", "`--two 2`", None),
        ("(curve.svg)", "(../en/curve.svg)", None),
        ("`--one 1`", "`--one`", "under 'A page' ('A page'): code with flags of the English page is missing: --one 1"),
        (
            "`--one 1`",
            "`--one 1` `--six`",
            "under 'A page' ('A page'): code with flags is not in the English page: --six",
        ),
        (
            "--five",
            "--six",
            "under 'A page' ('A page'): code with flags of the English page is missing: bash run.sh --five",
        ),
        ("--three", "-3", "under 'A page' ('A page'): fenced blocks [1] are not those of the English page: copy them"),
        (
            "```yaml\na: 1\n```\n",
            "",
            "under 'More' ('More'): fenced blocks [1] are not those of the English page: copy them",
        ),
        ("| `--four` | none |\n", "", "under 'A page' ('A page'): table 1 has 4 rows in English, 3 in Chinese"),
        (
            "| `--four` | none |",
            "| `--four` |",
            "under 'A page' ('A page'): table 1 has other numbers of columns in rows [3]",
        ),
        ("## More", "### 更多", "headings differ, from here on: '## More' in English, '### 更多' in Chinese"),
        ("## More\n", "", "headings differ, from here on: '## More' in English, 'no heading' in Chinese"),
        ("![a curve](curve.svg)", "", "under 'A page' ('A page'): image of the English page is missing: /en/curve.svg"),
    ],
)
def test_what_differs_is_told(old, new, told):
    folder = Path("/en")
    assert _ENGLISH.count(old) == 1
    found = differences(sections(_ENGLISH, folder), sections(_ENGLISH.replace(old, new), folder))
    assert found[:1] == ([] if told is None else [told])
