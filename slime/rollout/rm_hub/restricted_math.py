"""A parser for the small language of final answers: numbers, letters, `+ - * / ^`, fractions, roots, a few functions.

It turns model output into a tree and nothing else: no names are looked up, nothing is evaluated, and every size is
limited before work starts (text, digits, nesting, exponents, unknown letters; an exponent holds no power). A tree is a
nested list that JSON can carry:

    ["num", numerator, denominator]   decimal strings, an exact rational
    ["sym", letter]  ["const", "pi" | "infinity" | "i"]
    ["add" | "mul" | "div" | "pow", left, right]  ["neg", operand]  ["root", index, operand]  ["fn", name, operand]

This module imports nothing of ours, so that the symbolic worker can load it alone.
"""

import re
from fractions import Fraction

MAX_CHARACTERS = 300
MAX_DIGITS = 60
MAX_DEPTH = 40
MAX_EXPONENT = 64
MAX_UNKNOWN_LETTERS = 2
FUNCTIONS = ("arcsin", "arccos", "arctan", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp")

Tree = list


class NotMath(ValueError):
    """The text is outside the language, or beyond its limits."""


_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+\.?\d*|\.\d+)|(?P<command>\\[a-zA-Z]+)|(?P<word>[a-zA-Z]+)|(?P<symbol>\*\*|[-+*/^(){}\[\]_|]))"
)
_COMMAND_WORDS = {
    "cdot": "*",
    "times": "*",
    "div": "/",
    "pi": "pi",
    "infty": "infinity",
    "frac": "frac",
    "sqrt": "sqrt",
}
_OPENING = {"(": ")", "{": "}", "[": "]"}


def parse(text: str) -> Tree:
    """The tree of `text`. Raises NotMath."""
    if not text.strip() or len(text) > MAX_CHARACTERS:
        raise NotMath(f"{len(text)} characters")
    parser = _Parser(_tokens(text))
    tree = parser.sum(0)
    if parser.peek() is not None:
        raise NotMath(f"unexpected {parser.peek()!r}")
    if len(unknown_letters(tree)) > MAX_UNKNOWN_LETTERS:
        raise NotMath("too many unknown letters")
    return tree


def unknown_letters(tree: Tree) -> set[str]:
    """The letters of `tree` that stand for unknowns."""
    if tree[0] == "sym":
        return {tree[1]}
    return set().union(*[unknown_letters(child) for child in tree[1:] if isinstance(child, list)])


def rational_value(tree: Tree) -> Fraction | None:
    """The exact value when `tree` is made of rational arithmetic only, else None. Bounded work."""
    kind = tree[0]
    if kind == "num":
        return Fraction(int(tree[1]), int(tree[2]))
    if kind == "neg":
        value = rational_value(tree[1])
        return None if value is None else -value
    if kind not in ("add", "mul", "div", "pow"):
        return None
    left, right = rational_value(tree[1]), rational_value(tree[2])
    if left is None or right is None:
        return None
    return _apply(kind, left, right)


def _apply(kind: str, left: Fraction, right: Fraction) -> Fraction | None:
    if kind == "add":
        return left + right
    if kind == "mul":
        return left * right
    if kind == "div":
        return left / right if right else None
    if right.denominator != 1 or abs(right) > MAX_EXPONENT or (left == 0 and right < 0):
        return None
    if max(abs(left.numerator), left.denominator).bit_length() > 4 * MAX_DIGITS:
        return None
    return left**right.numerator


def integer_literal(tree: Tree) -> int | None:
    """The value of a plain (negated) number without a fractional part, else None."""
    sign = -1 if tree[0] == "neg" else 1
    inner = tree[1] if tree[0] == "neg" else tree
    if inner[0] != "num":
        return None
    value = Fraction(int(inner[1]), int(inner[2]))
    return sign * value.numerator if value.denominator == 1 else None


def fraction_literal(tree: Tree) -> tuple[int, int] | None:
    """(numerator, denominator) of a fraction of two integers as it is written, not reduced; else None."""
    if tree[0] == "neg":
        inner = fraction_literal(tree[1])
        return None if inner is None else (-inner[0], inner[1])
    if tree[0] != "div":
        return None
    numerator, denominator = integer_literal(tree[1]), integer_literal(tree[2])
    if numerator is None or not denominator:
        return None
    return (numerator, denominator) if denominator > 0 else (-numerator, -denominator)


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise NotMath(f"unexpected {text[position : position + 5]!r}")
        position = match.end()
        tokens += _split(match)
    return tokens


def _split(match: re.Match[str]) -> list[str]:
    """One token, except for words: `xy` is a product of letters, `sinx` a function and a letter."""
    if match["number"]:
        if len(match["number"]) > MAX_DIGITS:
            raise NotMath("too many digits")
        return [match["number"]]
    if match["symbol"]:
        return ["^" if match["symbol"] == "**" else match["symbol"]]
    word = match["command"][1:] if match["command"] else match["word"]
    if match["command"]:
        if word not in _COMMAND_WORDS and word not in FUNCTIONS:
            raise NotMath(f"unknown command {word}")
        return [_COMMAND_WORDS.get(word, word)]
    tokens = []
    while word:
        known = next((name for name in ("sqrt", "pi", *FUNCTIONS) if word.startswith(name)), word[0])
        tokens.append(known)
        word = word[len(known) :]
    return tokens


