"""Build haystacks: shuffled lines that pair terms with synonyms. A few lines belong to the term to find."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random

from .words import Entry, entries, made_up, value


@dataclass(frozen=True, slots=True)
class Haystack:
    """The *lines* of the list, and the synonyms to find in the order of their lines."""

    lines: list[str]
    needles: list[str]


def haystack(rng: Random, entry: Entry, *, distractors: int, sizes: Sequence[int]) -> Haystack:
    """Build a list about one term and many others.

    The number of synonyms varies for every term in the same way, so it does not reveal which term to find.

    Args:
        rng: The source of randomness.
        entry: The term to find.
        distractors: The number of lines about other terms.
        sizes: The possible numbers of synonyms of a term.

    Returns:
        The lines, and the synonyms of *entry* in the order of their lines.
    """
    needles = _needles(rng, entry, rng.choice(sizes))
    lines = list(islice(_distractors(rng, entry, sizes), distractors))
    rng.shuffle(lines)
    # Insert from the last position to the first, so that an insertion does not shift the remaining positions.
    places = sorted(rng.choices(range(len(lines) + 1), k=len(needles)), reverse=True)
    for place, needle in zip(places, reversed(needles), strict=True):
        lines.insert(place, _line(entry.term, needle))
    return Haystack(lines, needles)


def _needles(rng: Random, entry: Entry, number: int) -> list[str]:
    """Draw synonyms of *entry* whose values differ from each other and from the value of the term."""
    taken = {value(entry.term)}
    names = entry.names(number)
    found = []
    for name in rng.sample(names, len(names)):
        if value(name) not in taken:
            taken.add(value(name))
            found.append(name)
    return found[:number]


def _distractors(rng: Random, entry: Entry, sizes: Sequence[int]) -> Iterator[str]:
    others = [other for other in entries() if other is not entry]
    for other in rng.sample(others, len(others)):
        number = rng.choice(sizes)
        yield from (_line(other.term, synonym) for synonym in rng.sample(other.names(number), number))
    words = made_up(rng)
    for term in words:
        yield from [_line(term, synonym) for synonym in islice(words, rng.choice(sizes))]


def _line(term: str, synonym: str) -> str:
    return f"The term '{term}' has a synonym '{synonym}'."
