"""Generate problems: seeded questions with exact answers, by family and difficulty."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, get_args

from .arithmetic import fractions, number_theory
from .calculus import derivatives, integrals
from .counting import combinatorics, probability
from .equations import linear, quadratic, systems
from .latex import Problem
from .sets_and_intervals import intervals, sets

Family = Literal[
    "fractions",
    "linear",
    "quadratic",
    "systems",
    "derivatives",
    "integrals",
    "number_theory",
    "combinatorics",
    "probability",
    "sets",
    "intervals",
]
Split = Literal["train", "validation", "example"]

EASIEST, HARDEST = 1, 5
FAMILIES: tuple[Family, ...] = get_args(Family)
SIZES: dict[str, int | None] = {"train": None, "validation": 500, "example": 11}

_GENERATORS: dict[Family, Callable[[random.Random, int], Problem]] = {
    "fractions": fractions,
    "linear": linear,
    "quadratic": quadratic,
    "systems": systems,
    "derivatives": derivatives,
    "integrals": integrals,
    "number_theory": number_theory,
    "combinatorics": combinatorics,
    "probability": probability,
    "sets": sets,
    "intervals": intervals,
}
_GUESSABLE = re.compile(r"-?(?:[0-9]|1[0-2])")
_DRAWS = 200


class DrawnProblem(NamedTuple):
    """A problem with the family and difficulty it was drawn from."""

    family: Family
    difficulty: int
    problem: Problem


def draw_problems(
    split: Split, seed: int, families: Sequence[Family], difficulties: Sequence[int]
) -> Iterator[DrawnProblem]:
    """Yield the problems of a split.

    The families take turns. The seed chooses the family of the first problem.

    Args:
        split: The split. `train` is endless; `SIZES` holds the sizes of the others.
        seed: The same arguments yield the same problems.
        families: The families to draw from.
        difficulties: The difficulties to draw from.

    Yields:
        Problems with their family and difficulty.
    """
    rng = random.Random(f"{split}:{seed}")
    size = SIZES[split]
    seen: set[str] = set()
    row, first = 0, rng.randrange(len(families))
    while size is None or row < size:
        family, difficulty = families[(first + row) % len(families)], rng.choice(difficulties)
        problem = _draw(rng, split, family, difficulty, seen)
        if size is not None:
            seen.add(problem.question)
        yield DrawnProblem(family, difficulty, problem)
        row += 1


def home(question: str) -> Split:
    """Return the split that *question* belongs to. The seed has no influence, so no two splits share a question."""
    share = zlib.crc32(question.encode()) % 16
    return "example" if share == 0 else "validation" if share < 4 else "train"  # noqa: PLR2004 -- sixteenths


def _draw(rng: random.Random, split: Split, family: Family, difficulty: int, seen: set[str]) -> Problem:
    generate = _GENERATORS[family]
    mine = (p for p in iter(lambda: generate(rng, difficulty), None) if home(p.question) == split)
    problem = next(mine)
    for _ in range(_DRAWS):
        # Reject answers that are small integers (easy to guess) and questions that already occurred in this split.
        if not _GUESSABLE.fullmatch(problem.answer) and problem.question not in seen:
            return problem
        problem = next(mine)
    return problem
