"""Write answers in a normal form that is the same for equal answers of one kind, so that votes count them together."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from fractions import Fraction
from typing import Any

from gymsdk.graders.maths.kinds import (
    Answer,
    Assignment,
    BaseNumber,
    Clock,
    Collection,
    Equation,
    Interval,
    Letter,
    Matrix,
    Piecewise,
    Quantity,
    Ratio,
    Reals,
    Relation,
    Residue,
    Scalar,
    SetExpression,
    Words,
)
from gymsdk.graders.maths.limits import PRECISIONS
from gymsdk.graders.maths.parser import Node, negate, write_node
from gymsdk.graders.maths.units import Unit
from gymsdk.graders.maths.values import Evaluation, compute_residues, find_variables

MAX_DIGITS = 400
_SHOWN_DIGITS = 25
_ENORMOUS_BITS = 200
_TRIES = 6
_CHECKED = 3


def describe(answer: Answer) -> str:
    """Return the normal form of an answer.

    Rational numbers are integers or fractions, others have 25 digits. An expression shows its variables and a digest of
    its values, because no notation is the same for all ways to write it.
    """
    return _WRITERS[type(answer)](answer)


def _describe_scalar(answer: Scalar) -> str:
    if answer.kind == "infinity":
        return "-∞" if answer.node[0] == "neg" else "∞"
    return describe_node(answer.node)


def _describe_ratio(answer: Ratio) -> str:
    return ":".join(describe_node(("div", part, answer.parts[-1])) for part in answer.parts[:-1]) + ":1"


def _describe_matrix(answer: Matrix) -> str:
    return "[" + "; ".join(", ".join(map(describe, row)) for row in answer.rows) + "]"


def _describe_piecewise(answer: Piecewise) -> str:
    return "; ".join(sorted(f"{describe(value)} if {describe(condition)}" for value, condition in answer.rows))


def _describe_collection(answer: Collection) -> str:
    written = [describe(item) for item in answer.items]
    return f"({', '.join(written)})" if answer.kind == "tuple" else f"{{{', '.join(sorted(set(written)))}}}"


def _describe_relation(answer: Relation) -> str:
    return " ".join(part if isinstance(part, str) else describe_node(part) for part in answer.parts)


def describe_node(node: Node) -> str:
    """Return the normal form of an expression."""
    names = sorted(find_variables(node))
    if not names:
        return _describe_number(node)
    values = [_write_value(value) for value in itertools.islice(_iter_values(node), _CHECKED)]
    if values and len(set(values)) == 1 and not values[0].startswith("number"):
        return values[0]
    return f"expression in {', '.join(names)}: {_digest(' '.join(values) or write_node(node))}"


def _describe_number(node: Node) -> str:
    try:
        value = Evaluation(PRECISIONS[0]).evaluate(node)
    except (ArithmeticError, ValueError):
        return f"number {_digest(write_node(node))}"
    if isinstance(value, Fraction) or Evaluation(PRECISIONS[0]).context.mag(value) < _ENORMOUS_BITS:
        return _write_value(value)
    # The digits that are shown do not tell enormous integers apart.
    residues = compute_residues(node)
    return _write_value(value) if residues is None else f"{_write_value(value)} {_digest(str(residues))}"


def _iter_values(node: Node) -> Iterator[Any]:
    """Yield the values of an expression at points that depend on its variables only."""
    names = sorted(find_variables(node))
    rng = random.Random(" ".join(names))
    for _ in range(_TRIES):
        point = {name: Fraction(rng.randrange(500, 19946), 9973) for name in names}
        with suppress(ArithmeticError, ValueError):
            yield Evaluation(PRECISIONS[0], point).evaluate(node)


def _write_value(value: Any) -> str:
    if isinstance(value, Fraction):
        if value.numerator.bit_length() + value.denominator.bit_length() > 3 * MAX_DIGITS:
            return f"number {_digest(hex(value.numerator) + '/' + hex(value.denominator))}"
        return str(value)
    parts = [value.real, value.imag] if value.imag else [value.real]
    return " + ".join(_write_decimal(part) for part in parts) + (" i" if len(parts) > 1 else "")


def _write_decimal(value: Any) -> str:
    from mpmath import libmp

    return str(libmp.to_str(value._mpf_, _SHOWN_DIGITS))


def _describe_quantity(node: Node, unit: Unit) -> str:
    names = " ".join(base if power == 1 else f"{base}^{power}" for base, power in unit.powers)
    return f"{describe_node(('mul', node, ('num', unit.factor)))} {names}".strip()


def _describe_residue(node: Node, modulus: Node) -> str:
    evaluation = Evaluation(PRECISIONS[0])
    try:
        value, divisor = evaluation.evaluate(node), evaluation.evaluate(modulus)
    except (ArithmeticError, ValueError):
        return f"{describe_node(node)} mod {describe_node(modulus)}"
    if isinstance(value, Fraction) and isinstance(divisor, Fraction) and divisor:
        return f"{value % divisor} mod {divisor}"
    return f"{describe_node(node)} mod {describe_node(modulus)}"


def _describe_interval(interval: Interval) -> str:
    low = "-∞" if interval.low is None else describe_node(interval.low)
    high = "∞" if interval.high is None else describe_node(interval.high)
    if low == high:
        return f"{{{low}}}"
    return f"{'[' if interval.has_low else '('}{low}, {high}{']' if interval.has_high else ')'}"


def _describe_side(node: Node) -> str:
    """Return the normal form of an expression up to a constant factor."""
    first, *others = [value for value in _iter_values(node) if value] or [Fraction(1)]
    evaluation = Evaluation(PRECISIONS[0])
    ratios = [_write_value(evaluation.evaluate(("div", ("value", value), ("value", first)))) for value in others]
    return f"equation in {', '.join(sorted(find_variables(node)))}: {_digest(' '.join(ratios))}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:10]


_WRITERS: dict[type, Callable[[Any], str]] = {
    Scalar: _describe_scalar,
    Quantity: lambda answer: _describe_quantity(answer.node, answer.unit),
    Words: lambda answer: answer.text,
    Letter: lambda answer: answer.letter,
    BaseNumber: lambda answer: f"{answer.digits}_{answer.base}",
    Clock: lambda answer: ":".join(f"{number:02}" for number in answer.numbers) + answer.half,
    Ratio: _describe_ratio,
    Residue: lambda answer: _describe_residue(answer.node, answer.modulus),
    Matrix: _describe_matrix,
    Piecewise: _describe_piecewise,
    Collection: _describe_collection,
    Reals: lambda answer: " ∪ ".join(map(_describe_interval, answer.intervals)) or "∅",
    Assignment: lambda answer: describe(answer.value),
    Equation: lambda answer: f"{_describe_side(('add', answer.left, negate(answer.right)))} = 0",
    SetExpression: lambda answer: (
        f"set of {', '.join(sorted(find_variables(answer.node)))}: {_digest(write_node(answer.node))}"
    ),
    Relation: _describe_relation,
}
