"""Write Geometry3K, or data of its form, as prompts of a run and as chats for fine-tuning.

    python examples/geo3k_vlm/write_data.py --input train.parquet --output data/geometry3k/train.jsonl
    python examples/geo3k_vlm/write_data.py --input train.parquet --output data/geometry3k/train_sft.jsonl --chats

A row of the input has `problem`, in which `<image>` is the place of each figure, `images` and `answer`. Figures that stand in
the rows become files beside the output.
"""

import argparse
import base64
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slime.utils.data_files import BadRow, iterate_rows, path_without_slice
from slime.utils.errors import UserError
from slime.utils.filesystem import write_text_atomically
from slime.utils.image_rows import image_sources, messages_with_images
from slime.utils.processing_utils import open_image
from tools.command_line import run_tool

REQUEST = "Think step by step, then give the answer in \\boxed{}."
PLACE = "<image>"


def question(problem: str, figures: int) -> str:
    """What the model is asked. Figures that the problem does not place stand before it."""
    return f"{PLACE * (figures - problem.count(PLACE))}{problem.strip()}\n{REQUEST}"


def figures_of(row: dict[str, Any], folder: str) -> list[str]:
    """The figures of a row, as a run reads them: absolute paths, relative ones beginning at `folder`, and data URIs.

    Raises:
        BadRow: a field is missing, or a figure, or a place has none.
    """
    missing = [name for name in ("problem", "images", "answer") if row.get(name) is None]
    if missing:
        raise BadRow(f"there is no {', '.join(missing)}")
    images = image_sources(row["images"], folder, "images")
    messages_with_images(question(row["problem"], len(images)), images, folder, ("problem", "images"))
    return images


def store(source: str, folder: Path, name: str) -> str:
    """Where a row finds its figure: a path relative to `folder`, in which a data URI becomes a file, or the path that it is."""
    if not source.startswith("data:"):
        return source
    with open_image(source) as image:
        suffix = image.format.lower()
    path = folder / "images" / f"{name}.{suffix}"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(base64.b64decode(source.partition(",")[2]))
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
    folder, rows = os.path.dirname(os.path.abspath(path_without_slice(given.input))), []
    for number, (where, row) in enumerate(iterate_rows(given.input, "--input")):
        try:
            images = figures_of(row, folder)
        except BadRow as error:
            raise UserError(f"{where}: {error}") from error
        stored = [
            store(image, given.output.parent, f"{given.output.stem}-{number}-{place}")
            for place, image in enumerate(images)
        ]
        rows.append(as_row(row, stored, given.chats))
    write_text_atomically(given.output, "".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} rows written to {given.output}")


if __name__ == "__main__":
    run_tool(main)
