"""Addresses: URLs as they may be told to anybody."""

from __future__ import annotations

import re
from collections.abc import Iterable


def public(text: str) -> str:
    """Give *text* without what a URL in it says of who asks: a user, a password, a query."""
    return re.sub(r"(?<=://)[^/@\s]+@|(?<=\S)\?\S*", "", text) if "://" in text else text


def several(given: str | Iterable[str]) -> tuple[str, ...]:
    """Give the addresses *given*, each once: texts, any of which may name several, separated by commas."""
    texts = [given] if isinstance(given, str) else given
    return tuple(dict.fromkeys(each.strip() for text in texts for each in text.split(",") if each.strip()))
