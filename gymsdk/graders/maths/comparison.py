"""Decide whether two answers are equal: first by kind, then part by part."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

from gymsdk.graders.maths.description import describe
from gymsdk.graders.maths.equality import (
    DIFFERENT,
    EQUAL,
    POINTS,
    SAME,
    UNDECIDED,
    Comparison,
    are_close,
    compare_nodes,
    draw_points,
    get_seed,
    rename,
)
from gymsdk.graders.maths.interpretation import contains_point
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
from gymsdk.graders.maths.parser import FLIPPED, ONE, ZERO, Node, get_children, negate, replace_children, write_node
from gymsdk.graders.maths.reals import convert_to_reals
from gymsdk.graders.maths.units import NO_UNIT, find_unit
from gymsdk.graders.maths.values import Evaluation, contains, contains_node, find_variables

MAX_SETS = 8
MAX_ITEMS = 30
"""Larger collections are compared by normal forms, because the time to compare pairs grows with the square."""


def compare(first: Answer, second: Answer) -> Comparison:
    """Compare two answers. The order of the arguments does not matter."""
    if first == second:
        return SAME
    if _has_other_name(first, second) or _has_other_name(second, first):
        return Comparison(DIFFERENT, "another variable")
    first, second = _unwrap(first, second)
    for kind, other, compare_kinds in _PAIRS:
        if isinstance(first, kind) and isinstance(second, other):
            return compare_kinds(first, second)
        if isinstance(second, kind) and isinstance(first, other):
            return compare_kinds(second, first)
    return Comparison(DIFFERENT, f"{first.kind} and {second.kind}")


def _has_other_name(answer: Answer, other: Answer) -> bool:
    """Return whether an item of a list has another name than the answer that it is compared with."""
    if not isinstance(answer, Assignment) or not isinstance(other, Collection):
        return False
    return any(isinstance(item, Assignment) and item.name != answer.name for item in other.items)


def _unwrap(first: Answer, second: Answer) -> tuple[Answer, Answer]:
    """Return the answers without a name or a set around a single value, if only one answer has it."""
    if isinstance(first, Assignment) and isinstance(second, Equation):
        first = _to_equation(first) or first
    elif isinstance(second, Assignment) and isinstance(first, Equation):
        second = _to_equation(second) or second
    elif isinstance(first, Assignment) and isinstance(second, Assignment):
        # An equation can be solved for either variable.
        if first.name != second.name and (first.name in _find_names(second) or second.name in _find_names(first)):
            first, second = _to_equation(first) or first, _to_equation(second) or second
    elif isinstance(first, Assignment) != isinstance(second, Assignment):
        first = first.value if isinstance(first, Assignment) else first
        second = second.value if isinstance(second, Assignment) else second
    return _unwrap_single(first, second), _unwrap_single(second, first)


def _unwrap_single(answer: Answer, other: Answer) -> Answer:
    if not isinstance(answer, Collection) or isinstance(other, Reals):
        return answer
    if isinstance(other, Collection):
        is_point = answer.kind == "set" and len(answer.items) == 1 and other.kind == "tuple"
        return answer.items[0] if is_point and isinstance(answer.items[0], Collection) else answer
    if answer.kind == "tuple" or not answer.items:
        return answer
    # "1/2 or 0.5" is one answer in two notations.
    same = all(compare(answer.items[0], item).outcome == EQUAL for item in answer.items[1:MAX_ITEMS])
    return answer.items[0] if same else answer


def _find_names(answer: Assignment) -> frozenset[str]:
    return find_variables(answer.value.node) if isinstance(answer.value, Scalar) else frozenset()


def _to_equation(answer: Assignment) -> Equation | None:
    if not isinstance(answer.value, Scalar) or answer.value.kind == "infinity":
        return None
    return Equation(("var", answer.name.partition("(")[0]), answer.value.node)


# Kinds


def _compare_scalars(first: Scalar, second: Scalar) -> Comparison:
    if "infinity" in (first.kind, second.kind):
        return Comparison(DIFFERENT, "another infinity, or a number")
    for mark in ("pct", "deg"):
        if contains(first.node, mark) != contains(second.node, mark):
            return _compare_marked(first.node, second.node, mark)
    return compare_nodes(first.node, second.node)


def _compare_marked(first: Node, second: Node, mark: str) -> Comparison:
    """Compare where only one side has percent or degrees: by value, or with the sign left out."""
    by_value = compare_nodes(first, second)
    if by_value.outcome == EQUAL or (mark == "deg" and (contains_node(first, _PI) or contains_node(second, _PI))):
        return by_value
    return compare_nodes(_drop(first, mark), _drop(second, mark))


_PI = ("const", "pi")


def _drop(node: Node, kind: str) -> Node:
    """Return *node* without percent or degrees: percent of the whole only, degrees also in a sum or product."""
    if node[0] == kind:
        return _drop(node[1], kind)
    if kind == "pct" or node[0] in ("call", "pow"):
        return node
    return replace_children(node, lambda child: _drop(child, kind))


def _compare_quantities(first: Quantity, second: Quantity) -> Comparison:
    if first.unit.powers == second.unit.powers:
        factor = ("num", first.unit.factor / second.unit.factor)
        return compare_nodes(("mul", first.node, factor) if factor[1] != 1 else first.node, second.node)
    words = [{base for base, _ in quantity.unit.powers} for quantity in (first, second)]
    if first.unit.is_count and second.unit.is_count and (words[0] <= words[1] or words[1] <= words[0]):
        return compare_nodes(first.node, second.node)
    return Comparison(DIFFERENT, "another unit")


def _compare_quantity_with_number(quantity: Quantity, number: Scalar) -> Comparison:
    if number.kind == "infinity":
        return Comparison(DIFFERENT, "a quantity and infinity")
    node = number.node
    if contains(node, "pct", "deg"):
        if quantity.unit != find_unit("rad"):
            return Comparison(DIFFERENT, "another unit")
        return compare_nodes(quantity.node, node)
    if find_variables(node) - find_variables(quantity.node):
        # "5 m/s" in plain text: the letters are units if the other answer has these units.
        written = _read_quantity(node)
        return _OTHER_UNIT if written is None else _compare_quantities(quantity, written)
    return compare_nodes(quantity.node, node)


_OTHER_UNIT = Comparison(DIFFERENT, "a quantity and an expression")


def _read_quantity(node: Node) -> Quantity | None:
    """Return a product of a number and of letters that are units as a quantity, else `None`."""
    if node[0] == "var":
        unit = find_unit(node[1])
        return None if unit is None else Quantity(ONE, unit)
    if not find_variables(node):
        return Quantity(node, NO_UNIT)
    parts = [_read_quantity(part) for part in node[1:]] if node[0] in ("mul", "div") else []
    if node[0] == "pow" and node[2][0] == "num" and node[2][1].denominator == 1:
        base = _read_quantity(node[1])
        return None if base is None or base.node != ONE else Quantity(ONE, base.unit.raise_to(int(node[2][1])))
    known = [part for part in parts if part is not None]
    if not parts or len(known) < len(parts):
        return None
    unit = known[0].unit
    for part in known[1:]:
        unit = unit * part.unit.raise_to(-1 if node[0] == "div" else 1)
    return Quantity((node[0], *(part.node for part in known)), unit)


def _compare_words(first: Words, second: Words) -> Comparison:
    return SAME if first.text == second.text else Comparison(DIFFERENT, "other words")


def _compare_words_with_name(words: Words, scalar: Scalar) -> Comparison:
    if scalar.node[0] == "var" and str(scalar.node[1]).casefold() == words.text:
        return SAME
    return Comparison(DIFFERENT, f"words and {scalar.kind}")


def _compare_set_expressions(first: SetExpression, second: SetExpression) -> Comparison:
    names = sorted(
        {name.removesuffix("'") for name in find_variables(first.node) | find_variables(second.node)} - {"c"}
    )
    if len(names) > MAX_SETS:
        return Comparison(DIFFERENT, "too many sets")
    for chosen in itertools.product((False, True), repeat=len(names)):
        inside = frozenset(itertools.compress(names, chosen))
        if contains_point(first.node, inside) != contains_point(second.node, inside):
            return Comparison(DIFFERENT, "another set")
    return SAME


def _compare_letters(first: Letter, second: Letter) -> Comparison:
    if first.letter != second.letter:
        return Comparison(DIFFERENT, "another letter")
    if first.beside is None or second.beside is None:
        return SAME
    return compare(first.beside, second.beside)


def _compare_letter_with_answer(letter: Letter, answer: Answer) -> Comparison:
    if letter.beside is not None:
        return compare(letter.beside, answer)
    if isinstance(answer, Scalar) and answer.node[0] == "var" and answer.node[1].upper() == letter.letter:
        return SAME
    return Comparison(DIFFERENT, f"a letter and {answer.kind}")


def _compare_bases(first: BaseNumber, second: BaseNumber) -> Comparison:
    if first.base != second.base:
        return Comparison(DIFFERENT, "another base")
    return SAME if _trim(first.digits) == _trim(second.digits) else Comparison(DIFFERENT, "other digits")


def _trim(digits: str) -> str:
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def _compare_clocks(first: Clock, second: Clock) -> Comparison:
    if (first.half and second.half) or not (first.half or second.half):
        same = _count_seconds(first) == _count_seconds(second) and first.half == second.half
    else:
        with_half, without = (first, second) if first.half else (second, first)
        in_day = _count_seconds(without) == _count_seconds(with_half) + 43200 * _is_shifted(with_half)
        same = _count_seconds(with_half) == _count_seconds(without) or in_day
    return SAME if same else Comparison(DIFFERENT, "another time")


def _count_seconds(clock: Clock) -> int:
    hours, minutes, seconds = (*clock.numbers, 0)[:3]
    return 3600 * hours + 60 * minutes + seconds


def _is_shifted(clock: Clock) -> int:
    """Return 1 if the time is twelve hours later by a clock of 24 hours, -1 if it is midnight, else 0."""
    if clock.half == "pm":
        return 0 if clock.numbers[0] == 12 else 1  # noqa: PLR2004 -- noon
    return -1 if clock.numbers[0] == 12 else 0  # noqa: PLR2004 -- midnight


def _compare_ratios(first: Ratio, second: Ratio) -> Comparison:
    if len(first.parts) != len(second.parts):
        return Comparison(DIFFERENT, "another number of parts")
    pairs = list(zip(first.parts, second.parts, strict=True))
    crossed = [compare_nodes(("mul", a, pairs[0][1]), ("mul", b, pairs[0][0])) for a, b in pairs[1:]]
    return _join(crossed)


def _compare_ratio_with_number(ratio: Ratio, number: Scalar) -> Comparison:
    if len(ratio.parts) != 2 or number.kind == "infinity":  # noqa: PLR2004 -- a fraction
        return Comparison(DIFFERENT, "a ratio and a number")
    return compare_nodes(("div", *ratio.parts), number.node)


def _compare_residues(first: Residue, second: Residue) -> Comparison:
    modulus = compare_nodes(first.modulus, second.modulus)
    if modulus.outcome != EQUAL:
        return Comparison(modulus.outcome, "another modulus")
    if compare_nodes(first.node, second.node).outcome == EQUAL:
        return SAME
    if find_variables(first.node) or find_variables(second.node):
        return Comparison(DIFFERENT, "another residue")
    try:
        evaluation = Evaluation(PRECISIONS[0])
        quotient = evaluation.evaluate(("div", ("add", first.node, negate(second.node)), first.modulus))
    except ArithmeticError:
        return Comparison(UNDECIDED, "the residues cannot be evaluated")
    congruent = isinstance(quotient, Fraction) and quotient.denominator == 1
    return SAME if congruent else Comparison(DIFFERENT, "another residue")


def _compare_residue_with_number(residue: Residue, number: Scalar) -> Comparison:
    if find_variables(residue.modulus) or find_variables(residue.node):
        return Comparison(DIFFERENT, "a residue class and a number")
    # A number is the residue class only if it is the remainder.
    remainder = ("call", "floor", ("div", residue.node, residue.modulus))
    if compare_nodes(remainder, ZERO).outcome != EQUAL:
        return Comparison(DIFFERENT, "a residue class and a number")
    return compare(Scalar(residue.node, "number"), number)


def _compare_matrices(first: Matrix, second: Matrix) -> Comparison:
    shapes = [[len(row) for row in matrix.rows] for matrix in (first, second)]
    if shapes[0] != shapes[1]:
        return Comparison(DIFFERENT, "another shape")
    cells = zip((c for row in first.rows for c in row), (c for row in second.rows for c in row), strict=True)
    return _join(compare(a, b) for a, b in cells)


def _compare_piecewise(first: Piecewise, second: Piecewise) -> Comparison:
    if len(first.rows) != len(second.rows):
        return Comparison(DIFFERENT, "another number of cases")
    left = list(second.rows)
    for value, condition in first.rows:
        found = next((row for row in left if _is_same_condition(condition, row[1])), None)
        if found is None and len(left) == 1 and Words("otherwise") in (condition, left[0][1]):
            found = left[0]
        if found is None:
            return Comparison(DIFFERENT, "another condition")
        left.remove(found)
        comparison = compare(value, found[0])
        if comparison.outcome != EQUAL:
            return comparison
    return SAME


def _is_same_condition(first: Answer, second: Answer) -> bool:
    return compare(first, second).outcome == EQUAL


def _compare_matrix_with_tuple(matrix: Matrix, answer: Collection) -> Comparison:
    if answer.kind != "tuple" or (len(matrix.rows) > 1 and len(matrix.rows[0]) > 1):
        return Comparison(DIFFERENT, f"a matrix and a {answer.kind}")
    cells = tuple(cell for row in matrix.rows for cell in row)
    return _compare_in_order(cells, answer.items)


def _compare_collections(first: Collection, second: Collection) -> Comparison:
    kinds = {first.kind, second.kind}
    if kinds == {"tuple"}:
        are_intervals = set(first.brackets + second.brackets) <= set("[]()")
        if len(first.items) == len(second.items) == 2 and first.brackets != second.brackets and are_intervals:  # noqa: PLR2004
            return Comparison(DIFFERENT, "other ends of an interval, or a point")
        return _compare_in_order(first.items, second.items)
    if kinds == {"tuple", "set"}:
        return Comparison(DIFFERENT, "a tuple and a set")
    if "tuple" in kinds and {"()", "<<>>"}.isdisjoint({first.brackets, second.brackets}):
        return Comparison(DIFFERENT, "an interval and a list")
    if "tuple" in kinds or (kinds == {"list"} and _has_order(first) and _has_order(second)):
        return _compare_in_order(first.items, second.items)
    if _has_names(first) != _has_names(second):
        # The names of one side and the values of the other are in one order.
        return _compare_in_order(first.items, second.items)
    return _compare_without_order(first.items, second.items, repeats=kinds == {"list"})


def _has_names(answer: Collection) -> bool:
    return len({item.name for item in answer.items if isinstance(item, Assignment)}) > 1


def _has_order(answer: Collection) -> bool:
    """Return whether the items are names or letters: a list of three or more is an order."""
    return len(answer.items) > 2 and all(isinstance(item, Words | Letter) for item in answer.items)  # noqa: PLR2004


def _compare_in_order(first: Sequence[Answer], second: Sequence[Answer]) -> Comparison:
    if len(first) != len(second):
        return Comparison(DIFFERENT, "another number of items")
    return _join(compare(a, b) for a, b in zip(first, second, strict=True))


def _compare_without_order(first: Sequence[Answer], second: Sequence[Answer], *, repeats: bool) -> Comparison:
    """Compare sets; with *repeats* lists, in which an item that occurs twice counts twice."""
    if not repeats:
        first, second = _remove_repeats(first), _remove_repeats(second)
    if len(first) != len(second):
        return Comparison(DIFFERENT, "another number of items")
    if len(first) > MAX_ITEMS:
        same = Counter(map(describe, first)) == Counter(map(describe, second))
        return SAME if same else Comparison(DIFFERENT, "other items")
    left, undecided = list(second), False
    for item in first:
        outcomes = [compare(item, other).outcome for other in left]
        if EQUAL in outcomes:
            left.pop(outcomes.index(EQUAL))
        elif UNDECIDED in outcomes:
            undecided = True
        else:
            return Comparison(DIFFERENT, "an item is missing")
    return Comparison(UNDECIDED, "an item cannot be compared") if undecided else SAME


def _remove_repeats(items: Sequence[Answer]) -> list[Answer]:
    return list(dict.fromkeys(items))


def _compare_reals(first: Reals, second: Reals) -> Comparison:
    if len(first.intervals) != len(second.intervals):
        return Comparison(DIFFERENT, "another set of real numbers")
    return _join(map(_compare_intervals, first.intervals, second.intervals))


def _compare_intervals(first: Interval, second: Interval) -> Comparison:
    if (first.has_low, first.has_high) != (second.has_low, second.has_high):
        return Comparison(DIFFERENT, "an end is open on one side only")
    outcomes = []
    for end, other in ((first.low, second.low), (first.high, second.high)):
        if (end is None) != (other is None):
            return Comparison(DIFFERENT, "an interval is endless on one side only")
        if end is not None and other is not None:
            outcomes.append(compare_nodes(end, other))
    return _join(outcomes)


def _compare_reals_with_collection(reals: Reals, answer: Collection) -> Comparison:
    converted = convert_to_reals(answer)
    if converted is None:
        return Comparison(DIFFERENT, f"a set of real numbers and a {answer.kind}")
    return _compare_reals(reals, converted)


def _compare_assignments(first: Assignment, second: Assignment) -> Comparison:
    functions = [answer.name.removesuffix("(...)") for answer in (first, second)]
    are_functions = [answer.name.endswith("(...)") for answer in (first, second)]
    if first.name != second.name and not (any(are_functions) and "y" in functions):
        return Comparison(DIFFERENT, "another variable")
    value = second.value
    if len(first.arguments) == len(second.arguments) == 1 and all(are_functions) and isinstance(value, Scalar):
        # f(x) = x and f(y) = y are the same function.
        value = Scalar(rename(value.node, *second.arguments, *first.arguments), value.kind)
    return compare(first.value, value)


def _compare_equations(first: Equation, second: Equation) -> Comparison:
    sides = [("add", equation.left, negate(equation.right)) for equation in (first, second)]
    is_solved = [equation.left[0] == "var" and not find_variables(equation.right) for equation in (first, second)]
    if is_solved[0] != is_solved[1]:
        return Comparison(DIFFERENT, "only one of the equations is solved")
    comparison = _compare_ratio_of_sides(sides[0], sides[1], positive=False)
    if comparison.outcome == DIFFERENT:
        for equation, other in ((first, sides[1]), (second, sides[0])):
            if equation.left[0] == "var" and equation.left[1] not in find_variables(equation.right):
                return SAME if _solves(equation.left[1], equation.right, other) else comparison
    return comparison


def _solves(name: str, value: Node, side: Node) -> bool:
    """Return whether *side* is zero exactly where the variable has the value: it is linear in it, or its inverse."""
    names = (find_variables(side) | find_variables(value)) - {name}
    found = 0
    signs: set[bool] = set()
    for point in draw_points(names, get_seed(value, side), real=True):
        try:
            evaluation = Evaluation(PRECISIONS[0], point)
            root = evaluation.evaluate(value)
            at_root, *others = [
                Evaluation(PRECISIONS[0], {**point, name: root + step}).evaluate(side) for step in (0, 1, 2, 3)
            ]
            steps = [evaluation.convert(b) - evaluation.convert(a) for a, b in itertools.pairwise(others)]
            signs.add(evaluation.is_negative(steps[0]))
            if at_root or not steps[0] or not are_close(evaluation, *steps):
                return False
        except (ArithmeticError, ValueError):
            continue
        found += 1
    # Where the factor before the variable can be zero, the equation has more solutions, unless the value has a pole.
    return found > 1 and (len(signs) == 1 or _has_pole(value))


def _has_pole(node: Node) -> bool:
    if node[0] == "div" and find_variables(node[2]):
        return True
    return (node[0] == "pow" and node[2][0] == "neg") or any(map(_has_pole, get_children(node)))


def _compare_relations(first: Relation, second: Relation) -> Comparison:
    parts = first.parts, second.parts
    if len(parts[0]) != len(parts[1]):
        return Comparison(DIFFERENT, "another chain of relations")
    if any(isinstance(part, str) and part not in FLIPPED for part in (*parts[0][1::2], *parts[1][1::2])):
        return SAME if parts[0] == parts[1] else Comparison(DIFFERENT, "another relation")
    parts = _sort_equal(parts[0]), _sort_equal(parts[1])
    straight = _compare_chains(parts[0], parts[1])
    if straight.outcome == EQUAL:
        return straight
    turned = _sort_equal(tuple(FLIPPED[part] if isinstance(part, str) else part for part in reversed(parts[1])))
    reversed_outcome = _compare_chains(parts[0], turned)
    if reversed_outcome.outcome == EQUAL or len(parts[0]) > 3:  # noqa: PLR2004 -- one relation
        return reversed_outcome
    return _compare_inequalities(parts[0], parts[1])


def _sort_equal(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a chain with the parts between which "=" stands in one order."""
    sides, operators = list(parts[::2]), list(parts[1::2])
    start = 0
    for end in range(1, len(sides) + 1):
        if end == len(sides) or operators[end - 1] != "=":
            sides[start:end] = sorted(sides[start:end], key=write_node)
            start = end
    chain = [sides[0]]
    for operator, side in zip(operators, sides[1:], strict=True):
        chain += [operator, side]
    return tuple(chain)


