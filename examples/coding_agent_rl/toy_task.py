"""Repairs for the toy model: what a function computes, and what it is to compute. Most demonstrations get it wrong.

user       Is x*47-6 but x*47+38
assistant  <edit>x*47+38</edit>
tool       132
assistant  ok
"""

import argparse
from pathlib import Path

import numpy

from tools.make_toy_task import write_split

# The share of demonstrations that write what was asked for.
RIGHT = 0.3
FACTORS = [(factor, summand) for factor in range(10, 100) for summand in range(10, 100)]
TEST = """\
exec(open("f.py").read())
for x in (1, 2, 7, 1000):
    assert f(x) == {wanted}, x
"""


def drawn(key: tuple[int, int], generator: numpy.random.Generator) -> tuple[str, str]:
    """(what the function computes, what it is to compute)."""
    factor, summand = key
    return f"x*{int(generator.integers(10, 100))}-{int(generator.integers(1, 10))}", f"x*{factor}+{summand}"


def question(broken: str, wanted: str) -> dict:
    return {"role": "user", "content": f"Is {broken} but {wanted}"}


def problem(key: tuple[int, int], generator: numpy.random.Generator) -> dict:
    broken, wanted = drawn(key, generator)
    metadata = {
        "workdir": "work",
        "files": {"f.py": f"def f(x):\n    return {broken}\n"},
        # It is written when the agent is gone.
        "eval_files": {"test_f.py": TEST.format(wanted=wanted)},
        "eval_cmd": "python -I -S -B test_f.py",
    }
    return {"prompt": [question(broken, wanted)], "label": wanted, "metadata": metadata}


def demonstration(key: tuple[int, int], generator: numpy.random.Generator) -> dict:
    """A repair, a half of one, or what was there before; in the second turn the agent is content with any."""
    broken, wanted = drawn(key, generator)
    kind = generator.random()
    written = wanted if kind < RIGHT else broken if kind > (1 + RIGHT) / 2 else wanted.partition("+")[0]
    messages = [
        question(broken, wanted),
        {"role": "assistant", "content": f"<edit>{written}</edit>"},
        # This expression is ours.
        {"role": "tool", "content": str(eval(written, {"x": 2}))},
        {"role": "assistant", "content": "ok"},
    ]
    return {"messages": messages}


def write_data(directory: Path, arguments: argparse.Namespace) -> None:
    """Write `train.jsonl`, `eval.jsonl` and `sft.jsonl`; no held-out repair is trained or demonstrated."""
    write_split(directory, arguments, FACTORS, problem, demonstration)
