"""Write exact values in LaTeX that math-verify can read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

Rational = int | Fraction


class Problem(NamedTuple):
    """A question, its exact answer in LaTeX, and other correct ways to write the answer."""

    question: str
    answer: str
    variants: tuple[str, ...] = ()


def number(value: Rational) -> str:
    r"""Write an integer, or a fraction in lowest terms: `-\frac{3}{4}`."""
    value = Fraction(value)
    if value.denominator == 1:
        return str(value.numerator)
    return f"{'-' * (value < 0)}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def slashed(value: Rational) -> str:
    """Write an integer, or a fraction on one line: `-3/4`."""
    return str(Fraction(value))


def rational(question: str, value: Rational) -> Problem:
    """Build a problem with a rational number as its answer."""
    other = slashed(value)
    return Problem(question, number(value), () if other == number(value) else (other,))


def polynomial(coefficients: Sequence[Rational], variable: str = "x") -> str:
    """Write a polynomial from its coefficients, highest power first: `3x^2 - x + 1`."""
    powers = range(len(coefficients) - 1, -1, -1)
    return terms((c, power_of(variable, power)) for c, power in zip(coefficients, powers, strict=True))


def power_of(variable: str, power: int) -> str:
    """Write a power of a variable: an empty string, `x`, `x^2`, `x^{12}`."""
    if power < 2:  # noqa: PLR2004 -- x^0 and x^1 are not written as powers
        return variable * power
    return f"{variable}^{power}" if power < 10 else f"{variable}^{{{power}}}"  # noqa: PLR2004 -- one digit


def terms(summands: Iterable[tuple[Rational, str]]) -> str:
    r"""Write a sum of coefficients times factors, without zero terms: `2x - \frac{1}{3}y + 4`."""
    text = ""
    for coefficient, factor in summands:
        if coefficient == 0:
            continue
        size = abs(Fraction(coefficient))
        sign = " - " if coefficient < 0 else " + "
        text += (sign if text else sign.strip(" +")) + (factor if factor and size == 1 else number(size) + factor)
    return text or "0"


def finite_set(values: Iterable[str]) -> str:
    r"""Write a set from its written elements: `\{1, 2\}`."""
    return rf"\{{{', '.join(values)}\}}"


def root(radicand: int) -> tuple[int, int]:
    """Return `(a, b)` with square-free b, so that the square root of *radicand* is a times the square root of b."""
    outside = next(a for a in range(math.isqrt(radicand), 0, -1) if radicand % (a * a) == 0)
    return outside, radicand // (outside * outside)
