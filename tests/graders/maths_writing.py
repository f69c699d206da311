"""Strategies that draw a value and several ways to write it, and a value beside it."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]


class Written(NamedTuple):
    """Two ways to write one value, and a way to write another value of the same kind."""

    first: str
    second: str
    other: str


def one_of(draw: Draw, *texts: str) -> str:
    """Draw one of *texts*."""
    return str(draw(st.sampled_from(texts)))


def write_integer(draw: Draw, value: int) -> str:
    """Write an integer: with groups of thousands, as a sum, a product, a power or a factorial."""
    sign, size = ("-" if value < 0 else ""), abs(value)
    grouped = [f"{sign}{size:,}".replace(",", comma) for comma in (",", r"\,", "{,}")]
    wide = str(value).translate(str.maketrans("0123456789", "０１２３４５６７８９"))
    forms = [f"{value}", *grouped, rf"{value - 7}+7", rf"\frac{{{3 * value}}}{{3}}", f"{value}.0", f"{value}.", wide]
    forms.append(f"−{size}" if sign else f"+{size}")
    return one_of(draw, *forms)


def write_rational(draw: Draw, value: Fraction) -> str:
    """Write a fraction: reduced or not, with a macro, a slash, Unicode, as a mixed number or a decimal number."""
    above, below = value.numerator, value.denominator
    if below == 1:
        return write_integer(draw, above)
    sign, size = ("-" if value < 0 else ""), abs(value)
    factor = draw(st.integers(2, 9))
    forms = [
        rf"{sign}\frac{{{abs(above)}}}{{{below}}}",
        rf"\dfrac{{{above}}}{{{below}}}",
        rf"\tfrac {{{above * factor}}} {{{below * factor}}}",
        f"{above}/{below}",
        rf"{sign}{abs(above)} \div {below}",
        rf"\frac{{{-above}}}{{-{below}}}",
        rf"{above}\cdot {below}^{{-1}}",
        f"{above}⁄{below}",
    ]
    whole, part = divmod(abs(above), below)
    if whole:
        forms += [rf"{sign}{whole}\frac{{{part}}}{{{below}}}", f"{sign}{whole} {part}/{below}"]
    decimal = _write_decimal(size)
    return one_of(draw, *forms, f"{sign}{decimal}")


def _write_decimal(value: Fraction) -> str:
    """Write a decimal number, with a bar over its period."""
    whole, rest = divmod(value.numerator, value.denominator)
    digits, seen = "", {}
    while rest and rest not in seen:
        seen[rest] = len(digits)
        digit, rest = divmod(rest * 10, value.denominator)
        digits += str(digit)
    if not rest:
        return f"{whole}.{digits}"
    start = seen[rest]
    return rf"{whole}.{digits[:start]}\overline{{{digits[start:]}}}"


STYLES = (
    *("TEXT", " TEXT ", "$TEXT$", r"\(TEXT\)", r"\[TEXT\]", r"\displaystyle TEXT", r"\mathbf{TEXT}"),
    *(r"\,TEXT\,", r"TEXT\!", "TEXT.", "{TEXT}", r"\color{red} TEXT"),
)


def style(draw: Draw, text: str) -> str:
    """Change only the style: spaces, delimiters, fonts, punctuation."""
    return one_of(draw, *STYLES).replace("TEXT", text)


rationals = st.builds(
    Fraction, st.integers(-(10**6), 10**6), st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 25, 60, 97])
)
naturals = st.integers(2, 40)


@st.composite
def numbers(draw: Draw) -> Written:
    """Draw a rational number."""
    value = draw(rationals)
    other = value + draw(st.sampled_from([1, -1, Fraction(1, 10**12), Fraction(-1, 7), -2 * value or 1]))
    return Written(write_rational(draw, value), write_rational(draw, value), write_rational(draw, other))


@st.composite
def surds(draw: Draw) -> Written:
    """Draw a number a + b times the root of c."""
    a, b, c = draw(st.integers(-30, 30)), draw(st.integers(1, 20)), draw(st.sampled_from([2, 3, 5, 6, 7, 11, 13]))

    def write(b: int) -> str:
        root = one_of(
            draw,
            rf"{b}\sqrt{{{c}}}",
            rf"\sqrt{{{b * b * c}}}",
            rf"{b}√{c}",
            rf"{b}\cdot {c}^{{1/2}}",
            rf"\frac{{{b * c}}}{{\sqrt{{{c}}}}}",
        )
        return one_of(draw, f"{a}+{root}", f"{root}+{a}", rf"\frac{{{2 * a}+2\cdot {root}}}{{2}}")

    return Written(write(b), write(b), write(b + 1))


@st.composite
def polynomials(draw: Draw) -> Written:
    """Draw a polynomial with two integer roots."""
    a, b, k = draw(st.integers(-20, 20)), draw(st.integers(-20, 20)), draw(st.integers(1, 9))
    name = draw(st.sampled_from(["x", "t", "y", r"\theta", "x_1"]))

    def write(a: int, b: int) -> str:
        factors = [f"({name}-({a}))", f"({name}-({b}))"]
        return one_of(
            draw,
            f"{k}{factors[0]}{factors[1]}",
            rf"{k} \cdot {factors[1]} \cdot {factors[0]}",
            f"{k}{name}^2+({-k * (a + b)}){name}+({k * a * b})",
            f"{k * a * b}-{k * (a + b)}{name}+{k}{name}²"
            if a + b >= 0
            else f"{k * a * b}+{-k * (a + b)}{name}+{k}{name}²",
            rf"\frac{{{2 * k}{factors[0]}{factors[1]}}}{{2}}",
        )

    return Written(write(a, b), write(a, b), write(a, b + 1))


@st.composite
def collections(draw: Draw) -> Written:
    """Draw a set, with its elements in two orders."""
    values = draw(st.lists(rationals, min_size=2, max_size=4, unique=True))

    def write(values: list[Fraction]) -> str:
        written = ", ".join(write_rational(draw, value) for value in draw(st.permutations(values)))
        return one_of(draw, rf"\{{{written}\}}", rf"\left\{{{written}\right\}}", rf"\lbrace {written} \rbrace")

    return Written(write(values), write(values), write([*values[:-1], values[-1] + 1000001]))


@st.composite
def tuples(draw: Draw) -> Written:
    """Draw a tuple of three numbers."""
    values = draw(st.lists(rationals, min_size=3, max_size=3, unique=True))

    def write(values: list[Fraction]) -> str:
        written = ", ".join(write_rational(draw, value) for value in values)
        return one_of(
            draw, f"({written})", rf"\left({written}\right)", rf"\bigl( {written} \bigr)", rf"\langle {written}\rangle"
        )

    return Written(write(values), write(values), write([values[1], values[0], values[2]]))


@st.composite
def intervals(draw: Draw) -> Written:
    """Draw an interval, written with brackets or as inequalities."""
    low = draw(rationals)
    high = low + draw(st.integers(1, 50))
    closed = draw(st.booleans())

    def write(closed: bool) -> str:
        ends = write_rational(draw, low), write_rational(draw, high)
        bracket, sign = ("[", r"\le") if closed else ("(", "<")
        return one_of(
            draw,
            f"{bracket}{ends[0]}, {ends[1]})",
            rf"{ends[0]} {sign} x < {ends[1]}",
            rf"x \in {bracket}{ends[0]}, {ends[1]})",
            rf"{ends[1]} > x {'≥' if closed else '>'} {ends[0]}",
            rf"\{{x \mid {ends[0]} {sign} x < {ends[1]}\}}",
        )

    return Written(write(closed), write(closed), write(not closed))


@st.composite
def enormous(draw: Draw) -> Written:
    """Draw a power that is too large to be written out, and the number after it."""
    base, exponent = draw(naturals), draw(st.integers(10**5, 10**7))
    return Written(f"{base}^{{{2 * exponent}}}", f"{base**2}^{{{exponent}}}", f"{base}^{{{2 * exponent}}}+1")


written = st.one_of(numbers(), surds(), polynomials(), collections(), tuples(), intervals(), enormous())
