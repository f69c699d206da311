"""Check answers independently: sympy computes them from the LaTeX of the question. For worker processes."""

from __future__ import annotations

import itertools
import re
from fractions import Fraction
from typing import Any


def _read(text: str) -> Any:
    import math_verify

    return math_verify.parse(f"${text}$", parsing_timeout=None)[0]


def formulas(question: str) -> list[str]:
    return re.findall(r"\\\((.+?)\\\)", question)


def same_value(question: str, answer: str) -> bool:
    """Return whether the only formula of the question has the value of the answer."""
    import math_verify

    value = _read(formulas(question)[0].replace(r"\cfrac", r"\frac"))
    return math_verify.verify(value.doit(), _read(answer), timeout_seconds=None)


def same_derivative(question: str, answer: str) -> bool:
    """Return whether the answer is the derivative of the function in the question, possibly at a point."""
    import sympy

    function = re.search(r"f\(x\) = (.+?)\\\)", question)
    point = re.search(r"Find \\\(f'\((.+?)\)\\\)", question)
    x = next(iter(_read("x").free_symbols))
    derivative = sympy.diff(_read(function[1]).doit(), x)
    wanted = derivative.subs(x, _read(point[1]).doit()) if point else derivative
    return sympy.simplify(wanted - _read(answer).doit()) == 0


def same_roots(question: str, answer: str) -> bool:
    """Return whether the solutions of the equation in the question are exactly the answer."""
    import sympy

    found = {sympy.nsimplify(root) for root in sympy.solve(_read(formulas(question)[0]).doit())}
    given = _read(answer).doit()
    roots = given.args if isinstance(given, sympy.FiniteSet) else [given]
    return len(found) == len(roots) and all(any(sympy.simplify(a - b) == 0 for a in found) for b in roots)


def same_solution(question: str, answer: str) -> bool:
    """Return whether the numbers of the answer satisfy every equation of the system."""
    lines = re.search(r"\\begin{cases} (.+) \\end{cases}", question)[1].split(r" \\ ")
    values = [_rational(part) for part in answer.strip("()").split(", ")]
    return all(_balance(line, values) for line in lines)


def _rational(text: str) -> Fraction:
    top, bottom = re.fullmatch(r"(-?)\\frac{(\d+)}{(\d+)}|(-?\d+)", text).group(2, 3)
    return Fraction(text) if top is None else Fraction(int(top), int(bottom)) * (-1 if text.startswith("-") else 1)


def _balance(line: str, values: list[Fraction]) -> bool:
    left, right = line.split(" = ")
    total = Fraction()
    for sign, size, unknown in re.findall(r"([+-]?) ?(\d*)([xyz])", left):
        total += (-1 if sign == "-" else 1) * int(size or 1) * values["xyz".index(unknown)]
    return total == int(right)


def same_points(question: str, answer: str) -> bool:
    """Return whether the answer contains exactly the points, out of many, that satisfy the inequality."""
    import sympy

    inequality = formulas(question)[1]
    x = next(iter(_read("x").free_symbols))
    parts = re.split(r"(<|\\le|>|\\ge)", inequality)
    sides = [_side(part) for part in parts[::2]]
    inside = sympy.Union(*[_interval(part) for part in answer.split(r" \cup ")])
    points = [sympy.Rational(n, 60) for n in range(-2400, 2401, 37)]
    points += [end + nudge for end in inside.boundary for nudge in (0, sympy.Rational(1, 997))]
    return all(
        _holds(sides, parts[1::2], x, point) == bool(inside.contains(point))
        for point in points
        if _defined(sides, x, point)
    )


def _side(text: str) -> Any:
    size = re.fullmatch(r"\s*\|(.+)\|\s*", text)
    return abs(_read(size[1]).doit()) if size else _read(text.strip()).doit()


def _interval(text: str) -> Any:
    import sympy

    low, high = text[1:-1].split(", ")
    ends = {r"-\infty": -sympy.oo, r"\infty": sympy.oo}
    start, stop = (ends[end] if end in ends else sympy.Rational(str(_rational(end))) for end in (low, high))
    return sympy.Interval(start, stop, text[0] == "(", text[-1] == ")")


def _defined(sides: list[Any], x: Any, point: Any) -> bool:
    return all(side.subs(x, point).is_finite for side in sides)


def _holds(sides: list[Any], relations: list[str], x: Any, point: Any) -> bool:
    compare = {"<": "__lt__", r"\le": "__le__", ">": "__gt__", r"\ge": "__ge__"}
    values = [side.subs(x, point) for side in sides]
    pairs = zip(itertools.pairwise(values), relations, strict=True)
    return all(bool(getattr(a, compare[relation])(b)) for (a, b), relation in pairs)
