from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from functools import partial

import math_checks
import pytest

from gym_env_math.problems import arithmetic, calculus, counting, equations, latex, sets_and_intervals
from gym_env_math.problems.latex import Problem

COUNT = 12


def draw_problems(generate: Callable[..., Problem], *difficulty: int) -> list[Problem]:
    return [generate(random.Random(seed), *difficulty) for seed in range(COUNT)]


def numbers(problem: Problem) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", problem.question)]


def wrong_answers(
    library: ProcessPoolExecutor, check: Callable[[str, str], bool], problems: list[Problem]
) -> list[Problem]:
    found = library.map(check, [p.question for p in problems], [p.answer for p in problems])
    return [problem for problem, right in zip(problems, found, strict=True) if not right]


@pytest.mark.slow
@pytest.mark.parametrize("difficulty", range(1, 6))
def test_fraction_answers_have_the_correct_value(library: ProcessPoolExecutor, difficulty: int):
    assert wrong_answers(library, math_checks.same_value, draw_problems(arithmetic.fractions, difficulty)) == []


@pytest.mark.slow
@pytest.mark.parametrize("difficulty", [1, 3, 4, 5])
def test_integral_answers_have_the_correct_value(library: ProcessPoolExecutor, difficulty: int):
    assert wrong_answers(library, math_checks.same_value, draw_problems(calculus.integrals, difficulty)) == []


@pytest.mark.slow
@pytest.mark.parametrize("difficulty", range(1, 6))
def test_derivative_answers_match_sympy(library: ProcessPoolExecutor, difficulty: int):
    assert wrong_answers(library, math_checks.same_derivative, draw_problems(calculus.derivatives, difficulty)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "generate",
    [
        *(partial(equations.linear, difficulty=d) for d in range(1, 6)),
        *(partial(equations.quadratic, difficulty=d) for d in (1, 2, 3)),
    ],
)
def test_equation_answers_are_exactly_the_roots(library: ProcessPoolExecutor, generate: Callable[..., Problem]):
    assert wrong_answers(library, math_checks.same_roots, draw_problems(generate)) == []


@pytest.mark.parametrize("difficulty", range(1, 6))
def test_system_answers_satisfy_all_equations(difficulty: int):
    problems = draw_problems(equations.systems, difficulty)
    assert [problem for problem in problems if not math_checks.same_solution(problem.question, problem.answer)] == []


@pytest.mark.slow
@pytest.mark.parametrize("difficulty", range(1, 6))
def test_intervals_contain_exactly_the_points_that_satisfy_the_inequality(
    library: ProcessPoolExecutor, difficulty: int
):
    assert (
        wrong_answers(library, math_checks.same_points, draw_problems(sets_and_intervals.intervals, difficulty)) == []
    )


@pytest.mark.parametrize("generate", [equations._symmetric, equations._of_high_degree])
def test_symmetric_functions_of_roots_match_the_computed_roots(generate: Callable[..., Problem]):
    values = {
        "r^2 + s^2": lambda r, s: r**2 + s**2,
        r"\frac{1}{r} + \frac{1}{s}": lambda r, s: 1 / r + 1 / s,
        "(r + 1)(s + 1)": lambda r, s: (r + 1) * (s + 1),
        "r^3 + s^3": lambda r, s: r**3 + s**3,
        r"\frac{r}{s} + \frac{s}{r}": lambda r, s: r / s + s / r,
        "r^4 + s^4": lambda r, s: r**4 + s**4,
    }
    for problem in draw_problems(generate):
        *_, polynomial, wanted = math_checks.formulas(problem.question)
        a, b, c = (
            int(sign + (size or "1")) for sign, size in re.findall(r"([+-]?) ?(\d*)(?:x\^2|x|$)", polynomial)[:3]
        )
        half, spread = -b / (2 * a), (b * b - 4 * a * c) ** 0.5 / (2 * a)
        found = values[wanted](complex(half + spread), complex(half - spread))
        assert found == pytest.approx(complex(float(math_checks._rational(problem.answer))))


def test_path_counts_match_a_walk_over_the_grid():
    for problem in draw_problems(counting._paths):
        _, _, m, n, a, b = numbers(problem)
        ways = {(0, 0): (1, 0)}
        for x, y in itertools.product(range(m + 1), range(n + 1)):
            clear = sum(ways.get(back, (0, 0))[0] for back in ((x - 1, y), (x, y - 1))) + ((x, y) == (0, 0))
            through = sum(ways.get(back, (0, 0))[1] for back in ((x - 1, y), (x, y - 1)))
            ways[x, y] = (0, clear + through) if (x, y) == (a, b) else (clear, through)
        assert int(problem.answer) == ways[m, n]["do not" not in problem.question]


def test_share_counts_match_an_enumeration_of_the_coins():
    for problem in draw_problems(counting._shares):
        coins, children, most = numbers(problem)
        ways = {0: 1}
        for _ in range(children):
            ways = {t: sum(ways.get(t - got, 0) for got in range(most + 1)) for t in range(coins + 1)}
        assert int(problem.answer) == ways[coins]


def test_sample_probabilities_match_an_enumeration_of_all_samples():
    for problem in draw_problems(counting._at_least):
        good, bad, size, least = numbers(problem)
        hits = [
            sum(apple < good for apple in sample) >= least for sample in itertools.combinations(range(good + bad), size)
        ]
        assert problem.answer == latex.number(Fraction(sum(hits), len(hits)))


def test_arrangement_counts_match_an_enumeration():
    assert counting.arrangements("BALLOON") == len(set(itertools.permutations("BALLOON")))
