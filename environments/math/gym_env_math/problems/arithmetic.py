"""Generate arithmetic problems: fractions and number theory."""

from __future__ import annotations

import math
import random
from fractions import Fraction

from .latex import Problem, number, rational

CONTINUED_FROM = 4
_OPERATIONS = {"+": Fraction.__add__, "-": Fraction.__sub__, r"\cdot": Fraction.__mul__, r"\div": Fraction.__truediv__}


def fractions(rng: random.Random, difficulty: int) -> Problem:
    """Generate a calculation with fractions, or a continued fraction."""
    if difficulty >= CONTINUED_FROM:
        return _continued(rng, depth=difficulty - 1)
    value = _fraction(rng)
    text = number(value)
    for level in range(difficulty):
        sign, operation = rng.choice(list(_OPERATIONS.items()))
        operand = _fraction(rng)
        text = f"{text if level == 0 else _bracketed(text)} {sign} {number(operand)}"
        value = operation(value, operand)
    return rational(f"Compute \\({text}\\) as a fraction in lowest terms.", value)


def number_theory(rng: random.Random, difficulty: int) -> Problem:
    """Generate a problem about divisors, remainders or residues."""
    family = {1: _divisors_shared, 2: _divisors, 3: _remainder, 4: _two_residues, 5: _coprime}
    return family[difficulty](rng)


def _fraction(rng: random.Random) -> Fraction:
    denominator = rng.randint(3, 19)
    return Fraction(rng.choice([n for n in range(2, 30) if math.gcd(n, denominator) == 1]), denominator)


def _bracketed(text: str) -> str:
    return rf"\left({text}\right)"


def _continued(rng: random.Random, *, depth: int) -> Problem:
    value = Fraction(rng.randint(2, 9))
    text = number(value)
    for _ in range(depth):
        whole, sign = rng.randint(2, 9), rng.choice([1, -1])
        text = rf"{whole} {'+' if sign > 0 else '-'} \cfrac{{1}}{{{text}}}"
        value = whole + sign / value
    return rational(f"Write the continued fraction \\({text}\\) as a single fraction in lowest terms.", value)


def _divisors_shared(rng: random.Random) -> Problem:
    shared = rng.randint(13, 60)
    a, b = shared * rng.randint(2, 20), shared * rng.randint(21, 40)
    if rng.choice((True, False)):
        return rational(f"Find the greatest common divisor of {a} and {b}.", math.gcd(a, b))
    return rational(f"Find the least common multiple of {a} and {b}.", math.lcm(a, b))


def _divisors(rng: random.Random) -> Problem:
    n = rng.randint(100, 5000)
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    if rng.choice((True, False)):
        return rational(f"How many positive divisors does \\({n}\\) have?", len(divisors))
    return rational(f"Find the sum of all positive divisors of \\({n}\\).", sum(divisors))


def _remainder(rng: random.Random) -> Problem:
    base, exponent, modulus = rng.randint(2, 50), rng.randint(50, 999), rng.randint(101, 997)
    question = f"Find the remainder when \\({base}^{{{exponent}}}\\) is divided by {modulus}."
    return rational(question, pow(base, exponent, modulus))


def _two_residues(rng: random.Random) -> Problem:
    p, q = rng.sample([11, 13, 17, 19, 23, 29, 31, 37], 2)
    a, b = rng.randint(1, p - 1), rng.randint(1, q - 1)
    answer = next(n for n in range(1, p * q + 1) if n % p == a and n % q == b)
    question = (
        f"Find the smallest positive integer that leaves the remainder {a} when divided by {p} "
        f"and the remainder {b} when divided by {q}."
    )
    return rational(question, answer)


def _coprime(rng: random.Random) -> Problem:
    n, k = rng.randint(200, 2000), rng.randint(2, 9)
    members = [m for m in range(1, k * n + 1) if math.gcd(m, n) == 1]
    question = f"How many positive integers \\(m \\le {k * n}\\) satisfy \\(\\gcd(m, {n}) = 1\\)?"
    if rng.choice((True, False)):
        return rational(question, len(members))
    question = f"Find the sum of all positive integers \\(m \\le {n}\\) that satisfy \\(\\gcd(m, {n}) = 1\\)."
    return rational(question, sum(m for m in members if m <= n))
