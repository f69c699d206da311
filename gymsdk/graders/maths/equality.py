"""Decide whether two expressions are equal: exactly, or to 60 digits at points drawn at random."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from gymsdk.graders.maths.limits import (
    MAX_HEIGHT,
    MAX_LOST,
    PRECISIONS,
    VANISHING_DIGITS,
    TooLarge,
    Undecidable,
    Undefined,
    get_context,
)
from gymsdk.graders.maths.parser import INFINITY, Node, get_children, replace_children, write_node
from gymsdk.graders.maths.values import (
    Evaluation,
    Point,
    compute_residues,
    contains,
    contains_node,
    draw_moduli,
    find_variables,
)

Outcome = Literal["equal", "different", "undecided"]
EQUAL: Outcome = "equal"
DIFFERENT: Outcome = "different"
UNDECIDED: Outcome = "undecided"

POINTS = 4
"""At how many points two expressions must agree."""

_TRIES = 9
MAX_KINKS = 8
_SCALES = (1, 20, 3, 1000, 100, 7, 5000, 50, 10)
_DENOMINATOR = 9973
_WHOLE = 4
"""The number of the point with integers, at which rounding differs from adding one."""
_ANALYTIC = frozenset({"sin", "cos", "exp", "sinh", "cosh", "fact"})
_CONSTANTS = frozenset({"C", "c", "K", "k", "C_1", "c_1"})
_INTEGERS = frozenset("knml")
_PLAIN_LOG, _I = ("call", "log"), ("const", "i")


class Comparison(NamedTuple):
    """The outcome of a comparison, and the reason if the answers are not equal."""

    outcome: Outcome
    reason: str = ""


SAME = Comparison(EQUAL)


def compare_nodes(first: Node, second: Node) -> Comparison:
    """Compare two expressions, at several points if they have variables."""
    if first == second:
        return SAME
    if INFINITY in (first, second):
        return Comparison(DIFFERENT, "infinity and a number")
    names = find_variables(first) | find_variables(second)
    if not names:
        return _compare_parts(first, second, compare_numbers(first, second))
    renamed = _rename_constant(first, second)
    if renamed is not None:
        second = renamed
        names = find_variables(first) | find_variables(second)
    comparison = _compare_expressions(first, second, names)
    if comparison.outcome == DIFFERENT and _has_constant(first, second):
        return _compare_up_to_constant(first, second, names)
    return comparison


def _has_constant(*nodes: Node) -> bool:
    """Return whether both are sums with the same constant of integration."""
    constants = [
        {term[1] for term in node[1:] if term[0] == "var"} & _CONSTANTS if node[0] == "add" else set() for node in nodes
    ]
    return bool(constants[0] & constants[1])


def _compare_up_to_constant(first: Node, second: Node, names: frozenset[str]) -> Comparison:
    """Compare antiderivatives: their difference is the same at all points."""
    differences: list[tuple[Evaluation, Any]] = []
    for point in draw_points(names, get_seed(first, second), real=True):
        evaluation = Evaluation(PRECISIONS[0], point)
        try:
            value = evaluation.evaluate(("add", first, ("neg", second)))
        except (ArithmeticError, ValueError):
            continue
        if evaluation.is_real(value):
            differences.append((evaluation, value))
    same = [are_close(evaluation, differences[0][1], value) for evaluation, value in differences[1:]]
    if len(same) < POINTS - 1:
        return Comparison(UNDECIDED, "the expressions cannot be evaluated")
    return SAME if all(same) else Comparison(DIFFERENT, "another value")


def _compare_parts(first: Node, second: Node, comparison: Comparison) -> Comparison:
    """Return equality if undecided numbers are built alike from equal parts, such as two towers of powers."""
    if comparison.outcome != UNDECIDED or first[0] != second[0] or len(first) != len(second):
        return comparison
    parts = zip(first[1:], second[1:], strict=True)
    same = all(
        a == b or (isinstance(a, tuple) and isinstance(b, tuple) and compare_nodes(a, b).outcome == EQUAL)
        for a, b in parts
    )
    return SAME if same else comparison


def _rename_constant(first: Node, second: Node) -> Node | None:
    """Return *second* with the constant of integration named as in *first*, if only this name differs."""
    only_first, only_second = (
        find_variables(first) - find_variables(second),
        find_variables(second) - find_variables(first),
    )
    if len(only_first) != 1 or len(only_second) != 1:
        return None
    # The integer of a general solution, such as pi/4 + k pi.
    is_period = contains_node(first, ("const", "pi")) and contains_node(second, ("const", "pi"))
    if not only_first | only_second <= (_CONSTANTS | _INTEGERS if is_period else _CONSTANTS):
        return None
    return rename(second, *only_second, *only_first)


def rename(node: Node, old: str, new: str) -> Node:
    """Return *node* with another name for a variable."""
    return ("var", new) if node == ("var", old) else replace_children(node, lambda child: rename(child, old, new))


def compare_numbers(first: Node, second: Node) -> Comparison:
    """Compare two numbers: exactly if they are rational, else to the digits that are left."""
    outcome = _compare_at(first, second, {}, None)
    if outcome.outcome != EQUAL and (contains_node(first, _PLAIN_LOG) or contains_node(second, _PLAIN_LOG)):
        # `\\log` is the natural logarithm, or that to the base 10.
        decimal = _compare_at(first, second, {}, 10)
        return decimal if decimal.outcome == EQUAL else outcome
    return outcome


def _compare_at(first: Node, second: Node, point: Point, log_base: int | None) -> Comparison:
    result = Comparison(UNDECIDED, "too many digits cancel")
    for digits in PRECISIONS:
        evaluation = Evaluation(digits, point, log_base)
        values, failures = _evaluate_both(evaluation, first, second)
        if failures:
            result = _judge_failures(failures, first, second)
            if not any(isinstance(failure, Undecidable) for failure in failures):
                return result
        elif are_close(evaluation, *values):
            # Roots of long numbers can agree to more digits than the first precision has.
            if evaluation.height <= MAX_HEIGHT or digits == PRECISIONS[-1]:
                result = _judge_equality(evaluation, first, second)
                if result.outcome != UNDECIDED:
                    return result
        elif evaluation.lost <= MAX_LOST + digits - PRECISIONS[0]:
            if not evaluation.vanished or _is_ordinary(evaluation, values):
                return Comparison(DIFFERENT, "another value")
            result = Comparison(UNDECIDED, "the terms of a sum cancel")
    return result


def _evaluate_both(evaluation: Evaluation, first: Node, second: Node) -> tuple[list[Any], list[ArithmeticError]]:
    values: list[Any] = []
    failures: list[ArithmeticError] = []
    for node in (first, second):
        try:
            values.append(evaluation.evaluate(node))
        except ArithmeticError as error:
            failures.append(error)
        except ValueError as error:
            failures.append(Undefined(str(error)))
    return values, failures


def _judge_equality(evaluation: Evaluation, first: Node, second: Node) -> Comparison:
    """Return equality, if no term was too small to count; enormous integers are then compared by their remainders."""
    if not evaluation.absorbed and not evaluation.vanished:
        return SAME
    moduli = draw_moduli(get_seed(first, second))
    residues = compute_residues(first, moduli), compute_residues(second, moduli)
    if None not in residues:
        return SAME if residues[0] == residues[1] else Comparison(DIFFERENT, "another number")
    reason = "the terms of a sum cancel" if evaluation.vanished else "a term is too small beside the others"
    return Comparison(UNDECIDED, reason)


def _is_ordinary(evaluation: Evaluation, values: Sequence[Any]) -> bool:
    """Return whether one of two values is far larger than a sum that vanished can be."""
    return any(value and abs(evaluation.context.mag(evaluation.convert(value))) < VANISHING_DIGITS for value in values)


def _judge_failures(failures: Sequence[ArithmeticError], first: Node, second: Node) -> Comparison:
    if len(failures) == 1 and isinstance(failures[0], Undefined | TooLarge):
        return Comparison(DIFFERENT, f"only one has a value: {failures[0]}")
    if all(isinstance(failure, TooLarge) for failure in failures):
        moduli = draw_moduli(get_seed(first, second))
        residues = compute_residues(first, moduli), compute_residues(second, moduli)
        if None not in residues:
            return SAME if residues[0] == residues[1] else Comparison(DIFFERENT, "another number")
    return Comparison(UNDECIDED, str(failures[0]))


def are_close(evaluation: Evaluation, first: Any, second: Any) -> bool:
    """Return whether two values are equal: exactly if they are fractions, else relative to the digits that are left."""
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    context = evaluation.context
    first, second = evaluation.convert(first), evaluation.convert(second)
    difference, size = abs(first - second), max(abs(first), abs(second))
    if not difference:
        return True
    left = evaluation.digits - 6 - min(evaluation.lost, evaluation.digits - 20)
    return bool(difference <= size * context.mpf(10) ** -int(left))


def _compare_expressions(first: Node, second: Node, names: frozenset[str]) -> Comparison:
    strict = bool(names & {"z", "w"}) or contains_node(first, _I) or contains_node(second, _I)
    everywhere = strict or (_is_analytic(first) and _is_analytic(second))
    has_log = contains_node(first, _PLAIN_LOG) or contains_node(second, _PLAIN_LOG)
    result = Comparison(UNDECIDED, "the expressions cannot be evaluated")
    for base in (None, 10) if has_log else (None,):
        points = draw_points(names, get_seed(first, second), real=not everywhere)
        if not everywhere:
            points = itertools.chain(points, _draw_kinks(names, first, second))
        result = _compare_at_points(first, second, points, strict, base)
        if result.outcome == EQUAL:
            return result
    if result.outcome == UNDECIDED and contains(("", first, second), "call", "open"):
        # Sums and binomial coefficients are defined for integers.
        return _compare_at_points(first, second, _draw_integers(names, get_seed(first, second)), strict, None)
    return result


def _draw_integers(names: frozenset[str], seed: str) -> Iterator[Point]:
    rng = random.Random(seed)
    for highest in range(6, 6 + 4 * _TRIES, 4):
        yield {name: Fraction(rng.randrange(highest // 2, highest)) for name in sorted(names)}


def _draw_kinks(names: frozenset[str], first: Node, second: Node) -> Iterator[Point]:
    """Yield points beside large constants, where a function such as |x - 20000| has a kink."""
    constants = {
        abs(value) for value in (*_find_constants(first), *_find_constants(second)) if abs(value) > _SCALES[-3]
    }
    for constant in sorted(constants)[: MAX_KINKS // 2]:
        for step in (Fraction(-1, 3), Fraction(1, 3)):
            yield {name: constant + step * number for number, name in enumerate(sorted(names), 1)}


def _find_constants(node: Node) -> Iterator[Fraction]:
    if node[0] == "num":
        yield node[1]
    for child in get_children(node):
        yield from _find_constants(child)


def get_seed(first: Node, second: Node) -> str:
    """Return the seed of the points at which two expressions are compared; their order does not matter."""
    return " ".join(sorted((write_node(first), write_node(second))))


def _compare_at_points(
    first: Node, second: Node, points: Iterable[Point], strict: bool, log_base: int | None
) -> Comparison:
    equal, undecided = 0, Comparison(UNDECIDED, "the expressions cannot be evaluated")
    enough = POINTS if _is_analytic(first) and _is_analytic(second) else _TRIES + MAX_KINKS
    for point in points:
        comparison = _compare_at(first, second, point, log_base)
        if comparison.outcome == DIFFERENT:
            if not strict and _is_outside_both(first, second, point):
                continue
            return comparison
        if comparison.outcome == UNDECIDED:
            undecided = comparison
            continue
        equal += 1
        if equal == enough:
            return SAME
    return SAME if equal > 1 else undecided


def _is_outside_both(first: Node, second: Node, point: Point) -> bool:
    """Return whether two functions of real variables are both not real at a real point: neither is defined there."""
    if not all(isinstance(value, Fraction) for value in point.values()):
        return False
    evaluation = Evaluation(PRECISIONS[0], point)
    try:
        return not any(evaluation.is_real(evaluation.evaluate(node)) for node in (first, second))
    except (ArithmeticError, ValueError):
        return False


def _is_analytic(node: Node) -> bool:
    """Return whether the expression is built of sums, products, integer powers and functions without branches."""
    if node[0] == "call" and node[1] not in _ANALYTIC:
        return not find_variables(node)
    if node[0] == "pow" and not (node[2][0] == "num" and node[2][1].denominator == 1) and find_variables(node[1]):
        return False
    return all(map(_is_analytic, get_children(node)))


def draw_points(names: frozenset[str], seed: str, *, real: bool) -> Iterator[Point]:
    """Yield points: positive ones in turn with any others. The second is negative, the third complex unless *real*."""
    rng = random.Random(seed)
    ordered = sorted(names)
    for number in range(_TRIES):
        signs = [1 if number % 2 == 0 else -1 if number == 1 else rng.choice((-1, 1)) for _ in ordered]
        # A kink or a step of a function of real numbers can lie anywhere.
        scale, divisor = _SCALES[number], 1 if number == _WHOLE else _DENOMINATOR
        values = [
            sign * Fraction(rng.randrange(200, scale * _DENOMINATOR) // (_DENOMINATOR // divisor), divisor)
            for sign in signs
        ]
        point: dict[str, Any] = dict(zip(ordered, values, strict=True))
        if not real and number == 2:  # noqa: PLR2004 -- within the four that decide
            context = get_context(PRECISIONS[0])
            point = {name: context.mpc(float(value), rng.uniform(0.2, 1.5)) for name, value in point.items()}
        yield point
