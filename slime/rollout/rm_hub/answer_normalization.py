"""Forms of a final answer: tidy LaTeX without its unit, exact for the library, and a normal form as text.

Two answers with one normal form are equal, after the string normalisation of the MATH benchmark (arXiv 2103.03874):
spelling variants of LaTeX, units, currency and percent signs disappear, simple fractions get one spelling.
"""

import functools
import re

_WRAPPERS = r"text|mbox|mathrm|textbf|mathbf|textit|mathit|textrm|rm|bf|operatorname"
_UNIT_WORDS = {
    "centimeter": "cm", "meter": "m", "kilometer": "km", "millimeter": "mm", "inch": "in", "foot": "ft", "feet": "ft",
    "yard": "yd", "mile": "mi", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h", "day": "day",
    "week": "week", "month": "month", "year": "year", "liter": "l", "gram": "g", "kilogram": "kg", "dollar": "$",
    "cent": "cent", "point": "point", "degree": "°", "percent": "%", "cm": "cm", "mm": "mm", "km": "km", "kg": "kg",
    "mph": "mph", "sq": "square", "square": "square", "cubic": "cubic", "unit": "unit",
}  # fmt: skip
_PLAIN_UNITS = "|".join([*_UNIT_WORDS, "inches"])
_EXPONENT = r"(?:\s*\^\s*\{?\d\}?)?"
_SPACING = re.compile(
    r"(?<!\\)\\[!,;:> ]|\\(?:quad|qquad|left|right|displaystyle|limits|big[lr]?|Big[lr]?)(?![a-zA-Z])|~"
)
_DEGREE = r"\^\s*\{?\s*\\circ\s*\}?|°"
_WHOLE_WRAPPER = re.compile(rf"^\\(?:{_WRAPPERS}|boldsymbol)\s*\{{([^{{}}]*)\}}$")
_INNER_WRAPPER = re.compile(rf"\\(?:{_WRAPPERS})\s*\{{([^{{}}]*)\}}")
_LEADING_UNIT = re.compile(r"^([-+]?)\s*(\\?\$|[€£¥₹])\s*(?=\S)")
# Behind a comma stands another element of a list.
_TRAILING_UNIT = re.compile(
    rf"(?<=[^\s,])\s*(?:\\(?:{_WRAPPERS})\s*\{{[^{{}}]*\}}{_EXPONENT}|\\?%|{_DEGREE}|\\\$|[€£¥₹]"
    rf"|(?<=[\d}})])\s*(?:(?:{_PLAIN_UNITS})s?\b\.?{_EXPONENT}\s*)+|(?<=:\d\d)\s*[ap]\.?m\b\.?)$",
    re.IGNORECASE,
)
# A time names them like units, but they are part of its value.
HALVES_OF_DAY = {"am", "pm"}
# Letters that may stand in an upright or bold face at the end of a formula without being a unit.
_UPRIGHT_LETTERS = ("i", "j", "k", "e", "d", "T")
_MAGNITUDES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MAGNITUDE = "|".join(_MAGNITUDES)
# A decimal number and its magnitude, whose words may begin a wrapper: `5\text{ million dollars}`.
_WITH_MAGNITUDE = re.compile(
    rf"(?<![\w.,/^{{])(?P<whole>\d{{1,3}}(?:[, ]\d{{3}})+|\d+|(?=\.\d))(?:\.(?P<decimals>\d+))?"
    rf"\s*(?P<opening>\\(?:{_WRAPPERS})\{{)?(?P<names>(?:\s*\b(?:{_MAGNITUDE})\b){{1,3}})(?P<closing>\s*\}})?",
    re.IGNORECASE,
)
# What no unit has: numbers other than exponents, magnitudes, and words that say more than what the number counts.
_NO_UNIT = re.compile(
    rf"(?<![a-zA-Z^])(?<!\^-)\d|\b(?:to|or|if|not|maybe|is|(?:{_MAGNITUDE})(?:s|ths?)?)\b", re.IGNORECASE
)
_SYMBOLS = str.maketrans({
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
})  # fmt: skip
_NAMES = re.compile(r"(?<![\\a-zA-Z])(arcsin|arccos|arctan|sqrt|sin|cos|tan|log|ln|pi|infty)(?![a-zA-Z])")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])|(?<![\d.])\d{1,3}(?: \d{3})+(?![\d ])")
_DECIMAL = re.compile(r"(\^\s*)?(?<![\d.])(\d*)\.(?:(\d*)\\overline\s*\{(\d+)\}|(\d+))")
_MAX_CHARACTERS = 2000


