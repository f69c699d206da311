"""The functions that an expression can call, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from gymsdk.graders.maths.limits import (
    GUARD_DIGITS,
    MAX_ANGLE_BITS,
    MAX_BITS,
    MAX_FACTORIAL,
    MAX_TERMS,
    TooLarge,
    Undecidable,
    Undefined,
)

if TYPE_CHECKING:
    from gymsdk.graders.maths.values import Evaluation


def _root(evaluation: Evaluation, degree: Any, value: Any) -> Any:
    if not isinstance(degree, Fraction) or degree <= 0:
        raise Undefined("the degree of a root is not a positive number")
    if not value:
        return Fraction(0)
    return evaluation.raise_to(value, 1 / degree)


def _factorial(evaluation: Evaluation, value: Any) -> Any:
    if isinstance(value, Fraction) and value.denominator == 1:
        if value < 0:
            raise Undefined("the factorial of a negative integer")
        if value <= MAX_FACTORIAL:
            return Fraction(math.factorial(int(value)))
    value = evaluation.convert(value)
    if evaluation.context.mag(value) > 64:  # noqa: PLR2004 -- bits; the logarithm of the result has as many more
        raise TooLarge("a factorial is too large")
    evaluation.lose(20)
    return evaluation.context.gamma(value + 1)


def _double_factorial(_evaluation: Evaluation, value: Any) -> Any:
    if not isinstance(value, Fraction) or value.denominator != 1 or value < -1:
        raise Undefined("the double factorial of a number that is no natural number")
    if value > MAX_FACTORIAL:
        raise TooLarge("a factorial is too large")
    return Fraction(math.prod(range(int(value), 0, -2)))


def _binomial(evaluation: Evaluation, total: Any, chosen: Any) -> Any:
    if not isinstance(chosen, Fraction) or chosen.denominator != 1:
        raise Undecidable("a binomial coefficient with a lower part that is no integer")
    if chosen < 0:
        return Fraction(0)
    if isinstance(total, Fraction) and total.denominator == 1 and total >= 0:
        smaller = min(int(chosen), max(0, int(total - chosen)))
        if smaller * total.numerator.bit_length() > MAX_BITS:
            raise TooLarge("a binomial coefficient is too large")
        return Fraction(math.comb(int(total), int(chosen)))
    if chosen > MAX_TERMS:
        raise TooLarge("a binomial coefficient is too large")
    factors = [
        ("div", ("add", ("value", total), ("num", Fraction(-k))), ("num", Fraction(k + 1))) for k in range(int(chosen))
    ]
    return evaluation.evaluate(("mul", ("num", Fraction(1)), *factors))


def _absolute(_evaluation: Evaluation, value: Any) -> Any:
    return abs(value)


def _round(towards: Callable[[Any], int]) -> Callable[[Evaluation, Any], Any]:
    def rounded(evaluation: Evaluation, value: Any) -> Any:
        if isinstance(value, Fraction):
            return Fraction(towards(value))
        if not evaluation.is_real(value) or evaluation.context.mag(value) > MAX_BITS:
            raise Undefined("only real numbers are rounded")
        nearest = evaluation.context.nint(value.real)
        if abs(value.real - nearest) < evaluation.context.mpf(10) ** -(evaluation.digits // 2):
            raise Undecidable("the value is too close to an integer to be rounded")
        return Fraction(int(evaluation.context.floor(value.real)) + (towards is math.ceil))

    return rounded


def _logarithm(evaluation: Evaluation, value: Any, base: Any = None) -> Any:
    if not value:
        raise Undefined("the logarithm of zero")
    if value == 1:
        return Fraction(0)
    result = evaluation.context.log(evaluation.convert(value))
    if not result:
        raise Undecidable("a logarithm is too close to zero")
    evaluation.lose(-min(0, evaluation.context.mag(result)) * 0.30103)
    if base is None:
        return result
    below = _logarithm(evaluation, base)
    if not below:
        raise Undefined("a logarithm to the base 1")
    return result / evaluation.convert(below)


def _plain_log(evaluation: Evaluation, value: Any) -> Any:
    base = evaluation.log_base
    return _logarithm(evaluation, value, None if base is None else Fraction(base))


def _exponential(evaluation: Evaluation, value: Any) -> Any:
    if not value:
        return Fraction(1)
    return evaluation.raise_to(+evaluation.context.e, value)


def _sine(evaluation: Evaluation, value: Any) -> Any:
    return _trigonometric(evaluation, value, Fraction(0))


def _cosine(evaluation: Evaluation, value: Any) -> Any:
    return _trigonometric(evaluation, value, Fraction(1, 2))


def _trigonometric(evaluation: Evaluation, value: Any, shift: Fraction) -> Any:
    """Return the sine of *value* plus *shift* times pi: exactly where it is 0, 1/2 or 1."""
    context = evaluation.context
    value = evaluation.convert(value)
    if value and context.mag(value) > MAX_ANGLE_BITS:
        raise TooLarge("an angle is too large")
    turns = value / context.pi * 12
    nearest = context.nint(turns.real)
    if nearest and abs(turns - nearest) <= abs(turns) * context.mpf(10) ** -(evaluation.digits - GUARD_DIGITS):
        # Multiples of pi/12: the sine of 0, pi/6, pi/2, ... is rational.
        twelfths = (int(nearest) + int(shift * 12)) % 24
        rational: dict[int, int | Fraction] = {
            0: 0,
            2: Fraction(1, 2),
            6: 1,
            10: Fraction(1, 2),
            12: 0,
            14: Fraction(-1, 2),
            18: -1,
            22: Fraction(-1, 2),
        }
        if twelfths in rational:
            return Fraction(rational[twelfths])
    if not value:
        return Fraction(0 if not shift else 1)
    result = context.cos(value) if shift else context.sin(value)
    evaluation.lose((max(0, context.mag(value)) - min(0, context.mag(result))) * 0.30103 if result else math.inf)
    evaluation.absorbed = evaluation.absorbed or abs(result) == 1
    return result


def _cis(evaluation: Evaluation, value: Any) -> Any:
    real, imaginary = (evaluation.convert(part(evaluation, value)) for part in (_cosine, _sine))
    return evaluation.context.mpc(real, imaginary)


def _tangent(evaluation: Evaluation, value: Any) -> Any:
    below = _cosine(evaluation, value)
    if not below:
        raise Undefined("the tangent has a pole")
    above = _sine(evaluation, value)
    if isinstance(above, Fraction) and isinstance(below, Fraction):
        return above / below
    return evaluation.convert(above) / evaluation.convert(below)


def _reciprocal(function: Callable[[Evaluation, Any], Any]) -> Callable[[Evaluation, Any], Any]:
    def inverted(evaluation: Evaluation, value: Any) -> Any:
        below = function(evaluation, value)
        if not below:
            raise Undefined("a function has a pole")
        return 1 / below

    return inverted


def _library(name: str, *, inverse: bool = False) -> Callable[[Evaluation, Any], Any]:
    """Return the function of mpmath with this name; with *inverse*, of the reciprocal."""

    def call(evaluation: Evaluation, value: Any) -> Any:
        evaluation.check_magnitude(value)
        value = evaluation.convert(value)
        if inverse:
            if not value:
                raise Undefined("a function has a pole")
            value = 1 / value
        result = getattr(evaluation.context, name)(value)
        # The exact value is not 1, but the difference is too small for the precision.
        evaluation.absorbed = evaluation.absorbed or (abs(result) == 1 and value != 0)
        if result:
            evaluation.lose(-min(0, evaluation.context.mag(result)) * 0.30103 if value else 0)
        return result

    return call


def _combine(function: Callable[..., int]) -> Callable[..., Any]:
    def call(_evaluation: Evaluation, *values: Any) -> Any:
        if not values or not all(isinstance(value, Fraction) and value.denominator == 1 for value in values):
            raise Undefined("only integers have a common divisor or multiple")
        return Fraction(function(*map(int, values)))

    return call


def _choose(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(evaluation: Evaluation, *values: Any) -> Any:
        if not all(map(evaluation.is_real, values)):
            raise Undefined("only real numbers have an order")
        return function(values, key=lambda value: value if isinstance(value, Fraction) else value.real)

    return call


def _conjugate(evaluation: Evaluation, value: Any) -> Any:
    return value if isinstance(value, Fraction) else evaluation.context.conj(value)


def _sign(evaluation: Evaluation, value: Any) -> Any:
    if not evaluation.is_real(value):
        raise Undefined("only real numbers have a sign")
    return Fraction(0 if not value else -1 if evaluation.is_negative(value) else 1)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "root": _root,
    "fact": _factorial,
    "fact2": _double_factorial,
    "binom": _binomial,
    "abs": _absolute,
    "floor": _round(math.floor),
    "ceil": _round(math.ceil),
    "ln": _logarithm,
    "log": _plain_log,
    "lg": lambda evaluation, value: _logarithm(evaluation, value, Fraction(10)),
    "logb": lambda evaluation, base, value: _logarithm(evaluation, value, base),
    "lb": lambda evaluation, value: _logarithm(evaluation, value, Fraction(2)),
    "exp": _exponential,
    "cis": _cis,
    "sin": _sine,
    "cos": _cosine,
    "tan": _tangent,
    "sec": _reciprocal(_cosine),
    "csc": _reciprocal(_sine),
    "cot": _reciprocal(_tangent),
    "arcsin": _library("asin"),
    "arccos": _library("acos"),
    "arctan": _library("atan"),
    "arccot": _library("acot"),
    "arcsec": _library("acos", inverse=True),
    "arccsc": _library("asin", inverse=True),
    "sinh": _library("sinh"),
    "cosh": _library("cosh"),
    "tanh": _library("tanh"),
    "coth": _library("coth"),
    "sech": _library("sech"),
    "csch": _library("csch"),
    "arcsinh": _library("asinh"),
    "arccosh": _library("acosh"),
    "arctanh": _library("atanh"),
    "gcd": _combine(math.gcd),
    "lcm": _combine(math.lcm),
    "max": _choose(max),
    "min": _choose(min),
    "conj": _conjugate,
    "sgn": _sign,
}
