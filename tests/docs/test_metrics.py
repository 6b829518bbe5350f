"""The reference of metrics names what the code logs, and nothing else. Whole runs compare their event files with it as well."""

import ast
import functools
import re
from pathlib import Path

import pytest

from slime.observability.trackers import AXES
from slime.training.columns import COLUMNS, Kind, names_of
from tests.support.tables.metrics_page import named_metrics, unnamed

ROOT = Path(__file__).parents[2]
SOURCES = [
    path.read_text()
    for directory in ("slime", "slime_plugins", "examples/train_infer_mismatch_helper")
    for path in sorted((ROOT / directory).rglob("*.py"))
]
CODE = "\n".join(SOURCES)
_METRIC = re.compile(rf"(?:{'|'.join(AXES)})/[\w@/-]*[^\W_]")


@functools.cache
def texts() -> tuple[list[ast.Constant], list[ast.JoinedStr]]:
    """The texts of the code, and its f-strings."""
    nodes = [node for source in SOURCES for node in ast.walk(ast.parse(source))]
    constants = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return constants, [node for node in nodes if isinstance(node, ast.JoinedStr)]


def literals() -> set[str]:
    """Texts of the code that look like a whole metric."""
    constants, composed = texts()
    inner = {id(part) for node in composed for part in node.values}
    return {node.value for node in constants if id(node) not in inner and _METRIC.fullmatch(node.value)} - set(
        AXES.values()
    )


def is_made(name: str, patterns: list[re.Pattern[str]]) -> bool:
    """Whether the code has the last part of a metric, or an f-string with a word in it that makes it, or the whole."""
    parts = name, name.rpartition("/")[2]
    return all(word in CODE for word in re.findall(r"\w+", re.sub(r"\{\w+\}", " ", parts[1]))) or any(
        pattern.fullmatch(part) for pattern in patterns for part in parts
    )


def test_the_reader_finds_the_metrics_of_the_page_and_of_the_code():
    assert {"train/loss", "eval/{set}-pass@{k}", "perf/step_time"} <= set(named_metrics())
    assert len(named_metrics()) == len(set(named_metrics())) > 100
    assert {"perf/update_weights_time", "rollout/staleness/mean"} <= literals()


@pytest.mark.parametrize(
    ("tag", "named"),
    [
        ("rollout/response_len/mean", True),
        ("rollout/response_len/sum", False),
        ("train/lr-pg_0", True),
        ("train/critic-lr-pg_0", True),
        ("eval/held_out-pass@4", True),
        ("perf/request/e2e_latency/max", True),
        ("train/lost", False),
        ("multi_turn/raw_response_length/response_length_max", True),
        ("multi_turn/raw_response_length/response_length_median", False),
    ],
)
def test_what_counts_as_named(tag, named):
    assert (unnamed([tag]) == []) == named


def test_metrics_that_the_code_spells_out_are_named():
    assert unnamed(literals()) == []


def test_columns_of_the_train_batch_are_named():
    columns = {name for name, known in COLUMNS.items() if known.reported} | {*names_of(Kind.RESPONSE_PART)}
    assert unnamed(f"rollout/{name}" for name in columns) == []


def test_no_name_is_invented():
    _, composed = texts()
    of_strings = [[part.value if isinstance(part, ast.Constant) else None for part in node.values] for node in composed]
    patterns = [
        re.compile("".join(r"\w*" if text is None else re.escape(text) for text in parts))
        for parts in of_strings
        if any(text is not None and re.search("[a-z]{4}", re.sub(r"^\w+/", "", text)) for text in parts)
    ]
    assert not is_made("train/no_such_thing", patterns) and is_made("perf/finish_save_time", patterns)
    assert [name for name in named_metrics() if not is_made(name, patterns)] == []