@functools.lru_cache(maxsize=1024)
def split_unit(answer: str) -> tuple[str, str]:
    r"""(tidy LaTeX, unit): `25\text{ square meters}` gives `25` and `m2`, `\$3` gives `3` and `$`; often no unit.

    A magnitude is part of the number: `5\text{ million dollars}` gives `5000000` and `$`.
    """
    text = _WITH_MAGNITUDE.sub(_written_out, _tidy(answer))
    whole = _WHOLE_WRAPPER.match(text)
    if whole:
        text = whole[1].strip()
    units = []
    leading = _LEADING_UNIT.match(text)
    # Two dollar signs enclose mathematics, one is money.
    if leading and not (leading[2] == "$" and text.count("$") % 2 == 0):
        units.append(leading[2])
        text = leading[1] + text[leading.end() :]
    text = re.sub(r"(?<!\\)\$", "", text).strip() if not units else text
    while (trailing := _TRAILING_UNIT.search(text)) and _names_a_unit(trailing[0], text):
        units.insert(0, trailing[0])
        text = text[: trailing.start()].strip()
    text = re.sub(r"\\?\$|\\?%", "", _INNER_WRAPPER.sub(r"\1", text)).strip()
    return _brace_arguments(_join_mixed_number(_join_thousands(text))), _unit_name(" ".join(units))


def normalize_answer(answer: str) -> str:
    """The normal form of `answer` as text, without spaces. Idempotent on plain numbers and words."""
    value, unit = split_unit(answer)
    if ":" in value and unit in HALVES_OF_DAY:
        value += unit
    text = re.sub(_DEGREE, "", _strip_variable(value))
    text = re.sub(r"(?<![\d.])\.(?=\d)", "0.", text)
    text = re.sub(r"_\{(\w)\}", r"_\1", text)
    return _simple_fraction(_without_spaces(text))


def exact_latex(text: str) -> str:
    r"""Tidy LaTeX with decimals as fractions and degrees as radians: `0.1\overline{6}` is `\frac{15}{90}`."""
    text = re.sub(rf"(\d+(?:\.\d+)?)\s*(?:{_DEGREE})", r"(\\frac{\1\\pi}{180})", text)
    text = re.sub(r"(\d\.?\d*)[eE]([-+]?\d{1,3})(?![\w.])", r"\1\\times 10^{\2}", text)
    # The library reads 2(3) as a mixed number, and (2)(3) too.
    text = re.sub(r"(?<![\w.^}\]])(?<!_\{)(\d+|\{\d+\}) *(?=[(\[{]|\\d?binom|\\begin)", r"\1\\cdot ", text)
    text = re.sub(r"\) *(?=[\d({\[]|\\frac)", r")\\cdot ", text)
    return _DECIMAL.sub(_exact_decimal, text)


def _exact_decimal(match: re.Match[str]) -> str:
    power, whole, prefix, repeated, digits = match.groups()
    if repeated:
        before, scale = (whole + prefix) or "0", 10 ** len(prefix)
        numerator, denominator = int(before + repeated) - int(before), scale * (10 ** len(repeated) - 1)
    else:
        numerator, denominator = int(whole + digits), 10 ** len(digits)
    fraction = rf"\frac{{{numerator}}}{{{denominator}}}"
    return f"{power}{{{fraction}}}" if power else fraction


def _written_out(match: re.Match[str]) -> str:
    r"""`2.5\text{ million}` → `2500000`."""
    zeros = sum(_MAGNITUDES[name] for name in match["names"].lower().split())
    digits = (match["decimals"] or "").ljust(zeros, "0")
    whole = (re.sub("[, ]", "", match["whole"]) + digits[:zeros]).lstrip("0") or "0"
    wrapper = "" if match["opening"] and match["closing"] else match["opening"] or match["closing"] or ""
    return whole + ("." + digits[zeros:] if digits[zeros:] else "") + wrapper