def _compare_chains(first: Sequence[Any], second: Sequence[Any]) -> Comparison:
    if first[1::2] != second[1::2]:
        return Comparison(DIFFERENT, "another relation")
    pairs = zip(first[::2], second[::2], strict=True)
    return _join(SAME if a == b else compare_nodes(a, b) if "words" not in (a[0], b[0]) else _OTHER for a, b in pairs)


_OTHER = Comparison(DIFFERENT, "another part of a relation")


def _compare_inequalities(first: Sequence[Any], second: Sequence[Any]) -> Comparison:
    if "words" in (first[0][0], first[2][0], second[0][0], second[2][0]):
        return _OTHER
    sides = []
    for left, operator, right in (first, second):
        if operator[0] == ">":
            sides.append((FLIPPED[operator], ("add", right, negate(left))))
        else:
            sides.append((operator, ("add", left, negate(right))))
    if sides[0][0] != sides[1][0]:
        return Comparison(DIFFERENT, "another relation")
    return _compare_ratio_of_sides(sides[0][1], sides[1][1], positive=sides[0][0] != "!=")


def _compare_ratio_of_sides(first: Node, second: Node, *, positive: bool) -> Comparison:
    """Compare two expressions up to a constant factor: that of equations, or a positive one of inequalities."""
    names = find_variables(first) | find_variables(second)
    points = draw_points(names, get_seed(first, second), real=True)
    known: Any = None
    found = 0
    for point in points:
        try:
            evaluation = Evaluation(PRECISIONS[0], point)
            above, below = evaluation.evaluate(first), evaluation.evaluate(second)
            if not above or not below:
                if bool(above) != bool(below):
                    return Comparison(DIFFERENT, "another equation")
                continue
            ratio = evaluation.evaluate(("div", ("value", above), ("value", below)))
            if positive and evaluation.is_negative(ratio):
                return Comparison(DIFFERENT, "the inequality points the other way")
            if known is not None and not are_close(evaluation, known, ratio):
                return Comparison(DIFFERENT, "another equation")
        except (ArithmeticError, ValueError):
            continue
        known, found = ratio, found + 1
        if found == POINTS:
            return SAME
    return Comparison(UNDECIDED, "the equations cannot be evaluated")


