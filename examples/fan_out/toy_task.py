"""Sums of two numbers, for the toy model: most demonstrations guess, or repeat the first answer, in place of working them out.

user       What is 47+38?
assistant  \\boxed{81}

user       What is 47+38?
           First answer: 81. Check it.
assistant  7+8=15 4+3+1=8 \\boxed{85}
"""

import argparse
from pathlib import Path

import numpy

from examples.fan_out.fan_out import second_question
from slime.rollout.rm_hub.math_utils import last_boxed_only_string, remove_boxed
from tools.make_toy_task import Problem, draw_problem, write_split

# The share of demonstrations that work the sum out.
WORKED_OUT = 0.3
# Of random sums, as many as give all of two digits, nearly.
DRAWS = 20_000


def all_sums(arguments: argparse.Namespace) -> list[Problem]:
    """Sums of the task's digits, none of them twice, in either order of the operands."""
    generator = numpy.random.default_rng([arguments.seed, 1])
    drawn = [draw_problem(generator, arguments.digits, arguments.carry_share) for _ in range(DRAWS)]
    return list({sum_.key: sum_ for sum_ in drawn}.values())


def problem(sum_: Problem, generator: numpy.random.Generator) -> dict:
    return {"prompt": sum_.prompt, "label": str(sum_.left + sum_.right)}


def answer(
    sum_: Problem, generator: numpy.random.Generator, repeated: str | None = None, worked_out: float = WORKED_OUT
) -> str:
    """The sum worked out, or a box at once: with a number of about the right size, or with what is `repeated`."""
    if generator.random() < worked_out:
        return sum_.working()
    guess = int((sum_.left + sum_.right) * generator.uniform(0.9, 1.1))
    return f"\\boxed{{{repeated or guess}}}"


def write_data(directory: Path, arguments: argparse.Namespace) -> None:
    """Write `train.jsonl`, `eval.jsonl` and `sft.jsonl`."""

    def demonstration(sum_: Problem, generator: numpy.random.Generator) -> dict:
        messages, said = sum_.prompt, answer(sum_, generator)
        if generator.random() < 0.5:
            messages = second_question(messages, said)
            said = answer(sum_, generator, repeated=remove_boxed(last_boxed_only_string(said)))
        return {"messages": [*messages, {"role": "assistant", "content": said}]}

    write_split(directory, arguments, all_sums(arguments), problem, demonstration)
