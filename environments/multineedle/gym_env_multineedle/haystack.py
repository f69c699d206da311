"""A haystack: shuffled lines that pair terms with synonyms, a few of them about the one term that is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random

from .words import Entry, entries, made_up, value


@dataclass(frozen=True, slots=True)
class Haystack:
    """The *lines*, and the synonyms to find in them in the order in which they stand."""

    lines: list[str]
    needles: list[str]


def haystack(rng: Random, entry: Entry, *, distractors: int, sizes: Sequence[int]) -> Haystack:
    """Give *distractors* lines about other terms, and among them those about *entry*.

    Every term has one of *sizes* synonyms, so that their number does not betray which one is asked for.
    """
    needles = _needles(rng, entry, rng.choice(sizes))
    lines = list(islice(_distractors(rng, entry, sizes), distractors))
    rng.shuffle(lines)
    # From the last place to the first, so that an earlier needle does not shift a later one.
    places = sorted(rng.choices(range(len(lines) + 1), k=len(needles)), reverse=True)
    for place, needle in zip(places, reversed(needles), strict=True):
        lines.insert(place, _line(entry.term, needle))
    return Haystack(lines, needles)


def _needles(rng: Random, entry: Entry, number: int) -> list[str]:
    """Draw synonyms of *entry* that differ in value, from each other and from the term's own."""
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
