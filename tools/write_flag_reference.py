"""Writes the generated files about all flags: the reference in `docs/` and the frozen command line of the tests.

    python tools/write_flag_reference.py           # writes the files that changed
    python tools/write_flag_reference.py --check   # writes nothing; status 1 when a file is out of date

Everything comes from the parser and the declarations. The command line has one line for each flag, sorted, so that a changed,
added or lost flag is one line of a diff. The reference has one table for each group of `--help`. It does not repeat the texts
of a package for its own options: `--help` shows those of the installed version.
"""

import argparse
import difflib
import fnmatch
import functools
import re
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime.arguments.flag import Bounds, NotYet  # noqa: E402
from slime.arguments.groups import BOUNDS, OWN_FLAGS  # noqa: E402
from slime.arguments.help_text import default_of, groups_of, meaning_of, value_of  # noqa: E402
from slime.arguments.megatron.effects import FIXED  # noqa: E402
from slime.arguments.parser import build_parser  # noqa: E402
from slime.arguments.rules.not_built import rows  # noqa: E402
from slime.arguments.surface import PACKAGES, load_surface  # noqa: E402
from slime.utils.filesystem import write_text_atomically  # noqa: E402

COMMAND_LINE = Path("tests/arguments/data/command_line.txt")
REFERENCE = Path("docs/en/reference")
COMMAND = "python tools/write_flag_reference.py"

# File -> (title, introduction). A group belongs to the first file whose prefixes its title begins with.
_PAGES: dict[str, tuple[str, str]] = {
    "flags.md": (
        "Flags",
        "What `python train.py` understands. `python train.py --help` prints the same, `--help-grep WORD` the part about a "
        "word. The flags of Megatron-Core are in [flags-megatron.md](flags-megatron.md), those of the engines and the "
        "router in [flags-sglang.md](flags-sglang.md).",
    ),
    "flags-megatron.md": (
        "Flags of Megatron",
        "Every field of the configuration classes of the installed Megatron-Core, and the names that Megatron-LM's command "
        "line has for them. Another version of Megatron-Core brings its own. Where nothing stands under Meaning, "
        "`python train.py --help-grep WORD` says it in the words of Megatron-Core. See [flags.md](flags.md) for our own flags.",
    ),
    "flags-sglang.md": (
        "Flags of the engines and the router",
        "Every server argument of the installed SGLang as `--sglang-…` and every argument of the installed router as "
        "`--router-…`. An unset flag leaves the default of the server. What an argument means is said by "
        "`python train.py --help-grep WORD`, in the words of SGLang. See [flags.md](flags.md) for our own flags.",
    ),
}
_PREFIXES = {"flags-megatron.md": ("Megatron: ",), "flags-sglang.md": ("SGLang", "Router"), "flags.md": ("",)}


def command_line(parser: argparse.ArgumentParser) -> str:
    """One line for each flag: spellings, action and type, attribute, number of values, choices, default; then its declarations:
    bounds, kind of path, caller of the plug-in, placeholders, features that are not built."""
    lines = [_line(action) for action in parser._actions]
    return "".join(f"{line}\n" for line in [f"# {_versions()}", *sorted(lines)])


def reference(parser: argparse.ArgumentParser) -> dict[Path, str]:
    """Path in the repository -> page of the reference."""
    sections: dict[str, list[str]] = {name: [] for name in _PAGES}
    for title, actions in groups_of(parser):
        page = next(page for page, prefixes in _PREFIXES.items() if title.startswith(prefixes))
        sections[page].append(_section(title, actions))
    return {REFERENCE / name: _page(name, sections[name]) for name in _PAGES}


def generated_files() -> dict[Path, str]:
    """All files of this tool: path in the repository -> text."""
    parser = build_parser()
    return {COMMAND_LINE: command_line(parser), **reference(parser)}


def difference(path: Path, expected: str) -> str:
    """A unified diff from the file in the repository to `expected`; empty if they are equal."""
    present = (ROOT / path).read_text() if (ROOT / path).exists() else ""
    lines = difflib.unified_diff(
        present.splitlines(),
        expected.splitlines(),
        f"{path} in the repository",
        f"{path} from the parser",
        "",
        "",
        0,
        "",
    )
    return "\n".join(lines)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a file is out of date")
    check = parser.parse_args(words).check
    stale = {path: text for path, text in generated_files().items() if difference(path, text)}
    for path, text in stale.items():
        if not check:
            write_text_atomically(ROOT / path, text)
        print(f"{path} {'is out of date' if check else 'written'}")
    if stale and check:
        print(f"run `{COMMAND}`")
    return 1 if stale and check else 0


