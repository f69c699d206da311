"""Marks: strings that give a conversation its structure, and text in which none of them stands."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache


def plain(text: str, marks: Collection[str]) -> str:
    """Give *text* with a space after the first character of each of the *marks* in it: then it is none any more."""
    return _beginning(frozenset(marks)).sub(r"\g<0> ", text) if marks else text


@lru_cache(maxsize=32)
def _beginning(marks: frozenset[str]) -> re.Pattern[str]:
    # Looking ahead finds a mark that begins within another, too.
    return re.compile(f"(?={'|'.join(map(re.escape, sorted(marks)))}).", re.DOTALL)
