"""Generate problems about finite sets and intervals of the real line."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

from .latex import Problem, finite_set, number, polynomial, rational


def sets(rng: random.Random, difficulty: int) -> Problem:
    """Ask for the elements of a set, or for its size."""
    family = {1: _combined, 2: _symmetric_difference, 3: _absolute, 4: _multiples, 5: _subsets}
    return family[difficulty](rng)


def intervals(rng: random.Random, difficulty: int) -> Problem:
    """Ask for the solutions of an inequality, as an interval or a union of two intervals."""
    family = {1: _one_sided, 2: _two_sided, 3: _near, 4: _squared, 5: _quotient}
    return family[difficulty](rng)


def _split_names(question: str, elements: list[str]) -> Problem:
    backwards = finite_set(reversed(elements)).replace(", ", ",")
    return Problem(question, finite_set(elements), (backwards,))


def _pair(rng: random.Random) -> tuple[set[int], set[int]]:
    shared = rng.sample(range(1, 40), 6)
    rest = [n for n in range(1, 40) if n not in shared]
    return {*shared[:3], *rng.sample(rest, 3)}, {*shared[:3], *rng.sample(rest, 3), *shared[3:4]}


def _introduced(a: set[int], b: set[int]) -> str:
    first, second = (finite_set(map(str, sorted(members))) for members in (a, b))
    return f"Let \\(A = {first}\\) and \\(B = {second}\\)."


def _combined(rng: random.Random) -> Problem:
    a, b = _pair(rng)
    name, members = rng.choice([(r"A \cap B", a & b), (r"A \cup B", a | b)])
    return _split_names(
        f"{_introduced(a, b)} List the elements of \\({name}\\) as a set.", [str(n) for n in sorted(members)]
    )


def _symmetric_difference(rng: random.Random) -> Problem:
    a, b = _pair(rng)
    question = f"{_introduced(a, b)} List, as a set, the numbers that belong to exactly one of \\(A\\) and \\(B\\)."
    return _split_names(question, [str(n) for n in sorted(a ^ b)])


def _absolute(rng: random.Random) -> Problem:
    a, b, c = rng.randint(2, 9), rng.choice([n for n in range(-20, 21) if n]), rng.randint(1, 25)
    roots = sorted([Fraction(c - b, a), Fraction(-c - b, a)])
    question = f"Find the set of all real numbers \\(x\\) with \\(|{polynomial([a, b])}| = {c}\\)."
    return _split_names(question, [number(r) for r in roots])


def _multiples(rng: random.Random) -> Problem:
    limit, parts = rng.randint(300, 3000), rng.sample([2, 3, 4, 5, 6, 7, 9, 10, 11, 14, 15], 3)
    inside = sum(any(n % part == 0 for part in parts) for n in range(1, limit + 1))
    a, b, c = sorted(parts)
    question = (
        f"How many elements of \\(\\{{1, 2, \\ldots, {limit}\\}}\\) are divisible by at least one of {a}, {b} and {c}?"
    )
    return rational(question, inside)


def _subsets(rng: random.Random) -> Problem:
    n, size, part = rng.randint(8, 20), rng.randint(3, 5), rng.randint(2, 9)
    chosen = sum(sum(members) % part == 0 for members in itertools.combinations(range(1, n + 1), size))
    question = (
        f"How many subsets of \\(\\{{1, 2, \\ldots, {n}\\}}\\) have exactly {size} elements "
        f"with a sum that is divisible by {part}?"
    )
    return rational(question, chosen)


def _solve(inequality: str, answer: str) -> Problem:
    question = f"Find all real numbers \\(x\\) with \\({inequality}\\). Write them in interval notation."
    return Problem(question, answer, (answer.replace(", ", ","),))


def _one_sided(rng: random.Random) -> Problem:
    a, b, c = rng.choice([n for n in range(-9, 10) if n]), rng.randint(1, 20), rng.randint(-20, 20)
    relation = rng.choice(["<", r"\le", ">", r"\ge"])
    bound, closed = number(Fraction(c - b, a)), relation.startswith("\\")
    below = (relation in {"<", r"\le"}) == (a > 0)
    answer = rf"(-\infty, {bound}{']' if closed else ')'}" if below else rf"{'[' if closed else '('}{bound}, \infty)"
    return _solve(f"{polynomial([a, b])} {relation} {c}", answer)


def _two_sided(rng: random.Random) -> Problem:
    a, b, low = rng.randint(2, 9), rng.choice([n for n in range(-20, 21) if n]), rng.randint(-20, 10)
    high = low + rng.randint(2, 30)
    ends = f"{number(Fraction(low - b, a))}, {number(Fraction(high - b, a))}"
    if rng.choice((True, False)):
        return _solve(f"{low} \\le {polynomial([a, b])} < {high}", f"[{ends})")
    return _solve(f"{low} < {polynomial([a, b])} \\le {high}", f"({ends}]")


def _near(rng: random.Random) -> Problem:
    a, b, c = rng.randint(2, 9), rng.choice([n for n in range(-20, 21) if n]), rng.randint(1, 25)
    ends = f"{number(Fraction(-c - b, a))}, {number(Fraction(c - b, a))}"
    return _solve(f"|{polynomial([a, b])}| \\le {c}", f"[{ends}]")


def _squared(rng: random.Random) -> Problem:
    p, q, s = rng.randint(-20, 20), rng.randint(-12, 12), rng.randint(1, 4)
    low, high = sorted([Fraction(p, s), Fraction(q)])
    if low == high:
        return _squared(rng)
    quadratic = polynomial([s, -s * q - p, p * q])
    if rng.choice((True, False)):
        return _solve(f"{quadratic} > 0", rf"(-\infty, {number(low)}) \cup ({number(high)}, \infty)")
    return _solve(f"{quadratic} \\le 0", f"[{number(low)}, {number(high)}]")


def _quotient(rng: random.Random) -> Problem:
    zero, pole = rng.sample(range(-15, 16), 2)
    inequality = rf"\frac{{{polynomial([1, -zero])}}}{{{polynomial([1, -pole])}}}"
    if rng.choice((True, False)):
        inside = f"[{zero}, {pole})" if zero < pole else f"({pole}, {zero}]"
        return _solve(rf"{inequality} \le 0", inside)
    outside = rf"(-\infty, {zero}] \cup ({pole}, \infty)"
    if pole < zero:
        outside = rf"(-\infty, {pole}) \cup [{zero}, \infty)"
    return _solve(rf"{inequality} \ge 0", outside)
