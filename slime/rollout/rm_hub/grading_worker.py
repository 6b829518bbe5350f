"""The worker process that grades with libraries. `worker_pool` runs it as a file, with its kind: formulas or instructions.

It reads a JSON line `[seconds, question]` and writes a JSON line with the answer. For a question `[given, truth]` that is true
or false; for `[response, prompt, [[id, keywords], …]]` it is a list of verdicts, or a text that says what is missing. It ends
when its input ends, so it does not outlive its parent. Memory is limited here, and so is time, by timers whose default action
ends the process whatever it computes: one on processor time for the question, and an alarm in case the parent was killed
meanwhile. The time limits of math-verify are off, because they are alarms too and would disarm ours.

Nothing here evaluates Python: `latex2sympy` builds sympy objects from a parsed tree. The library's `parse` is not used,
because it hands plain arithmetic to sympy's `parse_expr`, which does evaluate it. No check may use the network; a library that
looks for its data there fails at once.
"""

import contextlib
import functools
import importlib
import importlib.util
import json
import os
import random
import re
import resource
import signal
import socket
import sys
import types
from pathlib import Path

# It must be longer than the parent waits, and only ends a worker whose parent is gone.
ALARM_S = 60
# This comes in addition to the memory of the libraries, which differs between their versions.
MEMORY_LIMIT_BYTES = 1 << 30
# Two values must agree to so many decimal digits if no exact comparison decides.
NUMERIC_DIGITS = 50

# It finds the letter i as a factor or alone, but not in a word, in the name of a command, or as an index.
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
    """Whether `given` is a right answer to a problem with the label `truth`."""
    from math_verify import verify

    # The library calls the imaginary unit I, and loses an exponent directly behind it. Unknowns beside it need not be real.
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
    """A set of inequalities such as `x < -1 or x > 1` as the union of the numbers that each allows; other trees unchanged."""
    import sympy
    from sympy.core.relational import Relational

    if isinstance(tree, sympy.FiniteSet) and all(isinstance(element, Relational) for element in tree.args):
        if not any(isinstance(element, sympy.Eq) for element in tree.args):
            return sympy.Or(*tree.args).as_set()
    return tree


# They belong to IFBench (its own directory, on PYTHONPATH) and to IFEval. Both have INSTRUCTION_DICT: id -> class of checks.
REGISTRIES = ("instructions_registry", "lm_eval.tasks.ifeval.instructions_registry")


@functools.cache
def checks_by_id() -> tuple[dict[str, type], str]:
    """(class of checks by instruction, why registries cannot be imported), for all instructions that installed libraries know.

    If several know an instruction, the first of REGISTRIES counts.
    """
    found: dict[str, type] = {}
    failures = []
    for name in REGISTRIES:
        try:
            _name_packages(name)
            found = {**importlib.import_module(name).INSTRUCTION_DICT, **found}
        except ImportError as error:
            failures.append(f"{name}: {error}")
    return found, "; ".join(failures)


def _name_packages(module: str) -> None:
    """Make the packages around `module` known without running them, because lm_eval's import whole frameworks, slowly."""
    packages = module.split(".")[:-1]
    top = importlib.util.find_spec(packages[0]) if packages else None
    for depth in range(1, len(packages) + 1) if top is not None and top.submodule_search_locations else ():
        package = types.ModuleType(".".join(packages[:depth]))
        package.__path__ = [os.path.join(place, *packages[1:depth]) for place in top.submodule_search_locations]
        sys.modules.setdefault(package.__name__, package)


def follow(response: str, prompt: str, instructions: list[list]) -> list[bool] | str:
    """Whether `response` strictly follows each instruction; a text if a check is missing or refuses its keywords."""
    checks, failures = checks_by_id()
    verdicts = []
    for name, keywords in instructions:
        if name not in checks:
            return (
                f"no check is installed for instruction {name}: those of IFEval come with the extra ifbench (pip install "
                "'lm-eval[ifeval]'), those of IFBench with a copy of its repository on PYTHONPATH"
                f"{f' ({failures})' if failures else ''}"
            )
        # A check draws the keywords that it is not given.
        random.seed(0)
        try:
            check = checks[name](name)
            check.build_description(**keywords)
            if "prompt" in (check.get_instruction_args() or {}):
                check.build_description(prompt=prompt)
        except Exception as error:
            return f"instruction {name} refuses its kwargs {keywords}: {type(error).__name__}: {error}"
        try:
            verdicts.append(bool(response.strip() and check.check_following(response)))
        except LookupError as error:
            # This is how NLTK says that its data are missing.
            if "nltk" in str(error).lower():
                reason = " ".join(str(error).replace("*", "").split())[:60]
                return (
                    f"instruction {name} needs data, once: python -m nltk.downloader punkt_tab (NLTK says: {reason} …)"
                )
            verdicts.append(False)
        except Exception:
            # A text that a check cannot read does not follow it.
            verdicts.append(False)
    return verdicts


def _load_formulas() -> None:
    import math_verify  # noqa: F401 - the slow import comes before the first question


def _load_instructions() -> None:
    def refused(*arguments: object) -> None:
        raise OSError("grading uses no network")

    socket.socket.connect = socket.socket.connect_ex = refused
    if checks_by_id()[0]:
        with contextlib.suppress(ImportError):
            # With a seed the same text has the same language each time.
            importlib.import_module("langdetect").DetectorFactory.seed = 0


# Each kind has a preparation before the first question, a function that answers a question, and an answer for a question at
# which the library fails.
_KINDS = {
    "formulas": (_load_formulas, lambda question: bool(are_equal(*question)), False),
    "instructions": (_load_instructions, lambda question: follow(*question), "grading failed"),
}


def main(kind: str, alarm_s: int = ALARM_S) -> None:
    load, answer, failure = _KINDS[kind]
    # Whatever libraries print goes to the standard error, so that the parent reads nothing but answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    load()
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_LIMIT_BYTES, taken + MEMORY_LIMIT_BYTES))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        seconds, question = json.loads(line)
        signal.alarm(alarm_s)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            verdict = answer(question)
        except Exception:
            # An answer that the library cannot read or compare is not shown to be equal.
            verdict = failure
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