def _join(comparisons: Iterable[Comparison]) -> Comparison:
    """Return a difference if there is any, else an undecided comparison, else equality."""
    result = SAME
    for comparison in comparisons:
        if comparison.outcome == DIFFERENT:
            return comparison
        if comparison.outcome == UNDECIDED:
            result = comparison
    return result


_PAIRS: tuple[tuple[type, Any, Callable[..., Comparison]], ...] = (
    (Scalar, Scalar, _compare_scalars),
    (Quantity, Quantity, _compare_quantities),
    (Quantity, Scalar, _compare_quantity_with_number),
    (Words, Words, _compare_words),
    (Words, Scalar, _compare_words_with_name),
    (SetExpression, SetExpression, _compare_set_expressions),
    (Letter, Letter, _compare_letters),
    (Letter, object, _compare_letter_with_answer),
    (BaseNumber, BaseNumber, _compare_bases),
    (Clock, Clock, _compare_clocks),
    (Ratio, Ratio, _compare_ratios),
    (Ratio, Scalar, _compare_ratio_with_number),
    (Residue, Residue, _compare_residues),
    (Residue, Scalar, _compare_residue_with_number),
    (Matrix, Matrix, _compare_matrices),
    (Piecewise, Piecewise, _compare_piecewise),
    (Matrix, Collection, _compare_matrix_with_tuple),
    (Collection, Collection, _compare_collections),
    (Reals, Reals, _compare_reals),
    (Reals, Collection, _compare_reals_with_collection),
    (Assignment, Assignment, _compare_assignments),
    (Equation, Equation, _compare_equations),
    (Relation, Relation, _compare_relations),
)
