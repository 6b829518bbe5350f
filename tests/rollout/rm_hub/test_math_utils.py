"""Grading of mathematical answers: equality by text, by value, by symbols; and hostile input."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime.rollout.rm_hub import symbolic_pool
from slime.rollout.rm_hub.math_utils import (
    extract_answer,
    extract_boxed_answer,
    grade_answer_mathd,
    grade_answer_sympy,
    grade_answer_verl,
    last_boxed_only_string,
    remove_boxed,
)


@pytest.fixture(scope="module", autouse=True)
def end_workers():
    yield
    symbolic_pool.close_pool()


@pytest.mark.parametrize(
    ("text", "boxed", "answer"),
    [
        (r"so \boxed{5}.", r"\boxed{5}", "5"),
        (r"\boxed{1} and \boxed{\frac{1}{2}}", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{7}", r"\fbox{7}", "7"),
        (r"\boxed 5 $", r"\boxed 5", "5"),
        (r"\boxed{a{b}c} tail }", r"\boxed{a{b}c}", "a{b}c"),
        (r"\boxed{5", None, None),
        (r"\boxed{5} and then \boxed{", r"\boxed{5}", "5"),
        (r"\boxed{5} and \fbox{6", r"\boxed{5}", "5"),
        (r"\boxed{\boxed{5}", r"\boxed{5}", "5"),
        ("no box", None, None),
        ("", None, None),
    ],
)
def test_the_last_box_with_balanced_braces(text, boxed, answer):
    assert last_boxed_only_string(text) == boxed
    assert extract_boxed_answer(text) == answer
    assert extract_answer(text) == answer


@pytest.mark.parametrize("text", ["5", r"\boxed{5", "boxed{5}", None])
def test_remove_boxed_gives_none_on_malformed_input(text):
    assert remove_boxed(text) is None


EQUAL_AS_TEXT = [
    (r"\tfrac{1}{2}", r"\dfrac12"),
    ("1/2", r"\frac{1}{2}"),
    ("0.5", r"\frac{1}{2}"),
    (".5", r"\frac{1}{2}"),
    ("x=5", "5"),
    (r"\left( 1 , 2 \right)", "(1,2)"),
    (r"50\%", "50"),
    (r"\$3", "3"),
    (r"90^\circ", "90"),
    (r"5\text{ cm}", "5"),
    ("12 inches", "12"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\sqrt3", r"\sqrt{3}"),
    (r"10\!\,00", "1000"),
]


@pytest.mark.parametrize(("given", "truth"), EQUAL_AS_TEXT)
def test_equal_as_normalised_text(given, truth):
    assert grade_answer_mathd(given, truth)


@pytest.mark.parametrize(("given", "truth"), [("xyz=5", "5"), ("1", "2"), ("a=b=c", "c"), ("-1/2", "1/2")])
def test_not_equal_as_text(given, truth):
    assert not grade_answer_mathd(given, truth)


VERDICTS = [
    # response, label, right
    (r"\boxed{\frac{2}{4}}", "1/2", False),
    (r"\boxed{.5}", r"\frac{1}{2}", True),
    (r"\boxed{1,000}", "1000", True),
    (r"\boxed{1,000}", "1001", False),
    (r"\boxed{5.0}", "5", True),
    (r"\boxed{4/2}", "2", False),
    (r"\boxed{2+3}", "5", False),
    (r"\boxed{0.25}", r"\frac14", True),
    (r"\boxed{-\frac{1}{2}}", r"\frac{-1}{2}", True),
    (r"\boxed{1\frac12}", r"\frac{3}{2}", True),
    (r"\boxed{1 1/2}", "3/2", True),
    (r"\boxed{11/2}", "3/2", False),
    (r"\boxed{10^{-3}}", "0.001", True),
    (r"\boxed{(1, 2]}", "(1,2]", True),
    (r"\boxed{(1, 2)}", "[1,2]", False),
    (r"\boxed{(1, 2)}", "(2,1)", False),
    (r"\boxed{(1/2, 0.5)}", r"(\frac12,\frac12)", True),
    (r"\boxed{(1, 2, 3)}", "(1,2)", False),
    (r"\boxed{\{2, 1\}}", r"\{1,2\}", True),
    (r"\boxed{(-\infty, 3)}", r"(-\infty,3)", True),
    (r"\boxed{5}", r"the answer is \boxed{5}", True),
    ("5", "5", False),
    (r"\boxed{}", "5", False),
    (r"\boxed{5}", "", False),
]


@pytest.mark.parametrize(("response", "label", "right"), VERDICTS)
def test_verdicts_that_need_no_symbols(response, label, right, monkeypatch):
    def unreachable(*args):
        raise AssertionError("string and rational equality decide this alone")

    monkeypatch.setattr(symbolic_pool, "are_equal", unreachable)
    assert grade_answer_verl(response, label) is right


SYMBOLIC = [
    (r"\sqrt{8}", r"2\sqrt{2}", True),
    (r"\frac{\sqrt3}{3}", r"\frac{1}{\sqrt{3}}", True),
    ("x^2+2x+1", "(x+1)^2", True),
    ("x^2+2x+2", "(x+1)^2", False),
    (r"\frac{\pi}{2}", r"0.5\pi", True),
    (r"\sin(2x)", r"2\sin(x)\cos(x)", True),
    ("ab", "ba", True),
    (r"\sqrt[3]{27}x", "3x", True),
    (r"\log_{2}8 + x", "3+x", True),
]


@pytest.mark.parametrize(("given", "truth", "right"), SYMBOLIC)
def test_symbolic_equality(given, truth, right):
    assert grade_answer_sympy(given, truth) is right


HOSTILE = [
    "__import__('os').system('touch /tmp/slime_w3')",
    "exec('1')",
    "().__class__.__bases__",
    "lambda: 0",
    "9^{9^{9^{9}}}",
    "9**9**9**9",
    "(((9^9)^9)^9)",
    "10^{1000000}",
    "9" * 5000,
    "(" * 5000 + "1" + ")" * 5000,
    "-" * 250 + "1",
    "\\frac" * 60,
    "x" * 299,
    "factorial(99999)",
    "99999!",
    "1e999999999",
    "\\sqrt[99999]{2}",
    "(x+y)^{64}(x-y)^{64}(x+2y)^{64}",
    "\x00\ud800",
    "{" * 200,
]


@pytest.mark.parametrize("given", HOSTILE)
def test_w3_hostile_answers_end_quickly_with_no(given):
    started = time.monotonic()
    assert not grade_answer_verl("\\boxed{" + given + "}", "x+1")
    assert not grade_answer_sympy(given, "x+1")
    # Two comparisons, each limited to five seconds, and the start of a worker.
    assert time.monotonic() - started < 20
    import os

    assert not os.path.exists("/tmp/slime_w3")


def test_w3_a_comparison_beyond_its_limit_is_given_up_and_the_pool_lives_on():
    pool = symbolic_pool.SymbolicPool(size=1)
    try:
        x, big = ["sym", "x"], ["num", "64", "1"]
        product = ["sym", "y"]
        for i in range(1, 12):
            product = ["mul", product, ["pow", ["add", x, ["fn", "sin", ["mul", ["num", str(i), "1"], x]]], big]]
        started = time.monotonic()
        assert not pool.are_equal(product, ["add", product, ["pow", ["fn", "cos", x], big]], timeout=0.2)
        assert time.monotonic() - started < 10
        assert pool.are_equal(["mul", x, x], ["pow", x, ["num", "2", "1"]])
    finally:
        pool.close()


def test_w3_workers_that_die_are_replaced():
    pool = symbolic_pool.SymbolicPool(size=1)
    x = ["sym", "x"]
    try:
        assert pool.are_equal(["add", x, x], ["mul", ["num", "2", "1"], x])
        idle = pool._idle.queue[0]
        idle._process.kill()
        idle._process.wait()
        assert pool.are_equal(["add", x, x], ["mul", ["num", "2", "1"], x])
        # A tree that sympy cannot build ends the worker; the answer is no.
        assert not pool.are_equal(["no such kind", x, x], x)
        assert pool.are_equal(x, x)
    finally:
        pool.close()


def test_w3_a_worker_whose_parent_is_gone_ends_while_it_computes():
    directory = str(Path(symbolic_pool.__file__).parent)
    # Nobody ends this worker, and its input stays open; only the alarm can.
    code = (
        f"import sys, time; sys.path.insert(0, {directory!r}); import symbolic_worker\n"
        "symbolic_worker.are_equal = lambda *question: time.sleep(300) if question[1] else True\n"
        "symbolic_worker.main(time_limit_s=1)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        try:
            assert worker.stdout.readline() == b"ready\n"
            worker.stdin.write(b"[0, 0]\n")
            worker.stdin.flush()
            assert worker.stdout.readline() == b"true\n"
            worker.stdin.write(b"[1, 1]\n")
            worker.stdin.flush()
            assert worker.wait(60) == -signal.SIGALRM
        finally:
            worker.kill()
