"""Sets of real numbers: read intervals, unions and inequalities, and bring them into one form."""

from __future__ import annotations

from collections.abc import Sequence

from gymsdk.graders.maths.equality import EQUAL, compare_numbers
from gymsdk.graders.maths.kinds import ALL_REALS, Answer, Collection, Interval, Reals, Scalar
from gymsdk.graders.maths.lexer import Unreadable
from gymsdk.graders.maths.parser import FLIPPED, INFINITY, Node, negate
from gymsdk.graders.maths.values import Evaluation, check_expression, find_variables

INEQUALITIES = frozenset({"<", "<=", ">", ">=", "!="})
_LEFT, _RIGHT = {"(": False, "[": True}, {")": False, "]": True}
_ENDLESS = (INFINITY, ("neg", INFINITY))


def try_reals(node: Node) -> Reals | None:
    """Return the set of real numbers that *node* describes, or `None`."""
    try:
        return read_reals(node)
    except (Unreadable, ArithmeticError):
        return None


def read_reals(node: Node) -> Reals:
    """Return the set of real numbers that *node* describes.

    Raises:
        Unreadable: It describes none.
    """
    if node == ("var", "set R"):
        return ALL_REALS
    read = {
        "group": _read_interval,
        "set": _read_points,
        "setop": _read_union,
        "rel": _read_relation,
        "list": _read_relations,
        "builder": _read_builder,
        "add": _read_difference,
    }.get(node[0])
    if read is None:
        raise Unreadable("no set of real numbers")
    return read(node)


def _read_interval(node: Node) -> Reals:
    opening, closing, *ends = node[1:]
    if len(ends) != 2 or opening not in _LEFT or closing not in _RIGHT:  # noqa: PLR2004 -- an interval has two ends
        raise Unreadable("no interval")
    if ends[0] == INFINITY or ends[1] == ("neg", INFINITY):
        raise Unreadable("the ends of an interval are in the wrong order")
    low, high = (None if end in _ENDLESS else end for end in ends)
    if (low is None and _LEFT[opening]) or (high is None and _RIGHT[closing]):
        raise Unreadable("an interval is closed at infinity")
    for end in (low, high):
        if end is not None:
            check_expression(end)
    return normalise_reals(
        [Interval(low, high, low is not None and _LEFT[opening], high is not None and _RIGHT[closing])]
    )


def _read_points(node: Node) -> Reals:
    for item in node[1:]:
        check_expression(item)
    return normalise_reals([Interval(item, item, True, True) for item in node[1:]])


def _read_union(node: Node) -> Reals:
    return _combine(node[1], read_reals(node[2]), read_reals(node[3]))


def _read_difference(node: Node) -> Reals:
    r"""Read `\\mathbb{R} - \\{0\\}`."""
    if len(node) != 3 or node[1] != ("var", "set R") or node[2][0] != "neg" or node[2][1][0] != "set":  # noqa: PLR2004
        raise Unreadable("no set of real numbers")
    return _combine("minus", ALL_REALS, _read_points(node[2][1]))


def _read_relation(node: Node) -> Reals:
    if node[2] == "=" and len(node) == 4 and node[1][0] == "var":  # noqa: PLR2004 -- "x = 5"
        return _read_points(("set", node[3]))
    return _solve(node)


def _read_relations(node: Node) -> Reals:
    """Read "x < 1 or x > 2", and "x > 1 and x < 2" or "x > 1, x < 2"."""
    separators, items = node[1], node[2:]
    if len(find_variables(node)) > 1 and all(item[0] == "rel" for item in items):
        raise Unreadable("inequalities of several variables")
    joined = _join(separators, items)
    if not joined.intervals and set(separators) == {","}:
        # Both cannot hold: "k < 0, k > 4" means one or the other.
        return _join(("or",) * len(separators), items)
    return joined


def _join(separators: Sequence[str], items: Sequence[Node]) -> Reals:
    joined = read_reals(items[0])
    for separator, item in zip(separators, items[1:], strict=True):
        is_union = separator == "or" or (separator == "," and "or" in separators)
        joined = _combine("cup" if is_union else "cap", joined, read_reals(item))
    return joined


def _read_builder(node: Node) -> Reals:
    head, condition = node[1], node[2]
    if head[0] == "rel" and head[2] == "in" and head[3] == ("var", "set R"):
        head = head[1]
    if head[0] != "var" or find_variables(condition) != {head[1]}:
        raise Unreadable("no set of real numbers")
    return read_reals(condition)


def convert_to_reals(answer: Answer) -> Reals | None:
    """Return an answer as a set of real numbers, if it can be one: a pair is an interval, a finite set its points."""
    if isinstance(answer, Reals):
        return answer
    if not isinstance(answer, Collection) or not all(isinstance(item, Scalar) for item in answer.items):
        return None
    nodes = [item.node for item in answer.items if isinstance(item, Scalar)]
    if answer.kind == "set":
        return try_reals(("set", *nodes))
    if answer.kind == "tuple" and len(answer.brackets) == 2:  # noqa: PLR2004 -- one character at each end
        return try_reals(("group", *answer.brackets, *nodes))
    return None


