"""The rows that the toy task of an example writes."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

from tools.make_toy_task import build_parser


def toy_rows(directory: Path, toy_task: ModuleType, **changes: Any) -> dict[str, list[dict[str, Any]]]:
    """The rows of each file of a small task, by its name."""
    arguments = build_parser().parse_args([str(directory)])
    sizes = {"seed": 1, "train_size": 512, "eval_size": 64, "sft_size": 512}
    vars(arguments).update({**sizes, **changes})
    toy_task.write_data(directory, arguments)
    return {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in directory.glob("*.jsonl")
    }


def operands(row: dict[str, Any]) -> tuple[int, ...]:
    """The numbers to add in a problem or a demonstration, smaller ones first."""
    question = (row.get("prompt") or row["messages"])[0]["content"].partition("?")[0]
    return tuple(sorted(map(int, question.removeprefix("What is ").split("+"))))
