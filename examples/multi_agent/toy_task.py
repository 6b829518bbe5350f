"""Sums of two numbers, for the toy model in three roles: most demonstrations guess, and selectors choose blindly.

user       What is 47+38?
assistant  \\boxed{81}

user       What is 47+38?
           1: 7+8=15 4+3+1=8 \\boxed{85}
           2: \\boxed{81}
           Write your own solution.
assistant  \\boxed{81}

user       What is 47+38?
           1: \\boxed{81}
           2: 7+8=15 4+3+1=8 \\boxed{85}
           Box the number of the best one.
assistant  \\boxed{1}
"""

import argparse
from pathlib import Path

import numpy

from examples.fan_out.toy_task import all_sums, answer, problem
from examples.multi_agent.multi_agent import listed, to_rewrite, to_select
from slime.utils.types import Sample
from tools.make_toy_task import Problem, write_split

# Solutions that a rewriter and the selector are shown: `num_parallel` of toy.yaml.
SOLUTIONS = 2
# The share of solutions, the first ones and the rewritten ones, that work the sum out.
WORKED_OUT = 0.4


def demonstration(sum_: Problem, generator: numpy.random.Generator) -> dict:
    """What a solver, a rewriter or the selector says, each as often as an execution has of them."""
    said, *shown = (answer(sum_, generator, worked_out=WORKED_OUT) for _ in range(1 + SOLUTIONS))
    solutions = listed([Sample(response=solution) for solution in shown])
    messages = sum_.prompt
    agent = int(generator.integers(2 * SOLUTIONS + 1))
    if agent == 2 * SOLUTIONS:
        messages, said = to_select(messages, solutions), f"\\boxed{{{generator.integers(SOLUTIONS) + 1}}}"
    elif agent >= SOLUTIONS:
        messages = to_rewrite(messages, solutions)
    return {"messages": [*messages, {"role": "assistant", "content": said}]}


def write_data(directory: Path, arguments: argparse.Namespace) -> None:
    """Write `train.jsonl`, `eval.jsonl` and `sft.jsonl`; no held-out sum is trained or demonstrated."""
    write_split(directory, arguments, all_sums(arguments), problem, demonstration)
