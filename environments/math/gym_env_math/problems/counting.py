"""Generate counting problems: combinatorics and probability."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from fractions import Fraction

from .latex import Problem, rational

_WORDS = ("BANANA", "PEPPER", "LETTERS", "SUCCESS", "BALLOON", "COFFEE", "PARALLEL", "POSSESS", "MISSISSIPPI")


def combinatorics(rng: random.Random, difficulty: int) -> Problem:
    """Ask for a number of possibilities."""
    family = {1: _ordered, 2: _committee, 3: _word, 4: _paths, 5: _shares}
    return family[difficulty](rng)


def probability(rng: random.Random, difficulty: int) -> Problem:
    """Ask for a probability, as a fraction."""
    family = {1: _two_balls, 2: _two_dice, 3: _coins, 4: _at_least, 5: _two_boxes}
    return family[difficulty](rng)


def arrangements(word: str) -> int:
    """Return the number of different strings that use all letters of *word*."""
    return math.factorial(len(word)) // math.prod(math.factorial(count) for count in Counter(word).values())


def _ordered(rng: random.Random) -> Problem:
    n, k = rng.randint(6, 99), rng.randint(3, 5)
    question = f"In how many ways can {k} different prizes be given to {n} runners, at most one to each runner?"
    return rational(question, math.perm(n, k))


def _committee(rng: random.Random) -> Problem:
    teachers, students = rng.randint(5, 12), rng.randint(6, 15)
    a, b = rng.randint(2, 4), rng.randint(2, 5)
    question = (
        f"A committee of {a} teachers and {b} students is chosen from {teachers} teachers and {students} students. "
        "In how many ways can this be done?"
    )
    return rational(question, math.comb(teachers, a) * math.comb(students, b))


def _word(rng: random.Random) -> Problem:
    letters = list(rng.choice(_WORDS))
    extra = rng.choice(sorted(set(letters)))
    word = "".join(rng.sample([*letters, extra], len(letters) + 1))
    return rational(f"How many different arrangements do the letters of the string {word} have?", arrangements(word))


def _paths(rng: random.Random) -> Problem:
    m, n = rng.randint(4, 10), rng.randint(4, 10)
    a, b = rng.randint(1, m - 1), rng.randint(1, n - 1)
    through = math.comb(a + b, a) * math.comb(m + n - a - b, m - a)
    avoids = rng.choice((True, False))
    question = (
        f"How many paths lead from \\((0, 0)\\) to \\(({m}, {n})\\) in steps of one unit right or one unit up "
        f"that {'do not pass' if avoids else 'pass'} through \\(({a}, {b})\\)?"
    )
    return rational(question, math.comb(m + n, m) - through if avoids else through)


def _shares(rng: random.Random) -> Problem:
    children, most = rng.randint(3, 6), rng.randint(4, 9)
    coins = rng.randint(2 * children, children * most - 3)
    # Inclusion-exclusion over the children that get more coins than allowed.
    answer = sum(
        (-1) ** over * math.comb(children, over) * math.comb(coins - over * (most + 1) + children - 1, children - 1)
        for over in range(children + 1)
        if coins >= over * (most + 1)
    )
    question = (
        f"In how many ways can {coins} identical coins be shared among {children} children "
        f"so that no child gets more than {most} coins? A child may get none."
    )
    return rational(question, answer)


def _two_balls(rng: random.Random) -> Problem:
    red, blue = rng.randint(3, 25), rng.randint(3, 25)
    question = (
        f"An urn holds {red} red and {blue} blue balls. Two balls are drawn without replacement. "
        "What is the probability that they have the same colour?"
    )
    return rational(question, Fraction(math.comb(red, 2) + math.comb(blue, 2), math.comb(red + blue, 2)))


def _two_dice(rng: random.Random) -> Problem:
    first, second = rng.choice([4, 6, 8, 10, 12, 20]), rng.choice([6, 8, 10, 12, 20])
    least = rng.randint(4, first + second - 1)
    rolls = itertools.product(range(1, first + 1), range(1, second + 1))
    hits = sum(a + b >= least for a, b in rolls)
    question = (
        f"Two fair dice are rolled, one with faces 1 to {first} and one with faces 1 to {second}. "
        f"What is the probability that the sum is at least {least}?"
    )
    return rational(question, Fraction(hits, first * second))


def _coins(rng: random.Random) -> Problem:
    flips, weight = rng.randint(4, 8), rng.randint(3, 7)
    heads, chance = rng.randint(1, flips - 1), Fraction(rng.randint(1, weight - 1), weight)
    question = (
        f"A coin shows heads with probability \\(\\frac{{{chance.numerator}}}{{{chance.denominator}}}\\). "
        f"It is flipped {flips} times. What is the probability of exactly {heads} heads?"
    )
    return rational(question, math.comb(flips, heads) * chance**heads * (1 - chance) ** (flips - heads))


def _at_least(rng: random.Random) -> Problem:
    good, bad, drawn = rng.randint(5, 12), rng.randint(5, 12), rng.randint(3, 5)
    least = rng.randint(1, drawn - 1)
    hits = sum(math.comb(good, k) * math.comb(bad, drawn - k) for k in range(least, drawn + 1))
    question = (
        f"A box holds {good} ripe and {bad} unripe apples. A sample of {drawn} apples is taken at random without "
        f"replacement. What is the probability that at least {least} of them {'is' if least == 1 else 'are'} ripe?"
    )
    return rational(question, Fraction(hits, math.comb(good + bad, drawn)))


def _two_boxes(rng: random.Random) -> Problem:
    (a, b), (c, d) = [(rng.randint(2, 12), rng.randint(2, 12)) for _ in range(2)]
    faces = rng.randint(1, 5)
    first = Fraction(faces, 6) * Fraction(a, a + b)
    second = Fraction(6 - faces, 6) * Fraction(c, c + d)
    question = (
        f"Box A holds {a} red and {b} white balls, box B holds {c} red and {d} white balls. A fair die is rolled: on "
        f"{_up_to(faces)} a ball is drawn from box A, otherwise from box B. The ball is red. "
        "What is the probability that it came from box A?"
    )
    return rational(question, first / (first + second))


def _up_to(faces: int) -> str:
    return "a 1" if faces == 1 else f"a number from 1 to {faces}"
