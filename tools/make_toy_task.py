#!/usr/bin/env python3
"""Write a toy task: a tiny random model, its tokenizer, and a verifiable arithmetic data set.

    python tools/make_toy_task.py runs/toy --seed 1

The task is addition with the working written out column by column, units first, and the answer in a box:

    user       What is 47+38?
    assistant  7+8=15 4+3+1=8 \\boxed{85}

The supervised demonstrations come from a teacher who knows the tables but forgets most carries ("4+3=7", boxed 75). So
imitation ends at a middling accuracy however long it lasts, and only the reward can teach the rest. That makes the start of
reinforcement learning the same for every seed, and its success visible within minutes.

Invariants:
- no held-out problem (in either order of its operands) is a training problem or a demonstration;
- the output depends on the arguments alone: equal arguments give equal bytes.

A function in another file can write another task for the same model (`--data examples/calculator/toy_task.py:write_data`).

The tool writes `model/` (Hugging Face checkpoint, Qwen3 architecture), `train.jsonl` and `eval.jsonl` (`prompt`, `label`,
`metadata`), `sft.jsonl` (`messages`, `metadata`) and, last, `task.json` (the arguments), the mark of a complete task.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.utils.errors import UserError
from slime.utils.plugin_loader import load_function
from tools.command_line import run_tool
from tools.toy_model import write_json, write_model

if TYPE_CHECKING:
    import numpy
    from tqdm import tqdm

MARK_OF_COMPLETENESS = "task.json"
# Rejection sampling gives up after this many draws per wanted problem.
MAX_DRAWS_PER_PROBLEM = 2000
TOLD_EVERY_SECONDS = 5.0


@dataclass(frozen=True)
class Problem:
    """`left + right`, both with the same number of digits."""

    left: int
    right: int

    @property
    def key(self) -> tuple[int, int]:
        """The operands, smaller one first: equal for both orders of a problem."""
        return min(self.left, self.right), max(self.left, self.right)

    @property
    def columns(self) -> list[tuple[int, int]]:
        """Digit pairs, units first."""
        return list(zip(map(int, reversed(str(self.left))), map(int, reversed(str(self.right))), strict=True))

    @property
    def carries(self) -> int:
        """The number of columns that receive a carry from the column before."""
        carry, count = 0, 0
        for left_digit, right_digit in self.columns[:-1]:
            carry = int(left_digit + right_digit + carry >= 10)
            count += carry
        return count

    @property
    def prompt(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"What is {self.left}+{self.right}?"}]

    @property
    def metadata(self) -> dict[str, Any]:
        return {"operands": [self.left, self.right], "carries": self.carries}

    def working(self, forgotten: Sequence[bool] | None = None) -> str:
        """The answer with its working; `forgotten[i]` drops the carry into column i + 1."""
        forgotten = forgotten or [False] * len(self.columns)
        steps, digits, carry = [], "", 0
        for (left_digit, right_digit), forget in zip(self.columns, forgotten, strict=True):
            total = left_digit + right_digit + carry
            steps.append(f"{left_digit}+{right_digit}{'+1' if carry else ''}={total}")
            digits = f"{total % 10}{digits}"
            carry = int(total >= 10 and not forget)
        return f"{' '.join(steps)} \\boxed{{{total // 10 or ''}{digits}}}"


def draw_problem(generator: "numpy.random.Generator", digits: int, carry_share: float) -> Problem:
    """One problem; with probability `carry_share` it has at least one carry, otherwise none."""
    wants_carry = generator.random() < carry_share
    low, high = 10 ** (digits - 1), 10**digits
    while True:
        problem = Problem(*(int(operand) for operand in generator.integers(low, high, size=2)))
        if digits == 1 or (problem.carries > 0) == wants_carry:
            return problem


def draw_distinct_problems(
    generator: "numpy.random.Generator", count: int, arguments: argparse.Namespace, taken: set[tuple[int, int]]
) -> list[Problem]:
    """`count` problems with different keys, none of which is in `taken`, the keys of earlier problems of this kind."""
    problems: dict[tuple[int, int], Problem] = {}
    found = count_problems(arguments.digits, arguments.carry_share) - len(taken)
    if count <= found:
        with progress("problems", count) as bar:
            for _ in range(count * MAX_DRAWS_PER_PROBLEM):
                if len(problems) == count:
                    return list(problems.values())
                problem = draw_problem(generator, arguments.digits, arguments.carry_share)
                if problem.key not in taken and problem.key not in problems:
                    problems[problem.key] = problem
                    bar.update()
        found = len(problems)
    raise ValueError(
        f"found only {found} of {count} distinct problems with --digits {arguments.digits}: "
        "ask for fewer (--train-size, --eval-size) or for longer operands (--digits)"
    )


def count_problems(digits: int, carry_share: float) -> int:
    """The number of problems that `draw_problem` can make, counting both orders of the operands once."""
    operands = 9 * 10 ** (digits - 1)
    everything = operands * (operands + 1) // 2
    # Without a carry, a column has 55 pairs of digits, 5 of them equal. The sum of the leading column may be above 9, so it has
    # 81 pairs without zeros, 9 of them equal.
    without_carry = (55 ** (digits - 1) * 81 + 5 ** (digits - 1) * 9) // 2
    if digits == 1 or 0 < carry_share < 1:
        return everything
    return everything - without_carry if carry_share else without_carry


def progress(what: str, count: int) -> "tqdm":
    """A progress bar on standard error, for steps that take long; in a log it is a line every few seconds."""
    from tqdm import tqdm

    return tqdm(desc=f"drawing {what}", total=count, delay=TOLD_EVERY_SECONDS, mininterval=TOLD_EVERY_SECONDS)


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_split(
    directory: Path,
    arguments: argparse.Namespace,
    keys: Sequence[Any],
    problem: Callable[[Any, "numpy.random.Generator"], dict[str, Any]],
    demonstration: Callable[[Any, "numpy.random.Generator"], dict[str, Any]],
) -> None:
    """Write the three files of a task whose problems have `keys`; no held-out key is trained or demonstrated.

    `problem` and `demonstration` make a row from a key, with a generator for everything else that is random.

    Raises:
        ValueError: there are fewer keys than wanted problems.
    """
    import numpy

    if arguments.eval_size + arguments.train_size > len(keys):
        raise ValueError(
            f"--eval-size {arguments.eval_size} and --train-size {arguments.train_size}: the task has {len(keys)} distinct "
            "problems; ask for fewer"
        )
    generator = numpy.random.default_rng([arguments.seed, 0])
    order = generator.permutation(len(keys))
    held_out, others = order[: arguments.eval_size], order[arguments.eval_size :]
    for name, chosen in (("eval", held_out), ("train", others[: arguments.train_size])):
        write_jsonl(directory / f"{name}.jsonl", [problem(keys[index], generator) for index in chosen])
    drawn = others[generator.integers(len(others), size=arguments.sft_size)]
    write_jsonl(directory / "sft.jsonl", [demonstration(keys[index], generator) for index in drawn])


def write_data(directory: Path, arguments: argparse.Namespace) -> None:
    """Write `train.jsonl`, `eval.jsonl` and `sft.jsonl`. A function given as `--data` writes these files for another task."""
    import numpy

    generator = numpy.random.default_rng([arguments.seed, 0])
    held_out = draw_distinct_problems(generator, arguments.eval_size, arguments, taken=set())
    held_out_keys = {problem.key for problem in held_out}
    training = draw_distinct_problems(generator, arguments.train_size, arguments, taken=held_out_keys)

    demonstrations = []
    with progress("demonstrations", arguments.sft_size) as bar:
        while len(demonstrations) < arguments.sft_size:
            problem = draw_problem(generator, arguments.digits, arguments.carry_share)
            forgotten = [bool(draw < arguments.forget_rate) for draw in generator.random(arguments.digits)]
            if problem.key in held_out_keys:
                continue
            answer = {"role": "assistant", "content": problem.working(forgotten)}
            demonstrations.append({"messages": [*problem.prompt, answer], "metadata": problem.metadata})
            bar.update()

    for name, problems in (("eval", held_out), ("train", training)):
        rows = [{"prompt": p.prompt, "label": str(p.left + p.right), "metadata": p.metadata} for p in problems]
        write_jsonl(directory / f"{name}.jsonl", rows)
    write_jsonl(directory / "sft.jsonl", demonstrations)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Write a toy task: a tiny random Qwen3-shaped model with its tokenizer, and JSONL data of a "
        "verifiable arithmetic task (addition with the working written out).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("output_dir", metavar="OUTPUT_DIR", type=Path, help="directory to write; made if missing")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the data")
    there = parser.add_mutually_exclusive_group()
    there.add_argument("--force", action="store_true", help="write over a task that is already there")
    there.add_argument("--reuse", action="store_true", help="keep a task that is there, if these options made it")
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data",
        metavar="PATH",
        help="FILE.py:FUNCTION that writes another task; called with the directory and these arguments",
    )
    data.add_argument("--digits", type=int, default=2, help="digits of each operand")
    data.add_argument("--train-size", type=int, default=2048, help="problems in train.jsonl")
    data.add_argument("--eval-size", type=int, default=256, help="held-out problems in eval.jsonl")
    data.add_argument("--sft-size", type=int, default=16384, help="demonstrations in sft.jsonl")
    data.add_argument("--carry-share", type=float, default=0.8, help="share of problems with a carry")
    data.add_argument("--forget-rate", type=float, default=0.65, help="share of carries the demonstrations forget")
    model = parser.add_argument_group("model")
    model.add_argument("--num-layers", type=int, default=2)
    model.add_argument("--hidden-size", type=int, default=256)
    model.add_argument("--ffn-hidden-size", type=int, default=512)
    model.add_argument("--num-attention-heads", type=int, default=4)
    model.add_argument("--num-key-value-heads", type=int, default=2)
    model.add_argument("--head-dim", type=int, default=64)
    model.add_argument("--max-position-embeddings", type=int, default=2048)
    return parser


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise ValueError, which names the option, for a value that cannot work."""
    names = ("digits", "train_size", "eval_size", "sft_size", "num_layers", "hidden_size", "ffn_hidden_size")
    for name in (*names, "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: must be at least 1")
    if arguments.digits > 18:
        raise ValueError(f"--digits {arguments.digits}: must be at most 18, operands are integers of 64 bits")
    for name in ("carry_share", "forget_rate"):
        if not 0 <= getattr(arguments, name) <= 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: must lie between 0 and 1")
    if arguments.seed < 0:
        raise ValueError(f"--seed {arguments.seed}: must not be negative")
    if arguments.num_attention_heads % arguments.num_key_value_heads:
        raise ValueError(
            f"--num-attention-heads {arguments.num_attention_heads}: must be a multiple of "
            f"--num-key-value-heads {arguments.num_key_value_heads}"
        )
    if arguments.head_dim % 2:
        raise ValueError(f"--head-dim {arguments.head_dim}: must be even, rotary embeddings pair the dimensions")
    if arguments.output_dir.exists() and not arguments.output_dir.is_dir():
        raise ValueError(f"OUTPUT_DIR {arguments.output_dir}: is no directory; give one, or a path where none is yet")
    if not (arguments.output_dir / MARK_OF_COMPLETENESS).exists() or arguments.force:
        return
    if not arguments.reuse:
        raise ValueError(f"{arguments.output_dir} holds a task already: choose another directory or give --force")
    if other := other_options(arguments):
        raise ValueError(
            f"{arguments.output_dir} holds a task that was made with {', '.join(other)}: choose another directory, or remove "
            "this one and what came of its task"
        )


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options on which the content of a task depends."""
    return {name: value for name, value in vars(arguments).items() if name not in ("output_dir", "force", "reuse")}


def other_options(arguments: argparse.Namespace) -> list[str]:
    """The options of the task in `arguments.output_dir` that differ from these.

    An option that did not exist when the task was made counts with its default.

    Raises:
        ValueError: the mark of the task cannot be read.
    """
    mark, parser = arguments.output_dir / MARK_OF_COMPLETENESS, build_parser()
    try:
        made = json.loads(mark.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{mark} cannot be read ({error}): remove {arguments.output_dir}") from None
    found = {name: made.get(name, parser.get_default(name)) for name in options_of(arguments)}
    other = {name: value for name, value in found.items() if value != vars(arguments)[name]}
    return [
        f"--{name.replace('_', '-')} {value}" if value is not None else f"no --{name}" for name, value in other.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    directory = arguments.output_dir
    try:
        check_arguments(arguments)
        if arguments.reuse and (directory / MARK_OF_COMPLETENESS).exists():
            print("reused")
            return 0
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MARK_OF_COMPLETENESS).unlink(missing_ok=True)
        (load_function(arguments.data, flag="--data") if arguments.data else write_data)(directory, arguments)
    except (UserError, ValueError) as error:
        print(f"make_toy_task: {error}", file=sys.stderr)
        return 2
    parameters = write_model(directory / "model", arguments)
    write_json(directory / MARK_OF_COMPLETENESS, {**options_of(arguments), "parameters": parameters})
    print(
        f"toy task in {directory}: model of {parameters / 1e6:.2f} M parameters, {arguments.train_size} training "
        f"problems, {arguments.eval_size} held-out problems, {arguments.sft_size} demonstrations"
    )
    return 0


if __name__ == "__main__":
    run_tool(main)