class _Parser:
    """Recursive descent over the tokens; `depth` bounds the nesting."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._position = 0

    def peek(self) -> str | None:
        return self._tokens[self._position] if self._position < len(self._tokens) else None

    def _next(self) -> str:
        token = self.peek()
        if token is None:
            raise NotMath("unexpected end")
        self._position += 1
        return token

    def _expect(self, token: str) -> None:
        if self._next() != token:
            raise NotMath(f"expected {token!r}")

    def sum(self, depth: int) -> Tree:
        if depth > MAX_DEPTH:
            raise NotMath("nested too deeply")
        tree = self._product(depth)
        while self.peek() in ("+", "-"):
            sign = self._next()
            term = self._product(depth)
            tree = ["add", tree, term if sign == "+" else ["neg", term]]
        return tree

    def _product(self, depth: int) -> Tree:
        tree = self._signed(depth)
        while (token := self.peek()) is not None and token not in ("+", "-", ")", "}", "]"):
            if token in ("*", "/"):
                self._next()
                tree = ["mul" if token == "*" else "div", tree, self._signed(depth)]
                continue
            if token[0].isdigit() or token[0] == ".":
                raise NotMath("a number follows without an operator")
            factor = self._power(depth)
            # 1\frac{1}{2} is a mixed number; every other neighbourhood is a product.
            mixed = token == "frac" and integer_literal(tree) is not None and fraction_literal(factor) is not None
            tree = _mixed_number(tree, factor) if mixed else ["mul", tree, factor]
        return tree

    def _signed(self, depth: int) -> Tree:
        if self.peek() in ("+", "-"):
            if depth > MAX_DEPTH:
                raise NotMath("nested too deeply")
            negative = self._next() == "-"
            tree = self._signed(depth + 1)
            return ["neg", tree] if negative else tree
        return self._power(depth)

    def _power(self, depth: int) -> Tree:
        base = self._atom(depth)
        if self.peek() != "^":
            return base
        self._next()
        exponent = self._exponent(depth)
        if _contains(exponent, "pow") or base[0] == "pow" or self.peek() == "^":
            raise NotMath("tower of powers")
        value = rational_value(exponent)
        if value is not None and (abs(value) > MAX_EXPONENT or value.denominator > MAX_EXPONENT):
            raise NotMath("exponent too large")
        return ["pow", base, exponent]

    def _exponent(self, depth: int) -> Tree:
        if self.peek() in ("+", "-"):
            return self._signed(depth + 1)
        return self._atom(depth)

    def _atom(self, depth: int) -> Tree:
        if depth > MAX_DEPTH:
            raise NotMath("nested too deeply")
        token = self._next()
        if token[0].isdigit() or token[0] == ".":
            value = Fraction(token if token[0] != "." else "0" + token)
            return ["num", str(value.numerator), str(value.denominator)]
        if token in _OPENING:
            tree = self.sum(depth + 1)
            self._expect(_OPENING[token])
            return tree
        if token == "frac":
            return ["div", self._argument(depth), self._argument(depth)]
        if token == "sqrt":
            return self._root(depth)
        if token in FUNCTIONS:
            return self._function(token, depth)
        if token in ("pi", "infinity"):
            return ["const", token]
        if token.isalpha() and len(token) == 1:
            return ["const", "i"] if token == "i" else ["sym", token]
        raise NotMath(f"unexpected {token!r}")

    def _argument(self, depth: int) -> Tree:
        """`{…}`, or the next digit or letter as in `\\frac12`, where the digits are separate arguments."""
        token = self.peek()
        if token is not None and token.isdigit() and len(token) > 1:
            self._tokens[self._position : self._position + 1] = list(token)
        return self._atom(depth + 1)

    def _root(self, depth: int) -> Tree:
        index: Tree = ["num", "2", "1"]
        if self.peek() == "[":
            self._next()
            index = self.sum(depth + 1)
            self._expect("]")
        value = rational_value(index)
        if value is None or value.denominator != 1 or not 2 <= value <= MAX_EXPONENT:
            raise NotMath("root index")
        return ["root", index, self._argument(depth)]

    def _function(self, name: str, depth: int) -> Tree:
        if self.peek() == "^":
            raise NotMath("power of a function name")
        base = None
        if self.peek() == "_":
            self._next()
            base = self._argument(depth)
        tree = ["fn", "ln" if base else name, self._power(depth + 1)]
        return ["div", tree, ["fn", "ln", base]] if base else tree


def _mixed_number(whole: Tree, fraction: Tree) -> Tree:
    return ["neg", ["add", whole[1], fraction]] if whole[0] == "neg" else ["add", whole, fraction]


def _contains(tree: Tree, kind: str) -> bool:
    return tree[0] == kind or any(_contains(child, kind) for child in tree[1:] if isinstance(child, list))
