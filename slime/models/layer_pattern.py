"""Layer patterns, which are one number per layer written as text: `[0]*3+[1]*58`."""

import ast
import itertools
from collections.abc import Sequence

# No model has so many layers. The limit keeps `[0]*10**12` from filling the memory.
_LONGEST_PATTERN = 10_000


def read_pattern(text: str) -> int | list[int]:
    """A number, or a list with one number per layer: `4`, `[1,1,0]`, `[0]*3+[1]*58`, `([1]*3+[0])*12`.

    Only integers, lists of integers, `+`, `*` and parentheses are understood; nothing else is evaluated.

    Raises:
        ValueError: the text contains something else.
    """
    try:
        return _pattern_value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError) as error:
        raise ValueError(error.msg if isinstance(error, SyntaxError) else str(error)) from None


def written_pattern(value: Sequence[int]) -> str:
    """The text that `read_pattern` reads as `value`, with runs of equal layers abbreviated: `[0]*3+[1]*58`."""
    runs = [(item, len(list(run))) for item, run in itertools.groupby(value)]
    if len(runs) > max(len(value) // 2, 1):
        return str(list(value)).replace(" ", "")
    return "+".join(f"[{item}]" + (f"*{count}" if count > 1 else "") for item, count in runs)


def _pattern_value(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        items = [_pattern_value(item) for item in node.elts]
        if not all(isinstance(item, int) for item in items):
            raise ValueError("a list holds integers only")
        return items
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        return _combine(node.op, _pattern_value(node.left), _pattern_value(node.right))
    raise ValueError("only integers, lists of them, + and * are allowed")


def _combine(operator: ast.operator, left: int | list[int], right: int | list[int]) -> int | list[int]:
    if isinstance(operator, ast.Add):
        if type(left) is not type(right):
            raise ValueError("a list and a number cannot be added")
        return left + right
    if isinstance(left, list) and isinstance(right, list):
        raise ValueError("two lists cannot be multiplied")
    if isinstance(left, int) and isinstance(right, int):
        return left * right
    items, times = (left, right) if isinstance(left, list) else (right, left)
    if len(items) * times > _LONGEST_PATTERN:
        raise ValueError(f"it has more than {_LONGEST_PATTERN} entries")
    return items * times
