"""Generate algebra problems: linear equations, quadratic equations and systems."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction

from .latex import Problem, Rational, finite_set, number, polynomial, rational, root, slashed, terms

Matrix = Sequence[Sequence[int]]


def linear(rng: random.Random, difficulty: int) -> Problem:
    """Ask for the solution of a linear equation: plain, with brackets, with denominators or as a proportion."""
    family = {1: _one_side, 2: _both_sides, 3: _brackets, 4: _denominators, 5: _proportion}
    return family[difficulty](rng)


def quadratic(rng: random.Random, difficulty: int) -> Problem:
    """Ask for the real roots of a quadratic equation, or for a symmetric function of them."""
    family = {1: _whole_roots, 2: _rational_roots, 3: _irrational_roots, 4: _symmetric, 5: _of_high_degree}
    return family[difficulty](rng)


def systems(rng: random.Random, difficulty: int) -> Problem:
    """Ask for the solution of two or three linear equations, with integer or rational values."""
    size, largest, whole = {1: (2, 5, True), 2: (2, 5, False), 3: (2, 12, False), 4: (3, 6, True), 5: (3, 9, False)}[
        difficulty
    ]
    rows = [[_nonzero(rng, largest) for _ in range(size)] for _ in range(size)]
    if _determinant(rows) == 0:
        return systems(rng, difficulty)
    sides = [_nonzero(rng, 30) for _ in rows]
    if whole:
        solution = [_nonzero(rng, 15) for _ in rows]
        sides = [sum(a * x for a, x in zip(row, solution, strict=True)) for row in rows]
    return _system(rows, sides, "xyz"[:size])


def _one_side(rng: random.Random) -> Problem:
    a, b, c = rng.randint(2, 12), _nonzero(rng, 20), _nonzero(rng, 20)
    return _solution(f"{polynomial([a, b])} = {c}", Fraction(c - b, a))


def _both_sides(rng: random.Random) -> Problem:
    (a, c), b, d = rng.sample(range(2, 13), 2), _nonzero(rng, 20), _nonzero(rng, 20)
    return _solution(f"{polynomial([a, b])} = {polynomial([c, d])}", Fraction(d - b, a - c))


def _brackets(rng: random.Random) -> Problem:
    (a, c), b, d, e = rng.sample(range(2, 13), 2), *(_nonzero(rng, 20) for _ in range(3))
    left = f"{a}({polynomial([1, b])}) - {c}({polynomial([1, d])})"
    return _solution(f"{left} = {e}", Fraction(e - a * b + c * d, a - c))


def _denominators(rng: random.Random) -> Problem:
    (a, c), b, d, e = rng.sample(range(2, 13), 2), *(_nonzero(rng, 20) for _ in range(3))
    left = rf"\frac{{{polynomial([1, b])}}}{{{a}}} - \frac{{{polynomial([1, d])}}}{{{c}}}"
    return _solution(f"{left} = {e}", Fraction(e * a * c - b * c + d * a, c - a))


def _whole_roots(rng: random.Random) -> Problem:
    return _roots(Fraction(_nonzero(rng, 15)), Fraction(_nonzero(rng, 15)))


def _rational_roots(rng: random.Random) -> Problem:
    first = Fraction(_nonzero(rng, 15), rng.randint(2, 5))
    return _roots(first, Fraction(_nonzero(rng, 15), rng.randint(1, 4)))


def _roots(*roots: Fraction) -> Problem:
    (p, s), (q, t) = (root.as_integer_ratio() for root in roots)
    question = f"Find the set of all real solutions of \\({polynomial([s * t, -s * q - t * p, p * q])} = 0\\)."
    return _set_of(question, [number(r) for r in sorted(set(roots))])


def _nonzero(rng: random.Random, largest: int) -> int:
    return rng.randint(1, largest) * rng.choice([1, -1])


def _solution(equation: str, value: Rational) -> Problem:
    problem = rational(f"Solve \\({equation}\\) for \\(x\\).", value)
    return problem._replace(variants=(*problem.variants, f"x = {problem.answer}"))


def _set_of(question: str, elements: list[str]) -> Problem:
    written = finite_set(elements)
    # In a set these would come in an order of each process's own, and the rows with them.
    others = dict.fromkeys((finite_set(reversed(elements)), written.replace(", ", ",")))
    turned = tuple(other for other in others if other != written)
    return Problem(question, written, turned)


def _proportion(rng: random.Random) -> Problem:
    a, c, p, q = (rng.randint(2, 15) for _ in range(4))
    b, d = _nonzero(rng, 20), _nonzero(rng, 20)
    if a * q == c * p or a * d == b * c:
        return _proportion(rng)
    equation = rf"\frac{{{polynomial([a, b])}}}{{{polynomial([c, d])}}} = {number(Fraction(p, q))}"
    return _solution(equation, Fraction(d * p - b * q, a * q - c * p))


def _irrational_roots(rng: random.Random) -> Problem:
    a, b, c = rng.randint(1, 4), _nonzero(rng, 12), _nonzero(rng, 12)
    square = b * b - 4 * a * c
    if square <= 0 or root(square)[1] == 1:
        return _irrational_roots(rng)
    outside, inside = root(square)
    middle, half = Fraction(-b, 2 * a), Fraction(outside, 2 * a)
    elements = [terms([(middle, ""), (sign * half, rf"\sqrt{{{inside}}}")]) for sign in (-1, 1)]
    question = f"Find the set of all real solutions of \\({polynomial([a, b, c])} = 0\\) in exact form."
    whole = [rf"\frac{{{-b} {sign} \sqrt{{{square}}}}}{{{2 * a}}}" for sign in "-+"]
    return Problem(question, finite_set(elements), (finite_set(whole),))


def _symmetric(rng: random.Random) -> Problem:
    coefficients, total, product = _of_roots(rng)
    values = {
        r"r^2 + s^2": total**2 - 2 * product,
        r"\frac{1}{r} + \frac{1}{s}": total / product,
        r"(r + 1)(s + 1)": product + total + 1,
    }
    return _value(coefficients, *rng.choice(list(values.items())))


def _of_high_degree(rng: random.Random) -> Problem:
    coefficients, total, product = _of_roots(rng)
    squares = total**2 - 2 * product
    values = {
        r"r^3 + s^3": total**3 - 3 * total * product,
        r"\frac{r}{s} + \frac{s}{r}": squares / product,
        r"r^4 + s^4": squares**2 - 2 * product**2,
    }
    return _value(coefficients, *rng.choice(list(values.items())))


def _of_roots(rng: random.Random) -> tuple[list[int], Fraction, Fraction]:
    """Return the coefficients of a quadratic, the sum of its roots and their product."""
    a, b, c = rng.randint(2, 9), _nonzero(rng, 15), _nonzero(rng, 15)
    return [a, b, c], Fraction(-b, a), Fraction(c, a)


def _value(coefficients: list[int], wanted: str, value: Fraction) -> Problem:
    question = f"Let \\(r\\) and \\(s\\) be the complex roots of \\({polynomial(coefficients)}\\). Find \\({wanted}\\)."
    return rational(question, value)


def _system(rows: Matrix, sides: list[int], unknowns: str) -> Problem:
    lines = [f"{terms(zip(row, unknowns, strict=True))} = {side}" for row, side in zip(rows, sides, strict=True)]
    system = r"\begin{cases} " + r" \\ ".join(lines) + r" \end{cases}"
    kind = {2: "pair", 3: "triple"}[len(rows)]
    question = (
        f"Solve the system \\[{system}\\] and give the solution as an ordered {kind} \\(({', '.join(unknowns)})\\)."
    )
    solution = _cramer(rows, sides)
    return Problem(question, f"({', '.join(map(number, solution))})", (f"({','.join(map(slashed, solution))})",))


def _cramer(rows: Matrix, sides: Sequence[int]) -> list[Fraction]:
    whole = _determinant(rows)
    columns = range(len(rows))
    replaced = ([[*row[:i], side, *row[i + 1 :]] for row, side in zip(rows, sides, strict=True)] for i in columns)
    return [Fraction(_determinant(matrix), whole) for matrix in replaced]


def _determinant(rows: Matrix) -> int:
    if len(rows) == 1:
        return rows[0][0]
    minors = ([[*row[:i], *row[i + 1 :]] for row in rows[1:]] for i in range(len(rows)))
    return sum((-1) ** i * rows[0][i] * _determinant(minor) for i, minor in enumerate(minors))
