"""Files that flags name, in the tests of what is read from them."""

from __future__ import annotations

import argparse
from pathlib import Path

from slime.arguments.parser import ArgumentParser, parse_known


def written(directory: Path, text: str, name: str) -> Path:
    """The file `name` of `directory`, which holds `text`."""
    path = directory / name
    path.write_text(text)
    return path


def parsed_with_file(parser: ArgumentParser, flag: str, path: Path, *words: str) -> argparse.Namespace:
    """The arguments that `parser` makes of `flag` with the file and of further words; the file itself is not read yet."""
    return parse_known(parser, [flag, str(path), *words])