def _tidy(answer: str) -> str:
    text = answer.strip()[:_MAX_CHARACTERS].replace("\n", " ").rstrip(".").strip().translate(_SYMBOLS)
    # A doubled backslash separates the rows of a matrix; elsewhere it is an escaped single one.
    if r"\begin" not in text or r"\\begin" in text:
        text = text.replace("\\\\", "\\")
    text = re.sub(r"\\!\\,|\\,\\!|\\!", "", text).replace("<=", "\\le ").replace(">=", "\\ge ")
    text = _SPACING.sub(" ", text)
    text = re.sub(r"\\(?:t|d|c)frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"\\\(|\\\)|\\\[|\\\]", "", text).replace("{,}", ",")
    text = re.sub(r"^\s*(?:\\approx|≈)\s*", "", text)
    joined = "or" if re.search(r"[<>]|\\[lg]eq?(?![a-z])", text) else "or|and"
    text = re.sub(rf",?\s*\\text\s*\{{\s*(?:{joined})\s*\}}\s*|,?\s+(?:{joined})\s+", ", ", text)
    text = re.sub(r"\binfinity\b", r"\\infty ", text, flags=re.IGNORECASE)
    text = _NAMES.sub(r"\\\1", text).replace("\\langle", "(").replace("\\rangle", ")")
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\(?:varnothing|O)(?![a-zA-Z])", r"\\emptyset ", text)
    text = re.sub(r"(?<=[\w)}]) *\*\* *(?=[\w({])", "^", text)
    return re.sub(r"\s+", " ", re.sub(r"(\\[a-zA-Z]+)\s+(?=\{)", r"\1", text)).strip()


def _names_a_unit(ending: str, text: str) -> bool:
    r"""Whether the end of `text` is a unit: `\text{ cm}`, but not `\text{ to 10}`, `\text{(B)}`, the ° of `\cos 60^\circ`."""
    wrapped = _INNER_WRAPPER.search(ending)
    if wrapped:
        word = wrapped[1].strip()
        return word not in _UPRIGHT_LETTERS and bool(re.match(r"[a-zA-Z%°]", word)) and not _NO_UNIT.search(word)
    return not (re.search(_DEGREE, ending) and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])", text))


def _unit_name(raw: str) -> str:
    """One spelling for one unit: `square centimeters` and `cm^2` are `cm2`."""
    words = re.findall(r"[a-z]+|\d|[$€£¥₹%°/]", re.sub(_DEGREE, "°", _INNER_WRAPPER.sub(r" \1 ", raw)).lower())
    names = [_singular_unit(word) for word in words]
    if "unit" in names:
        return ""
    power = "2" if "square" in names else "3" if "cubic" in names else ""
    return "".join(name for name in names if name not in ("square", "cubic")) + power


def _singular_unit(word: str) -> str:
    for ending in ("", "s", "es"):
        if word.endswith(ending) and word.removesuffix(ending) in _UNIT_WORDS:
            return _UNIT_WORDS[word.removesuffix(ending)]
    return word.removesuffix("s") if len(word) > 3 else word


def _strip_variable(text: str) -> str:
    """`x=5` → `5`: a name of at most two letters before the only equals sign."""
    left, separator, right = text.partition("=")
    if separator and "=" not in right and re.fullmatch(r"\s*\\?[a-zA-Z]{1,2}\s*", left) and right.strip():
        return right.strip()
    return text


def _join_thousands(text: str) -> str:
    """`1,000` → `1000`, but `{100,200}` has two elements."""
    parts = re.split(r"([(\[{].*[)\]}])", text)
    return "".join(
        part if position % 2 else _THOUSANDS.sub(lambda match: re.sub("[, ]", "", match[0]), part)
        for position, part in enumerate(parts)
    )


def _join_mixed_number(text: str) -> str:
    """`1 1/2` is one and a half; without the space it would read eleven halves."""
    return re.sub(r"(?<![\d.])(\d+) +(\d+)\s*/\s*(\d+)(?!\d)", r"\1\\frac{\2}{\3}", text)


def _brace_arguments(text: str) -> str:
    r"""`\frac12` → `\frac{1}{2}`, `\frac1{72}` → `\frac{1}{72}`, `\sqrt3` → `\sqrt{3}`."""
    text = re.sub(r"\\frac\s*(\w)\s*(\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\w)\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"(\\frac\s*\{[^{}]*\})\s*(\w)", r"\1{\2}", text)
    return re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)


def _without_spaces(text: str) -> str:
    r"""The text without spaces that separate nothing; `5 5` does not become `55`, nor `\pi r` `\pir`."""
    return re.sub(r"(\\[a-zA-Z]+) (?=[a-zA-Z])|(\d) (?=\d)| ", lambda m: m[0] if m[1] or m[2] else "", text)


def _simple_fraction(text: str) -> str:
    if text == "0.5":
        return r"\frac{1}{2}"
    fraction = re.fullmatch(r"(-?)(\d+)/(\d+)", text)
    return rf"{fraction[1]}\frac{{{fraction[2]}}}{{{fraction[3]}}}" if fraction else text
