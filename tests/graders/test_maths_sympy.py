"""Compare the grader with sympy on random expressions: sympy writes them in another form, or changes them."""

from __future__ import annotations

import multiprocessing
import random
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from gymsdk.graders.maths import EQUAL, grade

EXPRESSIONS = 10_000
CHUNK = 500


def draw(rng: random.Random, depth: int) -> Any:
    """Return a random expression of sympy in x and y."""
    import sympy as sp

    x, y = sp.symbols("x y")
    if depth == 0 or rng.random() < 0.15:
        numbers = [sp.Integer(rng.randint(-9, 9)), sp.Rational(rng.randint(-9, 9), rng.randint(1, 9)), sp.pi]
        return rng.choice([x, x, y, *numbers, sp.sqrt(rng.choice([2, 3, 5]))])
    inner = draw(rng, depth - 1)
    match rng.randrange(8):
        case 0 | 1:
            return inner + draw(rng, depth - 1)
        case 2 | 3:
            return inner * draw(rng, depth - 1)
        case 4:
            return inner ** rng.randint(1, 3)
        case 5:
            return inner / (draw(rng, depth - 1) + 11)
        case 6:
            return rng.choice([sp.sin, sp.cos, sp.exp])(draw(rng, min(depth - 1, 1)))
        case _:
            return sp.sqrt(inner**2 + 1)


def rewrite(rng: random.Random, expression: Any) -> Any:
    """Return the same expression in another form."""
    import sympy as sp

    return rng.choice([sp.expand, sp.factor, sp.together, sp.expand_trig, sp.powsimp, lambda e: e])(expression)


def change(rng: random.Random, expression: Any) -> Any:
    """Return another expression."""
    import sympy as sp

    x = sp.Symbol("x")
    near = [expression + sp.Rational(1, rng.randint(2, 10**9)), expression * sp.Rational(10**6 + 1, 10**6)]
    return rng.choice([*near, expression + x / 997, -expression])


def is_different(first: Any, second: Any) -> bool | None:
    """Return whether sympy finds another value at a point, to 30 digits; `None` if it finds none."""
    import sympy as sp

    x, y = sp.symbols("x y")
    point = {x: sp.Rational(7, 13), y: sp.Rational(11, 17)}
    values = [expression.subs(point).evalf(40) for expression in (first, second)]
    if not all(value.is_number and value.is_finite for value in values):
        return None
    return bool(abs(values[0] - values[1]) > sp.Float("1e-30", 40) * (1 + abs(values[0])))


def compare(seed: int) -> tuple[int, list[tuple[str, str, bool, str]]]:
    """Return how many expressions were decided, and the disagreements: both forms, sympy's opinion and the outcome."""
    import sympy as sp

    rng = random.Random(seed)
    decided, wrong = 0, []
    for _ in range(CHUNK):
        first = draw(rng, 3)
        changed = rng.random() < 0.5
        second = rewrite(rng, change(rng, first) if changed else first)
        differs = is_different(first, second)
        if (
            differs is None
            or (changed and not differs)
            or first.has(sp.zoo, sp.nan, sp.oo)
            or second.has(sp.zoo, sp.nan, sp.oo)
        ):
            continue
        decided += 1
        written = sp.latex(first), sp.latex(second)
        outcome = grade(written[0], rf"\boxed{{{written[1]}}}").outcome
        if (outcome == EQUAL) == differs:
            wrong.append((*written, differs, outcome))
    return decided, wrong


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_random_expressions_are_graded_as_sympy_compares_them() -> None:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(compare, range(EXPRESSIONS // CHUNK)))
    assert sum(decided for decided, _ in results) >= 0.9 * EXPRESSIONS
    assert [pair for _, wrong in results for pair in wrong] == []
