"""Jars: the cookies somebody carries from answer to request, verbatim, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeAlias

Jar: TypeAlias = dict[str, str]
"""Cookies by name."""

NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
VALUE = re.compile(r"[\x21-\x3a\x3c-\x7e]*")
"""What a cookie may be called and may hold, so that it splits neither a header nor a request."""


def read(header: str | None) -> Jar:
    """Give the cookies of a request's Cookie *header*."""
    pairs = (pair.strip().partition("=") for pair in (header or "").split(";"))
    return sound({name: value for name, _, value in pairs})


def sound(jar: Mapping[str, object]) -> Jar:
    """Give those of a *jar* from elsewhere that can be sent."""
    return {
        name: value
        for name, value in jar.items()
        if NAME.fullmatch(name) and isinstance(value, str) and VALUE.fullmatch(value)
    }


def header(jar: Mapping[str, str]) -> dict[str, str]:
    """Give the headers of a request that carries *jar*."""
    return {"Cookie": "; ".join(f"{name}={value}" for name, value in jar.items())} if jar else {}