def _solve(node: Node) -> Reals:
    """Read inequalities of one variable, also a chain of two."""
    variables = find_variables(node)
    if len(variables) != 1:
        raise Unreadable("an inequality of several variables")
    (name,) = variables
    if node[2] in ("in", "notin"):
        if node[1] != ("var", name):
            raise Unreadable("no variable")
        inside = read_reals(node[3])
        return inside if node[2] == "in" else _complement(inside)
    joined = ALL_REALS
    for left, operator, right in zip(node[1::2], node[2::2], node[3::2], strict=False):
        if operator not in INEQUALITIES:
            raise Unreadable("no inequality")
        joined = _combine("cap", joined, _solve_simple(left, operator, right, name))
    return joined


def _solve_simple(left: Node, operator: str, right: Node, name: str) -> Reals:
    """Read an inequality with the variable alone on one side: any other is a problem, not its solution."""
    if left in _ENDLESS or right in _ENDLESS:
        return ALL_REALS
    check_expression(left)
    check_expression(right)
    if left == ("var", name) and name not in find_variables(right):
        return _cut(operator, right)
    if right == ("var", name) and name not in find_variables(left):
        return _cut(FLIPPED[operator], left)
    if right == ("call", "abs", ("var", name)):
        left, operator, right = right, FLIPPED[operator], left
    if left == ("call", "abs", ("var", name)) and name not in find_variables(right):
        parts = _cut(operator, right), _cut(FLIPPED[operator], negate(right))
        return _combine("cup" if operator.startswith(">") else "cap", *parts)
    raise Unreadable("the inequality is not solved")


def _cut(operator: str, end: Node) -> Reals:
    if operator == "!=":
        return Reals((Interval(None, end), Interval(end, None)))
    closed = operator.endswith("=")
    if operator.startswith("<"):
        return Reals((Interval(None, end, False, closed),))
    return Reals((Interval(end, None, closed, False),))


def _order(first: Node, second: Node) -> int:
    """Return -1, 0 or 1 as the first number is less than, equal to or greater than the second.

    Raises:
        Unreadable: They have no order, because they have variables or are not real.
    """
    if first == second:
        return 0
    if find_variables(first) or find_variables(second):
        raise Unreadable("the ends of an interval have variables")
    if compare_numbers(first, second).outcome == EQUAL:
        return 0
    evaluation = Evaluation(60)
    values = [evaluation.evaluate(end) for end in (first, second)]
    if not all(map(evaluation.is_real, values)):
        raise Unreadable("the ends of an interval are not real")
    return -1 if evaluation.is_negative(evaluation.evaluate(("add", first, negate(second)))) else 1


def normalise_reals(intervals: Sequence[Interval]) -> Reals:
    """Return the union of *intervals* in ascending order, joined where they touch.

    Raises:
        Unreadable: The ends have no order, and there is more than one interval.
    """
    kept = [each for each in intervals if not _is_empty(each)]
    if len(kept) < 2:  # noqa: PLR2004 -- nothing to order
        return Reals(tuple(kept))
    ordered: list[Interval] = []
    for interval in kept:
        at = next((i for i, other in enumerate(ordered) if _starts_before(interval, other)), len(ordered))
        ordered.insert(at, interval)
    joined = [ordered[0]]
    for interval in ordered[1:]:
        last = joined[-1]
        if not _touches(last, interval):
            joined.append(interval)
        elif last.high is not None and (interval.high is None or _order(last.high, interval.high) < 0):
            joined[-1] = last._replace(high=interval.high, has_high=interval.has_high)
        elif last.high is not None and interval.high is not None and _order(last.high, interval.high) == 0:
            joined[-1] = last._replace(has_high=last.has_high or interval.has_high)
    return Reals(tuple(joined))


def _is_empty(interval: Interval) -> bool:
    if interval.low is None or interval.high is None:
        return False
    if find_variables(interval.low) or find_variables(interval.high):
        return False
    order = _order(interval.low, interval.high)
    if order > 0:
        raise Unreadable("the ends of an interval are in the wrong order")
    return order == 0 and not (interval.has_low and interval.has_high)


def _starts_before(first: Interval, second: Interval) -> bool:
    if second.low is None:
        return False
    if first.low is None:
        return True
    order = _order(first.low, second.low)
    return order < 0 or (order == 0 and first.has_low and not second.has_low)


def _touches(first: Interval, second: Interval) -> bool:
    if first.high is None or second.low is None:
        return True
    order = _order(first.high, second.low)
    return order > 0 or (order == 0 and (first.has_high or second.has_low))


def _complement(reals: Reals) -> Reals:
    gaps: list[Interval] = []
    low, has_low, open_end = None, False, True
    for interval in reals.intervals:
        if interval.low is not None:
            gaps.append(Interval(low, interval.low, has_low, not interval.has_low))
        low, has_low, open_end = interval.high, not interval.has_high, interval.high is not None
        if not open_end:
            break
    if open_end:
        gaps.append(Interval(low, None, has_low and low is not None, False))
    return Reals(tuple(gap for gap in gaps if not _is_gap_empty(gap)))


def _is_gap_empty(gap: Interval) -> bool:
    if gap.low is None or gap.high is None:
        return False
    return _order(gap.low, gap.high) == 0 and not (gap.has_low and gap.has_high)


def _combine(operator: str, first: Reals, second: Reals) -> Reals:
    if operator == "cup":
        return normalise_reals([*first.intervals, *second.intervals])
    if operator == "minus":
        second = _complement(second)
    if ALL_REALS in (first, second):
        return second if first == ALL_REALS else first
    # The intersection is the complement of the union of the complements.
    outside = [*_complement(first).intervals, *_complement(second).intervals]
    return _complement(normalise_reals(outside))
