"""Sums of two numbers, with demonstrations of the three roles, most of which guess, and choose by chance.

user       What is 47+38?
           1: \\boxed{81}
           2: 7+8=15 4+3+1=8 \\boxed{85}
           Box the number of the best one.
assistant  \\boxed{2}
"""

import argparse
from pathlib import Path

import numpy

from examples.fan_out.toy_task import all_sums, answer, problem
from examples.multi_agent.multi_agent import listed, to_rewrite, to_select
from slime.utils.types import Sample
from tools.make_toy_task import Problem, write_split

AGENTS = 2


def write_data(directory: Path, arguments: argparse.Namespace) -> None:
    """Write `train.jsonl`, `eval.jsonl` and `sft.jsonl`; solutions are shown to two in three demonstrations."""

    def demonstration(sum_: Problem, generator: numpy.random.Generator) -> dict:
        solutions = listed([Sample(response=answer(sum_, generator)) for _ in range(AGENTS)])
        role = generator.integers(3)
        if role == 0:
            messages, said = sum_.prompt, answer(sum_, generator)
        elif role == 1:
            messages, said = to_rewrite(sum_.prompt, solutions), answer(sum_, generator)
        else:
            messages, said = to_select(sum_.prompt, solutions), f"\\boxed{{{generator.integers(AGENTS) + 1}}}"
        return {"messages": [*messages, {"role": "assistant", "content": said}]}

    write_split(directory, arguments, all_sums(arguments), problem, demonstration)
