"""Write Geometry3K, or data of its form, as prompts of a run and as chats for fine-tuning.

    python examples/geo3k_vlm/write_data.py --input train.parquet --output data/geometry3k/train.jsonl
    python examples/geo3k_vlm/write_data.py --input train.parquet --output data/geometry3k/train_sft.jsonl --chats

A row of the input has `problem`, in which `<image>` is the place of each figure, `images` and `answer`. Figures that stand in
the rows become files beside the output.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slime.utils.data import read_file
from slime.utils.errors import UserError
from slime.utils.processing_utils import image_entries, open_image, source_of
from tools.command_line import run_tool

REQUEST = "Think step by step, then give the answer in \\boxed{}."
PLACE = "<image>"


def question(problem: str, figures: int) -> str:
    """What the model is asked. Figures that the problem does not place stand before it."""
    return f"{PLACE * (figures - problem.count(PLACE))}{problem.strip()}\n{REQUEST}"


def store(entry: Any, folder: Path, name: str) -> str:
    """Where a row finds its figure: a path relative to `folder`, in which it becomes a file, or the path that the data has."""
    source = source_of(entry)
    with open_image(source) as image:
        suffix = image.format.lower()
    if not isinstance(source, bytes):
        return os.path.abspath(source)
    path = folder / "images" / f"{name}.{suffix}"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(source)
    return str(path.relative_to(folder))


def as_row(row: dict[str, Any], images: list[str], chats: bool) -> dict[str, Any]:
    """A prompt with its label, or a chat whose answer is the label alone: the data has no solutions."""
    asked = {"role": "user", "content": question(row["problem"], len(images))}
    if chats:
        answer = {"role": "assistant", "content": f"\\boxed{{{row['answer']}}}"}
        return {"messages": [asked, answer], "images": images}
    return {"prompt": [asked], "images": images, "label": row["answer"]}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, help="a .parquet or .jsonl file; FILE@[0:100] takes a part of it")
    parser.add_argument("--output", type=Path, required=True, help="a .jsonl file")
    parser.add_argument("--chats", action="store_true", help="messages to imitate, in place of prompts with labels")
    given = parser.parse_args(argv)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, row in enumerate(read_file(given.input, "--input")):
        missing = [name for name in ("problem", "images", "answer") if row.get(name) is None]
        if missing:
            raise UserError(f"--input {given.input}: row {number} has no {', '.join(missing)}")
        names = [f"{given.output.stem}-{number}-{place}" for place in range(len(image_entries(row["images"])))]
        images = [
            store(entry, given.output.parent, name)
            for entry, name in zip(image_entries(row["images"]), names, strict=True)
        ]
        rows.append(as_row(row, images, given.chats))
    given.output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} rows written to {given.output}")


if __name__ == "__main__":
    run_tool(main)
