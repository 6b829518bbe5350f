"""The toy task of `tools/make_toy_task.py`, and demonstrations that forget no carry, from which its teacher learns."""

import argparse
from pathlib import Path

from tools import make_toy_task


def write_data(directory: Path, arguments: argparse.Namespace) -> None:
    """Write the files of the toy task, and `teacher.jsonl`: the same problems, all of them added rightly."""
    forgetful = arguments.forget_rate
    arguments.forget_rate = 0.0
    make_toy_task.write_data(directory, arguments)
    (directory / "sft.jsonl").rename(directory / "teacher.jsonl")
    arguments.forget_rate = forgetful
    make_toy_task.write_data(directory, arguments)
