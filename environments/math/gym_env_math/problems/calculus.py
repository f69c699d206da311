"""Generate calculus problems: derivatives and definite integrals."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction

from .latex import Problem, Rational, number, polynomial, power_of, rational, terms


def derivatives(rng: random.Random, difficulty: int) -> Problem:
    """Ask for the derivative of a polynomial, product, quotient or composition."""
    family = {1: _of_polynomial, 2: _at_point, 3: _of_product, 4: _of_quotient, 5: _of_composition}
    return family[difficulty](rng)


def integrals(rng: random.Random, difficulty: int) -> Problem:
    """Ask for a definite integral with an exact value."""
    family = {1: _of_powers, 2: _area_between, 3: _of_exponential, 4: _of_logarithm, 5: _by_parts}
    return family[difficulty](rng)


def _coefficients(rng: random.Random, degree: int) -> list[int]:
    return [rng.choice([n for n in range(-9, 10) if n]) for _ in range(degree + 1)]


def _derived(coefficients: Sequence[Rational]) -> list[Rational]:
    degree = len(coefficients) - 1
    return [c * (degree - i) for i, c in enumerate(coefficients[:-1])]


def _at(coefficients: Sequence[Rational], x: Rational) -> Fraction:
    value = Fraction()
    for coefficient in coefficients:
        value = value * x + coefficient
    return value


def _integral(coefficients: Sequence[Rational], low: Rational, high: Rational) -> Fraction:
    degree = len(coefficients)
    antiderivative = [Fraction(c) / (degree - i) for i, c in enumerate(coefficients)] + [Fraction()]
    return _at(antiderivative, high) - _at(antiderivative, low)


def _differentiate(function: str, answer: str, *variants: str) -> Problem:
    return Problem(f"Find the derivative \\(f'(x)\\) of \\(f(x) = {function}\\).", answer, variants)


def _of_polynomial(rng: random.Random) -> Problem:
    coefficients = _coefficients(rng, rng.randint(3, 5))
    answer = polynomial(_derived(coefficients))
    return _differentiate(polynomial(coefficients), answer, f"f'(x) = {answer}")


def _at_point(rng: random.Random) -> Problem:
    coefficients = _coefficients(rng, rng.randint(3, 5))
    x = Fraction(rng.choice([-5, -4, -3, 3, 4, 5]), rng.choice([1, 2, 3, 4]))
    question = f"Let \\(f(x) = {polynomial(coefficients)}\\). Find \\(f'({number(x)})\\)."
    return rational(question, _at(_derived(coefficients), x))


def _of_product(rng: random.Random) -> Problem:
    power, rate = rng.randint(2, 9), rng.choice([-7, -6, -5, -4, -3, -2, 2, 3, 4, 5, 6, 7])
    scale = rng.randint(2, 9)
    exponential = f"e^{{{rate}x}}"
    expanded = terms(
        [(scale * rate, power_of("x", power) + exponential), (scale * power, power_of("x", power - 1) + exponential)]
    )
    factored = f"{scale}{power_of('x', power - 1)}{exponential}({polynomial([rate, power])})"
    return _differentiate(f"{scale}{power_of('x', power)}{exponential}", expanded, factored)


def _of_quotient(rng: random.Random) -> Problem:
    (a, b), (c, d) = _coefficients(rng, 1), _coefficients(rng, 1)
    top = a * d - b * c
    if top == 0:
        return _of_quotient(rng)
    lower = polynomial([c, d])
    sign = "-" if top < 0 else ""
    squared = polynomial([c * c, 2 * c * d, d * d])
    return _differentiate(
        rf"\frac{{{polynomial([a, b])}}}{{{lower}}}",
        rf"{sign}\frac{{{abs(top)}}}{{({lower})^2}}",
        rf"\frac{{{top}}}{{{squared}}}",
    )


def _of_composition(rng: random.Random) -> Problem:
    a, b, power = rng.randint(2, 9), rng.randint(1, 20), rng.randint(2, 5)
    inner = f"{a}{power_of('x', power)} + {b}"
    slope = f"{a * power}{power_of('x', power - 1)}"
    return rng.choice(
        [
            _differentiate(rf"\ln({inner})", rf"\frac{{{slope}}}{{{inner}}}"),
            _differentiate(rf"\sin({inner})", rf"{slope}\cos({inner})", rf"\cos({inner}) \cdot {slope}"),
            _differentiate(rf"\cos({inner})", rf"-{slope}\sin({inner})"),
            _differentiate(f"e^{{{inner}}}", f"{slope}e^{{{inner}}}", rf"e^{{{inner}}} \cdot {slope}"),
        ]
    )


def _evaluate(low: str, high: str, integrand: str) -> str:
    return rf"Evaluate \(\int_{{{low}}}^{{{high}}} {integrand} \, dx\) exactly."


def _of_powers(rng: random.Random) -> Problem:
    coefficients = _coefficients(rng, rng.randint(2, 4))
    low = rng.randint(-3, 1)
    high = low + rng.randint(2, 4)
    question = _evaluate(str(low), str(high), f"({polynomial(coefficients)})")
    return rational(question, _integral(coefficients, low, high))


def _area_between(rng: random.Random) -> Problem:
    low, a = rng.randint(-6, 3), rng.randint(1, 5)
    high = low + rng.randint(2, 9)
    slope, offset = rng.choice([-3, -2, -1, 1, 2, 3]), rng.choice([-5, -3, -2, 2, 3, 5])
    parabola = polynomial([a, slope - a * (low + high), offset + a * low * high])
    question = (
        f"Find the area of the region enclosed by the parabola \\(y = {parabola}\\) "
        f"and the line \\(y = {polynomial([slope, offset])}\\)."
    )
    return rational(question, Fraction(a * (high - low) ** 3, 6))


def _of_exponential(rng: random.Random) -> Problem:
    rate, high, scale = rng.randint(2, 9), rng.randint(1, 6), rng.randint(2, 19)
    factor = Fraction(scale, rate)
    power = f"e^{{{rate * high}}}"
    answer = terms([(factor, power), (-factor, "")])
    other = rf"\frac{{{scale}({power} - 1)}}{{{rate}}}"
    return Problem(_evaluate("0", str(high), f"{scale} e^{{{rate}x}}"), answer, (other,))


def _of_logarithm(rng: random.Random) -> Problem:
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    low, scale = rng.randint(0, 4), rng.randint(1, 9)
    high = low + rng.randint(1, 6)
    ratio = Fraction(a * high + b, a * low + b)
    answer = terms([(Fraction(scale, a), rf"\ln\left({number(ratio)}\right)")])
    apart = terms([(Fraction(scale, a), rf"(\ln({a * high + b}) - \ln({a * low + b}))")])
    integrand = rf"\frac{{{scale}}}{{{polynomial([a, b])}}}"
    return Problem(_evaluate(str(low), str(high), integrand), answer, (apart,))


def _by_parts(rng: random.Random) -> Problem:
    rate, high, scale = rng.randint(2, 7), rng.randint(1, 6), rng.randint(2, 15)
    power = f"e^{{{rate * high}}}"
    first, second = Fraction(scale * high, rate), Fraction(scale, rate * rate)
    answer = terms([(first - second, power), (second, "")])
    other = rf"\frac{{{scale * (rate * high - 1)}{power} + {scale}}}{{{rate * rate}}}"
    return Problem(_evaluate("0", str(high), f"{scale} x e^{{{rate}x}}"), answer, (other,))