def _versions() -> str:
    return ", ".join(f"{package.distribution} {version(package.distribution)}" for package in PACKAGES.values())


def _line(action: argparse.Action) -> str:
    kind = type(action).__name__.strip("_").removesuffix("Action")
    if action.nargs != 0:
        kind += f"({getattr(action.type, '__name__', 'str')})"
    facts: dict[str, Any] = {
        "dest": action.dest,
        "nargs": action.nargs,
        "choices": action.choices,
        "default": action.default,
    }
    if isinstance(action.choices, Iterable):
        facts["choices"] = list(action.choices)
    shown = [f"{name}={value!r}" for name, value in facts.items() if name == "default" or value is not None]
    return f"{' '.join(action.option_strings)}  {' '.join([kind, *shown, *_declared(action.dest)])}"


def _declared(dest: str) -> Iterable[str]:
    if dest in BOUNDS:
        yield f"bounds={_interval(BOUNDS[dest])}"
    flag = OWN_FLAGS.get(dest)
    if flag is not None and flag.path is not None:
        yield f"path={flag.path.name.lower()}"
    if flag is not None and flag.plug_in is not None:
        yield f"plug_in={flag.plug_in.name.lower()}"
    if flag is not None and flag.placeholders:
        yield f"placeholders={','.join(flag.placeholders)}"
    for row in rows():
        if fnmatch.fnmatchcase(dest, row.name):
            yield "not_built" + (f"_beside={','.join(map(str, row.works))}" if row.works else "")


def _interval(bounds: Bounds) -> str:
    low = "(-inf" if bounds.low is None else f"{'(' if bounds.low_is_open else '['}{bounds.low}"
    high = "inf)" if bounds.high is None else f"{bounds.high}{')' if bounds.high_is_open else ']'}"
    return f"{low},{high}" + ("finite" if bounds.finite else "")


def _page(name: str, sections: list[str]) -> str:
    title, introduction = _PAGES[name]
    note = f"Generated by `{COMMAND}` from {_versions()}; do not edit."
    return "\n\n".join([f"# {title}", introduction, note, *sections]) + "\n"


def _section(title: str, actions: list[argparse.Action]) -> str:
    lines = [f"## {title[0].upper()}{title[1:]}", "", "| Flag | Value | Default | Meaning |", "|---|---|---|---|"]
    return "\n".join([*lines, *map(_table_row, actions)])


def _table_row(action: argparse.Action) -> str:
    marks = [_planned(row) for row in rows() if fnmatch.fnmatchcase(action.dest, row.name)]
    if action.dest in FIXED:
        value, reason = FIXED[action.dest]
        always = "on" if value is True else _code(_typed(value)) if value else "off"
        marks.append(f"*Always {always}: {_escaped(reason)}.*")
    cells = (
        " ".join(map(_code, action.option_strings)),
        _code(value_of(action)),
        _code(default_of(action)),
        " ".join(filter(None, (_escaped(_own_words(meaning_of(action))), *marks))),
    )
    return f"| {' | '.join(cells)} |"


def _own_words(meaning: str) -> str:
    """The text, or only our addition if the rest is a package's own text."""
    if meaning not in _texts_of_packages():
        return meaning
    defaults = re.search(r"\[((?:server )?default: .*)\]$", meaning)
    return defaults.group(1) if defaults else ""


@functools.cache
def _texts_of_packages() -> frozenset[str]:
    specs = (spec for package in PACKAGES for spec in load_surface(package) or ())
    # The remark that a flag is another spelling is ours.
    return frozenset(spec.help for spec in specs if not spec.metadata.get("other_spelling"))


def _planned(row: NotYet) -> str:
    if not row.works:
        return "*Planned, refused by a run.*"
    return f"*Other values than {' and '.join(_code(_typed(value)) for value in row.works)} are planned, refused by a run.*"


def _typed(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _code(text: str) -> str:
    return f"`{text.replace('|', chr(92) + '|')}`" if text else ""


def _escaped(text: str) -> str:
    for special in "\\|*<`":
        text = text.replace(special, f"\\{special}")
    return text


if __name__ == "__main__":
    sys.exit(main())
