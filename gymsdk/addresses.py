"""Addresses: hosts as they are told apart, URLs as they may be told to anybody."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

ANYWHERE = frozenset({"", "0.0.0.0", "::"})  # noqa: S104  # told apart, not bound here
"""Hosts that stand for all of a machine's."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches *host*."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def near(host: str) -> str:
    """Give the host at which this machine reaches what listens at *host*."""
    if host not in ANYWHERE:
        return host
    return "::1" if ":" in host else "127.0.0.1"


def public(text: str) -> str:
    """Give *text* without what a URL in it says of who asks: a user, a password, a query."""
    return re.sub(r"(?<=://)[^/@\s]+@|(?<=\S)\?\S*", "", text) if "://" in text else text


def several(given: str | Iterable[str]) -> tuple[str, ...]:
    """Give the addresses *given*, each once: texts, any of which may name several, separated by commas."""
    texts = [given] if isinstance(given, str) else given
    return tuple(dict.fromkeys(each.strip() for text in texts for each in text.split(",") if each.strip()))
