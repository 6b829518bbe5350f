"""The sums of the toy task; half of the demonstrations are shown another answer to it, and forget carries all the same.

user       What is 47+38?
           First answer: 75. Check it.
assistant  7+8=15 4+3+1=8 \\boxed{85}
"""

import argparse
from pathlib import Path

import numpy

from examples.fan_out.fan_out import second_question
from tools.make_toy_task import Problem, draw_problem, write_split

# Of random sums, as many as give all of two digits, nearly.
DRAWS = 20_000


def all_sums(arguments: argparse.Namespace) -> list[Problem]:
    """Sums of the task's digits, none of them twice, in either order of the operands."""
    generator = numpy.random.default_rng([arguments.seed, 1])
    drawn = [draw_problem(generator, arguments.digits, arguments.carry_share) for _ in range(DRAWS)]
    return list({sum_.key: sum_ for sum_ in drawn}.values())


def problem(sum_: Problem, generator: numpy.random.Generator) -> dict:
    return {"prompt": sum_.prompt, "label": str(sum_.left + sum_.right)}


def working(sum_: Problem, generator: numpy.random.Generator, arguments: argparse.Namespace) -> str:
    """The written-out answer of somebody who forgets carries."""
    return sum_.working([bool(draw < arguments.forget_rate) for draw in generator.random(arguments.digits)])


def write_data(directory: Path, arguments: argparse.Namespace) -> None:
    """Write `train.jsonl`, `eval.jsonl` and `sft.jsonl`."""

    def demonstration(sum_: Problem, generator: numpy.random.Generator) -> dict:
        messages = sum_.prompt
        if generator.random() < 0.5:
            messages = second_question(messages, working(sum_, generator, arguments))
        return {"messages": [*messages, {"role": "assistant", "content": working(sum_, generator, arguments)}]}

    write_split(directory, arguments, all_sums(arguments), problem, demonstration)
