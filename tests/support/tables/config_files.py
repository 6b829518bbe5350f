"""Writes files that flags name, and parses such flags, for tests of the files' contents."""

from __future__ import annotations

import argparse
from pathlib import Path

from slime.arguments.parser import ArgumentParser, parse_known


def written(directory: Path, text: str, name: str) -> Path:
    """Write `text` into the file `name` of `directory`. Returns its path."""
    path = directory / name
    path.write_text(text)
    return path


def parsed_with_file(parser: ArgumentParser, flag: str, path: Path, *words: str) -> argparse.Namespace:
    """The parsed arguments for `flag` with the file and for further words. The file itself is not read yet."""
    return parse_known(parser, [flag, str(path), *words])
