"""The vocabulary: terms with synonyms and questions, and made-up words to fill a haystack of any size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import count, product
from random import Random

QUALIFIERS = (
    "Rather",
    "Truly",
    "Quite",
    "Utterly",
    "Remarkably",
    "Thoroughly",
    "Unusually",
    "Plainly",
    "Decidedly",
    "Noticeably",
    "Undeniably",
    "Strikingly",
)
_ONSETS = (*"BDFGHJKLMNPRSTVWYZ", "Bl", "Br", "Cl", "Cr", "Dr", "Fl", "Gl", "Gr", "Pl", "Pr", "Sk", "Sn", "Tr")
_OPENINGS = tuple(map("".join, product(_ONSETS, "aeiou", "bdgklmnprtvz")))
# No English word has these endings, so no question is about a made-up term.
_ENDINGS = tuple(map("".join, product("aeiou", "dlmnrstv", ("ov", "esk", "ulm", "ash", "orn"))))
MADE_UP = len(_OPENINGS) * len(_ENDINGS)
"""The number of different made-up words."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A term, its synonyms, and questions that describe the term without naming it."""

    term: str
    synonyms: tuple[str, ...]
    questions: tuple[str, ...]

    def names(self, number: int) -> list[str]:
        """Return synonyms to draw *number* from: the plain synonyms, and qualified ones if there are too few."""
        plain = list(self.synonyms)
        if number <= len(plain):
            return plain
        return plain + [f"{qualifier} {synonym.lower()}" for qualifier in QUALIFIERS for synonym in plain]


@cache
def entries() -> tuple[Entry, ...]:
    """Return the terms of the package. No two terms have a similar meaning."""
    text = files(__package__).joinpath("words.txt").read_text(encoding="utf-8")
    return tuple(map(_entry, text.splitlines()))


def _entry(line: str) -> Entry:
    term, synonyms, *questions = line.split(" | ")
    return Entry(term.capitalize(), tuple(map(str.capitalize, synonyms.split(", "))), tuple(questions))


def made_up(rng: Random) -> Iterator[str]:
    """Yield made-up words in an order that *rng* chooses. No word repeats within `MADE_UP` words."""
    start, step = rng.randrange(MADE_UP), rng.randrange(MADE_UP)
    while math.gcd(step, MADE_UP) > 1:
        step += 1
    for number in count(start, step):
        opening, ending = divmod(number % MADE_UP, len(_ENDINGS))
        yield _OPENINGS[opening] + _ENDINGS[ending]


def value(word: str) -> int:
    """Return the value of a synonym: the sum of its code points."""
    return sum(map(ord, word))
