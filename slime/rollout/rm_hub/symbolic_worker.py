"""The worker process that compares two trees with sympy. Run as a file, by `symbolic_pool`; it sees no text of a model.

One JSON line in, `[left, right]`; one JSON line out, true or false. It ends when its input ends, so it does not outlive
its parent. Memory is limited here. Time is limited by the parent, who ends the process; an alarm does it for a parent
that was killed meanwhile.
"""

import json
import resource
import signal
import sys

# Longer than the parent waits. The alarm's default action ends the process, whatever it computes.
TIME_LIMIT_S = 30
MEMORY_LIMIT_BYTES = 4 << 30


def build(sympy, tree):
    """The sympy expression of a tree of `restricted_math`."""
    kind, rest = tree[0], tree[1:]
    if kind == "num":
        return sympy.Rational(int(rest[0]), int(rest[1]))
    if kind == "sym":
        return sympy.Symbol(rest[0])
    if kind == "const":
        return {"pi": sympy.pi, "infinity": sympy.oo, "i": sympy.I}[rest[0]]
    if kind == "fn":
        return _function(sympy, rest[0])(build(sympy, rest[1]))
    operands = [build(sympy, child) for child in rest]
    if kind == "neg":
        return -operands[0]
    if kind == "root":
        return sympy.root(operands[1], operands[0])
    left, right = operands
    if kind == "div":
        return left / right
    return {"add": sympy.Add, "mul": sympy.Mul, "pow": sympy.Pow}[kind](left, right)


def _function(sympy, name):
    renamed = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "ln": "log"}
    return getattr(sympy, renamed.get(name, name))


def are_equal(sympy, left, right):
    """Whether the difference of two trees simplifies to zero."""
    left, right = build(sympy, left), build(sympy, right)
    if left == right:
        return True
    difference = left - right
    if difference.is_number and not difference.has(sympy.oo, sympy.zoo, sympy.nan):
        # A cheap numeric look first: most wrong answers differ in the first digits.
        if abs(sympy.N(difference, 30)) > sympy.Float("1e-12"):
            return False
    return bool(sympy.simplify(difference) == 0)


def main(time_limit_s=TIME_LIMIT_S):
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    import sympy

    print("ready", flush=True)
    for line in sys.stdin:
        left, right = json.loads(line)
        signal.alarm(time_limit_s)
        try:
            verdict = are_equal(sympy, left, right)
        except (
            ArithmeticError,
            AttributeError,
            TypeError,
            ValueError,
            RecursionError,
            NotImplementedError,
            MemoryError,
        ):
            verdict = False
        signal.alarm(0)
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
