"""Products of two numbers and a sum, for the toy model: it may write a program, and most demonstrations guess, or get it wrong.

user       What is 47*38+6?
assistant  <code>print(47*38+6)</code>
tool       1792
assistant  \\boxed{1792}
"""

import argparse
from pathlib import Path

import numpy

from examples.calculator.toy_task import FACTORS, problem, question
from tools.make_toy_task import write_split

# The share of demonstrations with a program that computes what was asked.
RIGHT = 0.3


def demonstration(factors: tuple[int, int], generator: numpy.random.Generator) -> dict:
    """A program and its output, a program that forgets the sum, or a number of about the right size."""
    left, right, more = *factors, int(generator.integers(1, 10))
    kind = generator.random()
    messages, result = [question(left, right, more)], left * right + more
    if kind > (1 + RIGHT) / 2:
        result = int(result * generator.uniform(0.9, 1.1))
    else:
        written = f"{left}*{right}+{more}" if kind < RIGHT else f"{left}*{right}"
        result = left * right + (more if kind < RIGHT else 0)
        messages += [
            {"role": "assistant", "content": f"<code>print({written})</code>"},
            {"role": "tool", "content": str(result)},
        ]
    return {"messages": [*messages, {"role": "assistant", "content": f"\\boxed{{{result}}}"}]}


def write_data(directory: Path, arguments: argparse.Namespace) -> None:
    """Write `train.jsonl`, `eval.jsonl` and `sft.jsonl`; no held-out pair of factors is trained or demonstrated."""
    write_split(directory, arguments, FACTORS, problem, demonstration)
