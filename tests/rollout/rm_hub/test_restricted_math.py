"""The parser of final answers."""

from fractions import Fraction

import pytest

from slime.rollout.rm_hub.restricted_math import (
    NotMath,
    fraction_literal,
    integer_literal,
    parse,
    rational_value,
    unknown_letters,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1+2*3", Fraction(7)),
        ("-(1-3)/4", Fraction(1, 2)),
        ("2^{3}-1", Fraction(7)),
        ("-2^2", Fraction(-4)),
        ("2^{-1}", Fraction(1, 2)),
        (r"\frac{1}{3}+\frac13", Fraction(2, 3)),
        (r"2\frac{1}{3}", Fraction(7, 3)),
        (r"-2\frac{1}{3}", Fraction(-7, 3)),
        (r"2(3)", Fraction(6)),
        (r"1.5\times10^{3}", Fraction(1500)),
        ("0.1", Fraction(1, 10)),
        (".25", Fraction(1, 4)),
        ("8-3-2", Fraction(3)),
        ("16/4/2", Fraction(2)),
    ],
)
def test_rational_arithmetic_is_exact(text, value):
    assert rational_value(parse(text)) == value


@pytest.mark.parametrize("text", ["x", r"\pi", r"\sqrt{4}", "1/0", "0^{-1}"])
def test_other_trees_have_no_rational_value(text):
    assert rational_value(parse(text)) is None


@pytest.mark.parametrize(
    "text", ["", "1+", "(1", "1)", "2^{3^2}", "2^3^2", "2^{65}", r"\foo{1}", "1..2", "a b c", "1;2", "é", "2^{1/99}"]
)
def test_what_is_outside_the_language_is_refused(text):
    with pytest.raises(NotMath):
        parse(text)


def test_literals_and_letters():
    assert integer_literal(parse("-12")) == -12
    assert integer_literal(parse("12.0")) == 12
    assert integer_literal(parse("12.5")) is None
    assert integer_literal(parse("6/2")) is None
    assert fraction_literal(parse(r"-\frac{2}{4}")) == (-2, 4)
    assert fraction_literal(parse("2/-4")) == (-2, 4)
    assert fraction_literal(parse("x/2")) is None
    assert unknown_letters(parse(r"2xy + \sin x + \pi")) == {"x", "y"}
