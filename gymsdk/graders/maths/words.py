"""Answers in words: numbers in words, and words with the same meaning."""

from __future__ import annotations

import re
from fractions import Fraction


def word_set(text: str) -> frozenset[str]:
    """Return the words of *text* as a set."""
    return frozenset(text.split())


def number_words(text: str, start: int = 0, step: int = 1) -> dict[str, int]:
    """Return the words of *text*, numbered from *start* in steps."""
    return {word: start + step * index for index, word in enumerate(text.split())}


_SMALL = number_words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen"
)
_TENS = number_words("twenty thirty forty fifty sixty seventy eighty ninety", 20, 10)
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_PARTS = {
    "half": 2,
    "third": 3,
    "quarter": 4,
    "fourth": 4,
    "fifth": 5,
    "sixth": 6,
    "seventh": 7,
    "eighth": 8,
    "ninth": 9,
    "tenth": 10,
    "twelfth": 12,
    "hundredth": 100,
    "thousandth": 1000,
}
_PLURALS = {"halves": "half", **{f"{name}s": name for name in _PARTS}}
SHORTEST_WORD = 3
"""The letters of the shortest word: two are a product of variables."""

MULTIPLIERS = {"dozen": 12, "hundred": 100, **_SCALES}
"""Words that multiply the preceding number: "2.5 million"."""

_MEANINGS = {
    "empty": (
        "no solution",
        "no solutions",
        "no real solution",
        "no real solutions",
        "no roots",
        "no real roots",
        "empty set",
        "none",
        "there is no solution",
        "there are no solutions",
        "no such number exists",
    ),
    "reals": (
        "all real numbers",
        "all reals",
        "every real number",
        "any real number",
        "all real",
        "all real x",
        "real numbers",
    ),
    "infinity": ("infinity", "positive infinity", "plus infinity"),
    "-infinity": ("negative infinity", "minus infinity"),
    "infinitely many": ("infinitely many", "infinitely many solutions", "infinite", "infinite solutions"),
    "does not exist": ("does not exist", "dne", "doesn't exist", "it does not exist", "limit does not exist"),
    "undefined": ("undefined", "not defined", "is undefined"),
    "impossible": ("impossible", "not possible", "it is impossible", "cannot be done"),
}
_SAME = {written: meaning for meaning, forms in _MEANINGS.items() for written in forms}
_LEADING = re.compile(r"^(?:(?:the|a|an|it is|it's|on|in)\s+)+")
_NOT_IN_WORDS = re.compile(r"[^\w\s'-]")


def get_meaning(text: str) -> str:
    """Return the words of *text* in the form in which equal answers are the same text."""
    words = " ".join(_NOT_IN_WORDS.sub(" ", text.casefold()).split())
    words = _LEADING.sub("", words) or words
    return _SAME.get(words, words)


def read_number(text: str) -> Fraction | None:
    """Return the number that *text* spells in English ("twenty-one", "two thirds"), or `None`."""
    words = text.casefold().replace("-", " ").split()
    if not words or len(words) > 20:  # noqa: PLR2004 -- longer than any number with a scale of these
        return None
    sign, words = (-1, words[1:]) if words[0] in ("minus", "negative") else (1, words)
    words = words[1:] if words[:1] == ["a"] and words[1:] else words
    if words[-3:] == ["and", "a", "half"]:
        whole = _read_integer(words[:-3])
        return None if whole is None else sign * (whole + Fraction(1, 2))
    last = _PLURALS.get(words[-1], words[-1]) if words else ""
    if last in _PARTS:
        count = _read_integer(words[:-1]) if words[:-1] else 1
        return None if count is None else sign * Fraction(count, _PARTS[last])
    whole = _read_integer(words)
    return None if whole is None else sign * Fraction(whole)


def find_part(word: str) -> int | None:
    """Return the denominator of a part: 3 for "thirds"; `None` if the word is none, or can be something else."""
    return _PARTS.get(_PLURALS.get(word, "")) if word in _PLURALS and word not in ("quarters", "halves") else None


def _read_integer(words: list[str]) -> int | None:
    total, group, previous = 0, 0, ""
    for position, word in enumerate(words):
        if word in _SMALL:
            if previous in _SMALL or (previous in _TENS and not 0 < _SMALL[word] < 10):  # noqa: PLR2004 -- "thirty ten"
                return None
            group += _SMALL[word]
        elif word in _TENS:
            if previous in _SMALL or previous in _TENS:
                return None
            group += _TENS[word]
        elif word == "hundred":
            group = (group or 1) * 100
        elif word in _SCALES:
            total, group = total + (group or 1) * _SCALES[word], 0
        elif not (word == "and" and 0 < position < len(words) - 1):
            return None
        previous = word
    return total + group if words else None
