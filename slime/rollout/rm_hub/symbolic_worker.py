"""The worker process that compares two answers with math-verify. Run as a file, by `symbolic_pool`.

One JSON line in, `[given, truth, seconds]`; one JSON line out, true or false. It ends when its input ends, so it does not
outlive its parent. Memory is limited here, and so is time, by timers whose default action ends the process, whatever it
computes: one on the processor's time for the question, an alarm for a parent that was killed meanwhile. The library's own
time limits are off: they are alarms too, and would disarm ours.

Nothing here evaluates Python: `latex2sympy` builds sympy objects from a parsed tree. The library's `parse` is not used,
because it hands plain arithmetic to sympy's `parse_expr`, which does.
"""

import functools
import json
import re
import resource
import signal
import sys

# Longer than the parent waits.
ALARM_S = 60
MEMORY_LIMIT_BYTES = 1 << 30
# Decimal digits to which two values must agree where no exact comparison decides.
NUMERIC_DIGITS = 50

# The letter i as a factor or alone: not in a word, in the name of a command, or as an index.
_IMAGINARY_UNIT = re.compile(r"(?<![a-zA-Z\\_])i(?![a-zA-Z])")
_ODD_ROOT = re.compile(r"\\sqrt\[\s*(\d*[13579])\s*\]\s*\{\s*-")


@functools.lru_cache(maxsize=256)
def parse(text: str, is_real: bool | None) -> object:
    """The sympy object that LaTeX stands for. Raises whatever the library raises on text outside its language."""
    from latex2sympy2_extended import NormalizationConfig, latex2sympy

    config = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    return latex2sympy(_ODD_ROOT.sub(r"-\\sqrt[\1]{", text), is_real=is_real, normalization_config=config)


def are_equal(given: str, truth: str) -> bool:
    """Whether `given` is a right answer where `truth` is the label."""
    from math_verify import verify

    # The library knows the imaginary unit as I, and loses an exponent directly behind it. Beside it, unknowns are not real.
    is_real = None if any(_IMAGINARY_UNIT.search(text) for text in (given, truth)) else True
    given, truth = (_IMAGINARY_UNIT.sub("(I)", text) for text in (given, truth))
    return verify(
        _united(parse(truth, is_real)),
        _united(parse(given, is_real)),
        numeric_precision=NUMERIC_DIGITS,
        allow_set_relation_comp=True,
        timeout_seconds=None,
    )


def _united(tree: object) -> object:
    """`x < -1 or x > 1` is the union of what each inequality allows."""
    import sympy
    from sympy.core.relational import Relational

    if isinstance(tree, sympy.FiniteSet) and all(isinstance(element, Relational) for element in tree.args):
        if not any(isinstance(element, sympy.Eq) for element in tree.args):
            return sympy.Or(*tree.args).as_set()
    return tree


def main(alarm_s: int = ALARM_S) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    import math_verify  # noqa: F401 - the slow import comes before the first question

    print("ready", flush=True)
    for line in sys.stdin:
        given, truth, seconds = json.loads(line)
        signal.alarm(alarm_s)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            verdict = bool(are_equal(given, truth))
        except Exception:
            # What the library cannot read or compare is not shown to be equal.
            verdict = False
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
