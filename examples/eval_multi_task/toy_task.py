"""The toy task, with three sets for evaluation and the file that describes them."""

import argparse
import json
from pathlib import Path

from tools import make_toy_task

# `{directory}`: the task's. Letters of choices are asked for nowhere in training: that set stays at 0.
CONFIG = """\
eval:
  defaults: {{temperature: 1.0, rm_type: math}}
  datasets:
    - {{name: held_out, path: {directory}/eval.jsonl, n_samples_per_eval_prompt: 1}}
    - {{name: carries, path: {directory}/carries.jsonl, n_samples_per_eval_prompt: 4}}
    - {{name: letters, path: {directory}/letters.jsonl, rm_type: gpqa, metadata_key: metadata, n_samples_per_eval_prompt: 2}}
"""


def write_data(directory: Path, arguments: argparse.Namespace) -> None:
    """Write the files of the toy task, `carries.jsonl`, `letters.jsonl` and `eval.yaml`."""
    make_toy_task.write_data(directory, arguments)
    rows = [json.loads(line) for line in (directory / "eval.jsonl").read_text().splitlines()]
    make_toy_task.write_jsonl(directory / "carries.jsonl", [row for row in rows if row["metadata"]["carries"]][:32])
    letters = [
        {
            "prompt": [{"role": "user", "content": f"{row['prompt'][0]['content']}\nA: {row['label']} B: 1"}],
            "label": "A",
            "metadata": {"valid_letters": ["A", "B"]},
        }
        for row in rows[:16]
    ]
    make_toy_task.write_jsonl(directory / "letters.jsonl", letters)
    (directory / "eval.yaml").write_text(CONFIG.format(directory=directory.resolve()))
