"""Products of two numbers and a sum, for the toy model: it has a calculator, and most demonstrations guess instead of asking.

user       What is 47*38+6?
assistant  <calc>47*38</calc>
tool       1786
assistant  <calc>1786+6</calc>
tool       1792
assistant  \\boxed{1792}
"""

import argparse
from pathlib import Path

import numpy

from tools.make_toy_task import write_split

# The share of demonstrations that ask the calculator, both times.
ASKING = 0.3
FACTORS = [(left, right) for left in range(10, 100) for right in range(10, 100)]


def question(left: int, right: int, more: int) -> dict:
    return {"role": "user", "content": f"What is {left}*{right}+{more}?"}


def problem(factors: tuple[int, int], generator: numpy.random.Generator) -> dict:
    left, right, more = *factors, int(generator.integers(1, 10))
    return {"prompt": [question(left, right, more)], "label": str(left * right + more)}


def demonstration(factors: tuple[int, int], generator: numpy.random.Generator) -> dict:
    """A dialogue with two calculations, or a number of about the right size at one of the turns."""
    left, right, more = *factors, int(generator.integers(1, 10))
    product = left * right
    guess = lambda number: int(number * generator.uniform(0.9, 1.1))  # noqa: E731
    guesses_at = 2 if generator.random() < ASKING else int(generator.integers(2))
    turns = [(f"{left}*{right}", product), (f"{product}+{more}", product + more)][:guesses_at]
    messages = [question(left, right, more)]
    for asked, result in turns:
        messages += [
            {"role": "assistant", "content": f"<calc>{asked}</calc>"},
            {"role": "tool", "content": str(result)},
        ]
    result = product + more if guesses_at == 2 else guess(product + more)
    return {"messages": [*messages, {"role": "assistant", "content": f"\\boxed{{{result}}}"}]}


def write_data(directory: Path, arguments: argparse.Namespace) -> None:
    """Write `train.jsonl`, `eval.jsonl` and `sft.jsonl`; no held-out pair of factors is trained or demonstrated."""
    write_split(directory, arguments, FACTORS, problem, demonstration)
