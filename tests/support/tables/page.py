"""The fenced blocks of a page of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every fenced block that names its language, in order."""
    return _BLOCK.findall(page.read_text())
