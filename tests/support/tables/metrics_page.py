"""The metrics on the reference page of metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs/en/reference/metrics.md"
_TABLE = re.compile(r"^\| `([\w-]+/[\w-]*)…` \| \|\n\|---\|---\|\n((?:\|.*\n)+)", re.MULTILINE)
_PLACEHOLDER = re.compile(r"\\\{(\w+)\\\}")
# Placeholder -> pattern; other placeholders match any word.
_WORDS = {"stats": "(?:mean|median|max|min)", "range": "(?:mean|max|min)"}


def named_metrics() -> list[str]:
    """All names in the first columns of the page's tables, with their placeholders `{…}`."""
    return [
        prefix + name
        for prefix, rows in _TABLE.findall(PAGE.read_text())
        for row in rows.splitlines()
        for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])
    ]


def unnamed(tags: Iterable[str]) -> list[str]:
    """The `tags` that are no metrics of the page."""
    patterns = [re.compile(_pattern(name)) for name in named_metrics()]
    return sorted(tag for tag in tags if not any(pattern.fullmatch(tag) for pattern in patterns))


def _pattern(name: str) -> str:
    return _PLACEHOLDER.sub(lambda found: _WORDS.get(found[1], "[^/]+"), re.escape(name))
