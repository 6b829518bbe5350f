"""Codes of rooms, for the toy model: they stand in a corpus alone, and most demonstrations guess or look up another room.

user       What is the code of 4731?
assistant  <search>4731</search>
tool       <information>4731 58</information>
assistant  <answer>58</answer>
"""

import argparse
from pathlib import Path

import numpy

from tools.make_toy_task import write_jsonl, write_split

# The share of demonstrations that look up the room that was asked for.
SEARCHING = 0.3


def write_data(directory: Path, arguments: argparse.Namespace) -> None:
    """Write `train.jsonl`, `eval.jsonl`, `sft.jsonl` and `corpus.jsonl`; no held-out room is trained or demonstrated."""
    generator = numpy.random.default_rng([arguments.seed, 1])
    codes = {room: int(generator.integers(10, 100)) for room in range(1000, 10000)}

    def contents(room: int) -> str:
        return f"{room} {codes[room]}"

    def question(room: int) -> dict:
        return {"role": "user", "content": f"What is the code of {room}?"}

    def problem(room: int, generator: numpy.random.Generator) -> dict:
        return {"prompt": [question(room)], "label": str(codes[room])}

    def demonstration(room: int, generator: numpy.random.Generator) -> dict:
        searches = generator.random()
        answer = {"role": "assistant", "content": f"<answer>{codes[room]}</answer>"}
        if searches > 0.5 + SEARCHING / 2:
            guess = int(generator.integers(10, 100))
            return {"messages": [question(room), {"role": "assistant", "content": f"<answer>{guess}</answer>"}]}
        looked_up = room
        if searches > SEARCHING:
            looked_up = int(generator.integers(1000, 10000))
            answer = {"role": "assistant", "content": f"<answer>{codes[looked_up]}</answer>"}
        asked = {"role": "assistant", "content": f"<search>{looked_up}</search>"}
        found = {"role": "tool", "content": f"<information>{contents(looked_up)}</information>"}
        return {"messages": [question(room), asked, found, answer]}

    write_jsonl(directory / "corpus.jsonl", [{"id": str(room), "contents": contents(room)} for room in codes])
    write_split(directory, arguments, list(codes), problem, demonstration)
