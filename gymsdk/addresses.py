"""Addresses: URLs as they may be told to anybody."""

from __future__ import annotations

import re


def public(text: str) -> str:
    """Give *text* without what a URL in it says of who asks: a user, a password, a query."""
    return re.sub(r"(?<=://)[^/@\s]+@|(?<=\S)\?\S*", "", text) if "://" in text else text
