"""What a run finds out stands in copies of its arguments: nothing outside of parsing writes into a namespace called so."""

import argparse
import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.ray.driver import RunLength
from slime.utils.run_values import RunValues, with_run_values

ROOT = Path(__file__).parents[2]
# Parsing and derivation fill the namespace before a run begins, and copies of it for a role.
PARSING = ROOT / "slime/arguments"
FILES = [
    *(path for path in sorted((ROOT / "slime").rglob("*.py")) if PARSING not in path.parents),
    ROOT / "train.py",
    ROOT / "train_async.py",
]
# (file, attribute): why it may be written.
EXCEPTIONS = {
    ("slime/backends/sglang_utils/server_process.py", "port_args.instance_id"): "a dataclass of SGLang's, not ours",
}
_ARGUMENTS = re.compile(r"(.*[._])?args")


def is_arguments(node: ast.expr) -> bool:
    """Whether the expression is a namespace of arguments by its name: `args`, `self._args`, `critic_args`; or its `vars`."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "vars" and node.args:
        return is_arguments(node.args[0])
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return is_arguments(node.value)
    return isinstance(node, ast.Name | ast.Attribute) and _ARGUMENTS.fullmatch(ast.unparse(node)) is not None


def written(tree: ast.AST) -> Iterator[str]:
    """What is assigned to, deleted from or put into arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            if is_arguments(node.value):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            function = node.func
            of_builtin = isinstance(function, ast.Name) and function.id in ("setattr", "delattr")
            of_dict = isinstance(function, ast.Attribute) and function.attr in ("update", "setdefault", "pop", "clear")
            if (of_builtin and is_arguments(node.args[0])) or (of_dict and is_arguments(function.value)):
                yield ast.unparse(node)


@pytest.mark.parametrize(
    "code",
    [
        "args.x = 1", "self.args.x, y = 1, 2", "self._args.x += 1", "args.x: int = 1", "del critic_args.x",
        "for args.x in y: pass", "with a as args.x: pass", "setattr(self._args, name, 1)", "delattr(args, name)",
        "vars(args)['x'] = 1", "vars(self.args).update(x=1)", "args.__dict__['x'] = 1", "args.__dict__.pop('x')",
        "run.args.x = 1", "args['x'] = 1",
    ],
)  # fmt: skip
def test_writing_is_seen(code):
    assert len(list(written(ast.parse(code)))) == 1


@pytest.mark.parametrize(
    "code", ["self.args = args", "x = args.y", "vars(args).get('x')", "args.x.y = 1", "kwargs = {}"]
)
def test_other_code_is_not(code):
    assert list(written(ast.parse(code))) == []


def test_nothing_writes_into_arguments_after_they_were_parsed():
    found = {(str(path.relative_to(ROOT)), what) for path in FILES for what in written(ast.parse(path.read_text()))}
    assert len(FILES) > 100
    assert sorted(found - EXCEPTIONS.keys()) == []
    assert EXCEPTIONS.keys() <= found, "an exception that nothing needs"


def test_a_copy_has_the_values_and_what_was_parsed_has_not():
    args = argparse.Namespace(num_rollout=None, lr=1.0)
    copy = with_run_values(args, num_rollout=6, rollouts_per_epoch=3)
    assert copy == argparse.Namespace(num_rollout=6, rollouts_per_epoch=3, lr=1.0)
    assert args == argparse.Namespace(num_rollout=None, lr=1.0)


def test_every_value_that_is_added_is_declared():
    declared = set(RunValues.__annotations__)
    assert {field.name for field in dataclasses.fields(RunLength)} <= declared
    added = set()
    for path in FILES:
        source = path.read_text()
        for node in ast.walk(ast.parse(source)) if "with_run_values" in source else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "with_run_values":
                names = {keyword.arg for keyword in node.keywords if keyword.arg}
                whole = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg is None]
                assert all(re.fullmatch(r"dataclasses\.asdict\((self\.)?length\)", value) for value in whole), path
                added |= names | ({field.name for field in dataclasses.fields(RunLength)} if whole else set())
    assert added == declared
