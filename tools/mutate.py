"""Change the code in small ways, one at a time, and list the changes that no test notices.

    python tools/mutate.py slime/algorithms --sample 60
    python tools/mutate.py slime/training/loss.py --tests tests/training/test_loss.py tests/training/test_objective.py

The tool works on a copy of the tree, never in place. A change is made to the syntax tree of one file: it reverses a comparison,
exchanges an arithmetic operator, moves a constant, negates a condition, swaps two arguments, or removes a call or an
assignment. The tests are those of the file's mirror (`slime/algorithms/kl.py`: `tests/algorithms/test_kl.py`) unless `--tests`
names others. A change is caught if the tests fail or exceed the time limit. All others are printed as file:line with the line
before and after: either a test is missing, or the change has no effect.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import dataclasses
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = (
    "slime",
    "slime_plugins",
    "tests",
    "tools",
    "examples",
    "scripts",
    "docs",
    "pyproject.toml",
    "train.py",
    "train_async.py",
)
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.And: ast.Or, ast.Or: ast.And,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A file with one change at `line`. `source` is the whole changed file; `change` describes the change."""

    file: str
    line: int
    change: str
    source: str


def mutants_of(file: str, source: str) -> list[Mutant]:
    """All mutants of a file, in the order of its lines."""
    tree = ast.parse(source)
    found = []
    for path, node in list(_nodes(tree)):
        before = _shown(tree, path)
        for description, replace in _changes(node):
            _put(tree, path, replace(copy.deepcopy(node)))
            after, text = _shown(tree, path), ast.unparse(tree)
            _put(tree, path, node)
            if before != after and _compiles(text):
                found.append(Mutant(file, node.lineno, f"{description}: {before}  →  {after}", text))
    return sorted(found, key=lambda mutant: mutant.line)


Way = tuple[tuple[str, int | None], ...]


def _nodes(node: ast.AST, path: Way = ()) -> Iterator[tuple[Way, ast.AST]]:
    """Yields the nodes that have a line and may be changed, with the path to them, without annotations, errors and texts."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or isinstance(
                child, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom
            ):
                continue
            here = (*path, (field, index))
            if hasattr(child, "lineno"):
                yield here, child
            yield from _nodes(child, here)


def _changes(node: ast.AST) -> Iterator[tuple[str, object]]:
    if isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in OPERATORS:
        yield "operator", lambda n: _with(n, op=OPERATORS[type(n.op)]())
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
        yield "comparison", lambda n: _with(n, ops=[OPERATORS[type(n.ops[0])](), *n.ops[1:]])
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield "constant", lambda n: _with(n, value=not n.value)
        elif isinstance(node.value, int | float):
            yield "constant", lambda n: _with(n, value=n.value + 1)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield "sign", lambda n: n.operand
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "condition", lambda n: _with(n, test=ast.UnaryOp(ast.Not(), n.test))
    if isinstance(node, ast.Call):
        if len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
            yield "arguments", lambda n: _with(n, args=[n.args[1], n.args[0], *n.args[2:]])
        if isinstance(node.func, ast.Attribute) and not node.keywords and not isinstance(node.func.value, ast.Name):
            yield "call left out", lambda n: n.func.value
        for i, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                yield (
                    f"argument {keyword.arg} left out",
                    lambda n, i=i: _with(n, keywords=n.keywords[:i] + n.keywords[i + 1 :]),
                )
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "statement left out", lambda n: ast.Pass()
    if isinstance(node, ast.AugAssign):
        yield "statement left out", lambda n: ast.Pass()
    if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield "result", lambda n: _with(n, value=ast.Constant(None))


def _with(node: ast.AST, **fields: object) -> ast.AST:
    for name, value in fields.items():
        setattr(node, name, value)
    return node


def _follow(tree: ast.AST, path: Way) -> ast.AST:
    for field, index in path:
        value = getattr(tree, field)
        tree = value if index is None else value[index]
    return tree


def _put(tree: ast.AST, path: Way, node: ast.AST) -> None:
    (field, index), owner = path[-1], _follow(tree, path[:-1])
    if index is None:
        setattr(owner, field, node)
    else:
        getattr(owner, field)[index] = node


def _shown(tree: ast.AST, path: Way) -> str:
    """The first line of the smallest statement around a node."""
    node = tree
    for field, index in path:
        value = getattr(node, field)
        child = value if index is None else value[index]
        if isinstance(child, ast.stmt):
            statement = child
        node = child
    return ast.unparse(statement).splitlines()[0] if not isinstance(statement, ast.Pass) else "pass"


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def mirror_of(file: str) -> str:
    """The test file that mirrors a source file."""
    path = Path(file)
    return str(Path("tests", *path.parts[1:-1], f"test_{path.name}"))


def run_tests(tree: Path, tests: Sequence[str], seconds: float) -> bool:
    """Whether the tests pass in the tree within `seconds`. They run in a fork of this process, which has imported torch."""
    process = multiprocessing.get_context("fork").Process(target=_run_pytest, args=(tree, list(tests)))
    process.start()
    process.join(seconds)
    passed = process.exitcode == 0
    # The fork leads a session of its own, so this also ends processes that a hanging test has started.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return passed


def _run_pytest(tree: Path, tests: list[str]) -> None:
    import pytest

    os.setsid()
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    os.chdir(tree)
    sys.dont_write_bytecode = True
    os.environ.update(PYTHONDONTWRITEBYTECODE="1", SLIME_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    os._exit(int(pytest.main([*options, *tests])))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", help="files or directories under slime/")
    parser.add_argument("--tests", nargs="+", help="instead of the mirror of each file")
    parser.add_argument("--sample", type=int, help="as many changes, drawn at random, instead of all")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for the tests of one change")
    args = parser.parse_args(argv)

    import torch  # noqa: F401

    files = [file for path in args.paths for file in _files(path)]
    mutants = [m for file in files for m in mutants_of(file, (ROOT / file).read_text(encoding="utf-8"))]
    if args.sample is not None and args.sample < len(mutants):
        mutants = sorted(random.Random(args.seed).sample(mutants, args.sample), key=lambda m: (m.file, m.line))
    with tempfile.TemporaryDirectory(prefix="mutate-") as directory:
        tree = Path(directory)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, tree / name)
        return _report(args, tree, mutants)


def _files(path: str) -> list[str]:
    full = ROOT / path
    found = sorted(full.rglob("*.py")) if full.is_dir() else [full]
    return [file.relative_to(ROOT).as_posix() for file in found if file.read_text(encoding="utf-8").strip()]


def _report(args: argparse.Namespace, tree: Path, mutants: Sequence[Mutant]) -> int:
    survivors = 0
    checked: set[tuple[str, ...]] = set()
    for mutant in mutants:
        tests = tuple(args.tests or [mirror_of(mutant.file)])
        if not all((tree / test.partition("::")[0]).exists() for test in tests):
            print(f"{mutant.file}: no {' '.join(tests)}; name its tests with --tests", file=sys.stderr)
            return 2
        if tests not in checked:
            if not run_tests(tree, tests, args.timeout):
                print(f"{' '.join(tests)} fails without any change", file=sys.stderr)
                return 2
            checked.add(tests)
        original = (tree / mutant.file).read_text(encoding="utf-8")
        (tree / mutant.file).write_text(mutant.source, encoding="utf-8")
        if run_tests(tree, tests, args.timeout):
            survivors += 1
            print(f"{mutant.file}:{mutant.line}: {mutant.change}", flush=True)
        (tree / mutant.file).write_text(original, encoding="utf-8")
    print(f"{survivors} of {len(mutants)} changes were not noticed")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
