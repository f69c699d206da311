"""Evaluate expressions: exactly where the value is rational, else to 60 digits or more.

Each evaluation counts the digits that its sums lose: a sum that is much smaller than its terms keeps only the digits
that did not cancel. A comparison that needs more digits than are left is repeated with higher precision.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from gymsdk.graders.maths.functions import FUNCTIONS
from gymsdk.graders.maths.lexer import Unreadable
from gymsdk.graders.maths.limits import (
    ABSORBED_DIGITS,
    GUARD_DIGITS,
    MAX_BITS,
    MAX_HEIGHT,
    MAX_MAGNITUDE,
    MAX_ROOT_BITS,
    MAX_STEPS,
    MAX_TERMS,
    MAX_TOTAL_BITS,
    PRECISIONS,
    VANISHING_DIGITS,
    TooLarge,
    Undecidable,
    Undefined,
    get_context,
)
from gymsdk.graders.maths.parser import INFINITY, Node, get_children

Point = Mapping[str, Any]


class Evaluation:
    """An evaluation of expressions at a point.

    Attributes:
        lost: The digits that the sums lost so far.
        absorbed: Whether a sum has a term that is too small to change it: equality cannot be concluded.
        vanished: Whether a sum cancels to less than 10 to the power of minus 200, and counts as zero, although numbers
            of many digits occur: likewise. Sums of small numbers, roots and constants that cancel to 400 digits are 0.
        height: The largest number of bits of a rational number that was converted.

    Args:
        digits: The precision in decimal digits.
        point: The values of the variables: fractions, or numbers of mpmath.
        log_base: The base of `log` without a base: `None` is e.
    """

    def __init__(self, digits: int, point: Point | None = None, log_base: int | None = None) -> None:
        self.digits = digits
        self.point = point or {}
        self.log_base = log_base
        self.lost = 0.0
        self.absorbed = False
        self.vanished = False
        self.height = 0
        self.steps = 0
        self.bits = 0

    @property
    def context(self) -> Any:
        """The context of mpmath."""
        return get_context(self.digits)

    def evaluate(self, node: Node) -> Any:
        """Return the value of an expression: a `Fraction`, or an `mpf` or `mpc` of mpmath.

        Raises:
            Undefined: The expression has no value at the point.
            TooLarge: A limit is exceeded.
            Undecidable: Too many digits cancel, or a part cannot be evaluated.
        """
        kind = node[0]
        if kind == "num":
            return node[1]
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise TooLarge("the expression takes too many steps")
        method = getattr(self, f"evaluate_{kind}", None)
        if method is None:
            raise Undecidable(f"{kind} has no value")
        return method(node)

    # Arithmetic

    def evaluate_add(self, node: Node) -> Any:
        exact, inexact = Fraction(0), []
        for term in node[1:]:
            value = self.evaluate(term)
            if isinstance(value, Fraction):
                exact = self.limit(exact + value)
            else:
                inexact.append(value)
        if not inexact:
            return exact
        return self.sum([*inexact, self.convert(exact)] if exact else inexact)

    def sum(self, terms: list[Any]) -> Any:
        """Return the sum of inexact terms, and count the digits it loses."""
        if len(terms) == 1:
            return terms[0]
        context = self.context
        total = context.fsum(terms)
        sizes = [context.mag(term) for term in terms if term]
        if not sizes:
            return total
        largest, smallest = max(sizes), min(sizes)
        size = context.mag(total) if total else None
        lost = math.inf if size is None else max(0.0, (largest - size) * 0.30103)
        if lost + self.lost > self.digits - GUARD_DIGITS - 10:
            if self.digits == PRECISIONS[-1] and largest * 0.30103 < self.digits - VANISHING_DIGITS - 20:
                self.vanished = self.vanished or self.absorbed or self.height > MAX_HEIGHT
                return Fraction(0)
            raise Undecidable("the terms of a sum cancel")
        self.lost += lost if lost > 1 else 0.0
        self.absorbed = self.absorbed or (largest - smallest) * 0.30103 > ABSORBED_DIGITS + self.digits - PRECISIONS[0]
        return total

    def evaluate_mul(self, node: Node) -> Any:
        exact, inexact = Fraction(1), None
        for factor in node[1:]:
            value = self.evaluate(factor)
            if isinstance(value, Fraction):
                exact = self.limit(exact * value)
            else:
                inexact = value if inexact is None else inexact * value
        if inexact is None or not exact:
            return exact
        return inexact if exact == 1 else inexact * self.convert(exact)

    def evaluate_div(self, node: Node) -> Any:
        above, below = self.evaluate(node[1]), self.evaluate(node[2])
        if not below:
            raise Undefined("a division by zero")
        if isinstance(above, Fraction) and isinstance(below, Fraction):
            return self.limit(above / below)
        return self.convert(above) / self.convert(below)

    def evaluate_neg(self, node: Node) -> Any:
        return -self.evaluate(node[1])

    def evaluate_pow(self, node: Node) -> Any:
        return self.raise_to(self.evaluate(node[1]), self.evaluate(node[2]))

    def raise_to(self, base: Any, exponent: Any) -> Any:
        """Return a power: of a negative number with an odd root, the real one."""
        if isinstance(exponent, Fraction):
            if not base:
                if exponent <= 0:
                    raise Undefined("zero to a power that is not positive")
                return Fraction(0)
            if isinstance(base, Fraction):
                exact = _raise_exactly(base, exponent)
                if exact is not None:
                    return self.limit(exact)
            if exponent.denominator == 1:
                return self.raise_to_integer(self.convert(base), exponent.numerator)
            if exponent.denominator % 2 and self.is_negative(base):
                root = self.raise_to(-base, exponent)
                return -root if exponent.numerator % 2 else root
        if not base:
            raise Undefined("zero to a power that is not rational")
        base, exponent = self.convert(base), self.convert(exponent)
        if base == 1:
            return base
        self.check_magnitude(exponent * self.context.log(base))
        return self.context.power(base, exponent)

    def raise_to_integer(self, base: Any, exponent: int) -> Any:
        context = self.context
        if exponent.bit_length() + max(abs(context.mag(base)), 1).bit_length() > MAX_MAGNITUDE:
            raise TooLarge("an exponent is too large")
        # Each multiplication of the power loses a part of the last digit.
        self.lost += exponent.bit_length() * 0.30103
        return context.power(base, exponent)

    # Constants, variables and functions

    def evaluate_const(self, node: Node) -> Any:
        if node[1] == "pi":
            return +self.context.pi
        if node[1] == "e":
            return +self.context.e
        if node[1] == "i":
            return self.context.mpc(0, 1)
        raise Undecidable("infinity is not a number")

    def evaluate_var(self, node: Node) -> Any:
        value = self.point.get(node[1])
        if value is None:
            raise Undecidable(f"{node[1]} has no value")
        return value

    def evaluate_pct(self, node: Node) -> Any:
        value = self.evaluate(node[1])
        return value / 100

    def evaluate_deg(self, node: Node) -> Any:
        value = self.evaluate(node[1])
        return self.convert(value) * self.context.pi / 180 if value else value

    def evaluate_call(self, node: Node) -> Any:
        arguments = [self.evaluate(argument) for argument in node[2:]]
        function = FUNCTIONS.get(node[1])
        if function is None:
            raise Undecidable(f"{node[1]} cannot be evaluated")
        try:
            value = function(self, *arguments)
            return self.limit(value) if isinstance(value, Fraction) else value
        except (TypeError, ValueError) as error:
            raise Undefined(f"{node[1]} is not defined there") from error

    def evaluate_open(self, node: Node) -> Any:
        if node[1] not in ("sum", "prod"):
            raise Undecidable(f"{node[1]} is not evaluated")
        low, high, body = _get_bounds(node)
        name, first = low
        start, end = self.evaluate(first), self.evaluate(high)
        if not all(isinstance(bound, Fraction) and bound.denominator == 1 for bound in (start, end)):
            raise Undecidable("the bounds are not integers")
        if end - start > MAX_TERMS:
            raise TooLarge("the sum has too many terms")
        outside = self.point
        parts: list[Any] = []
        for index in range(int(start), int(end) + 1):
            self.point = {**outside, name: Fraction(index)}
            parts.append(self.evaluate(body))
        self.point = outside
        neutral = Fraction(0 if node[1] == "sum" else 1)
        if node[1] == "prod":
            return self.evaluate_mul(("mul", ("num", neutral), *(("value", part) for part in parts)))
        return self.evaluate_add(("add", ("num", neutral), *(("value", part) for part in parts)))

    def evaluate_value(self, node: Node) -> Any:
        return node[1]

    # Helpers

    def convert(self, value: Any) -> Any:
        """Return a value as a number of mpmath."""
        if isinstance(value, Fraction):
            context = self.context
            self.height = max(self.height, value.numerator.bit_length(), value.denominator.bit_length())
            if value.denominator == 1:
                return context.mpf(value.numerator)
            return context.mpf(value.numerator) / value.denominator
        return value

    def limit(self, value: Fraction) -> Fraction:
        """Return *value*, and count its bits.

        Raises:
            TooLarge: It has too many, or all values of the evaluation together.
        """
        bits = value.numerator.bit_length() + value.denominator.bit_length()
        self.bits += bits
        if bits > 2 * MAX_BITS or self.bits > MAX_TOTAL_BITS:
            raise TooLarge("numbers have too many digits")
        return value

    def check_magnitude(self, value: Any) -> None:
        if value and self.context.mag(value) > MAX_MAGNITUDE:
            raise TooLarge("an exponent is too large")

    def is_negative(self, value: Any) -> bool:
        return self.is_real(value) and (value if isinstance(value, Fraction) else value.real) < 0

    def is_real(self, value: Any) -> bool:
        """Return whether *value* is real, up to the digits that are left."""
        if isinstance(value, Fraction) or not value.imag:
            return True
        digits = self.digits - GUARD_DIGITS - self.lost
        return bool(abs(value.imag) <= abs(value) * self.context.mpf(10) ** -digits)

    def lose(self, digits: float) -> None:
        """Count digits that a function loses near one of its zeros."""
        if digits + self.lost > self.digits - GUARD_DIGITS - 10:
            raise Undecidable("a function is too close to zero")
        self.lost += max(0.0, digits)


def _raise_exactly(base: Fraction, exponent: Fraction) -> Fraction | None:
    """Return the power if it is rational and not too large, else `None`."""
    power, root = exponent.numerator, exponent.denominator
    # The size of the result decides, so that equal powers of 2 and 4 are both exact, or neither.
    bits = math.log2(max(abs(base.numerator), base.denominator))
    if abs(power) > MAX_BITS * root or abs(power) * bits > MAX_BITS * root:
        return base if base == 1 else Fraction((-1) ** (power % 2)) if base == -1 and root == 1 else None
    if root == 1:
        return base**power
    if base < 0:
        if root % 2 == 0:
            return None
        positive = _raise_exactly(-base, exponent)
        return None if positive is None else -positive if power % 2 else positive
    above, below = _take_root(base.numerator, root), _take_root(base.denominator, root)
    return None if above is None or below is None else Fraction(above, below) ** power


def _take_root(number: int, degree: int) -> int | None:
    """Return the integer root of a natural number, or `None` if it is not an integer."""
    if number.bit_length() > MAX_ROOT_BITS:
        return None
    if degree == 2:  # noqa: PLR2004 -- the square root
        root = math.isqrt(number)
    elif degree > number.bit_length():
        return 1 if number == 1 else None
    else:
        low, high = 0, 1 << (number.bit_length() // degree + 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if middle**degree <= number else (low, middle - 1)
        root = low
    return root if root**degree == number else None


def _get_bounds(node: Node) -> tuple[tuple[str, Node], Node, Node]:
    """Return the variable with its first value, the last value and the body of a sum or product."""
    bounds = {part[1]: part[2] for part in node[2:-1]}
    low, high = bounds.get("_"), bounds.get("^")
    if low is None or high is None or low[0] != "rel" or low[2] != "=" or low[1][0] != "var":
        raise Undecidable("the bounds cannot be read")
    return (low[1][1], low[3]), high, node[-1]


MODULI = (2305843009213693951, 2305843009213693921)
"""Two primes of 61 bits, for the normal form of enormous integers."""


def draw_moduli(seed: str) -> tuple[int, int]:
    """Return two moduli of 61 bits for a comparison, which a policy cannot know."""
    rng = random.Random(seed)
    return rng.getrandbits(61) | 1 << 60 | 1, rng.getrandbits(61) | 1 << 60 | 1


def compute_residues(node: Node, moduli: tuple[int, int] = MODULI) -> tuple[int, ...] | None:
    """Return the remainders of an enormous rational number, or `None` if it is not of that form."""
    try:
        return tuple(_compute_residue(node, modulus) for modulus in moduli)
    except (ArithmeticError, ValueError):
        return None


def _compute_residue(node: Node, modulus: int) -> int:
    kind, parts = node[0], node[1:]
    if kind == "num":
        value: Fraction = node[1]
        return value.numerator * pow(value.denominator, -1, modulus) % modulus
    if kind == "neg":
        return -_compute_residue(node[1], modulus) % modulus
    if kind == "add":
        return sum(_compute_residue(part, modulus) for part in parts) % modulus
    if kind == "mul":
        return math.prod(_compute_residue(part, modulus) for part in parts) % modulus
    if kind == "div":
        return _compute_residue(node[1], modulus) * pow(_compute_residue(node[2], modulus), -1, modulus) % modulus
    if kind == "pow":
        exponent = Evaluation(PRECISIONS[0]).evaluate(node[2])
        if not isinstance(exponent, Fraction) or exponent.denominator != 1:
            raise Undecidable("the exponent is no integer")
        return pow(_compute_residue(node[1], modulus), int(exponent), modulus)
    number = Evaluation(PRECISIONS[0]).evaluate(node)
    if not isinstance(number, Fraction):
        raise Undecidable("the number is not rational")
    return _compute_residue(("num", number), modulus)


@lru_cache(maxsize=4096)
def find_variables(node: Node) -> frozenset[str]:
    """Return the names of the variables in an expression."""
    if node[0] == "var":
        return frozenset({node[1]})
    return frozenset().union(*map(find_variables, get_children(node)))


def contains(node: Node, *kinds: str) -> bool:
    """Return whether the tree has a node of one of *kinds*."""
    return node[0] in kinds or any(contains(child, *kinds) for child in get_children(node))


def contains_node(node: Node, *starts: Node) -> bool:
    """Return whether the tree has a node that begins with one of *starts*, such as `("call", "log")`."""
    return any(node[: len(start)] == start for start in starts) or any(
        contains_node(child, *starts) for child in get_children(node)
    )


EXPRESSIONS = frozenset(
    {"num", "var", "const", "add", "mul", "div", "neg", "pow", "call", "pct", "deg", "open", "bound"}
)


def check_expression(node: Node) -> None:
    """Raise `Unreadable` if a part of the tree does not belong to an expression."""
    if node[0] not in EXPRESSIONS:
        raise Unreadable(f"{node[0]} is no part of an expression")
    if node == INFINITY:
        raise Unreadable("infinity is no part of an expression")
    if node[0] == "bound":
        return
    for child in get_children(node):
        check_expression(child)
