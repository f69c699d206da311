"""Meters: what servers say at `/metrics` of the requests they have answered and of what is open in them."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from gymsdk import http

SAMPLE = re.compile(r'^gymsdk_(\w+)\{server="([^"]*)"(?:,route="([^"]*)")?[^}]*\} ([^ ]+)$', re.MULTILINE)

OPEN = frozenset({"sessions_open", "agent_sessions_open", "episodes_playing"})
"""The gauges that are 0 where nobody is at anything."""

OURS = frozenset({"/metrics", "/readyz", "/livez", "/healthz", "/health", "/"})
"""Routes that count as no work: a bench asks them itself."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Requests answered so far by each server, and how much is open in all of them together."""

    requests: Mapping[str, int]
    open: int


async def reading(urls: Iterable[str], carried: Callable[[str], http.Headers]) -> Reading:
    """Give what the servers at *urls* say, asked with what is *carried* there; who tells nothing was asked nothing."""
    answers = await asyncio.gather(*(http.get(f"{url}/metrics", headers=carried(url), timeout=30.0) for url in urls))
    samples = [sample for answer in answers if answer.ok for sample in _samples(answer.text)]
    requests = Counter[str]()
    for name, server, route, value in samples:
        if name == "requests_total" and route not in OURS:
            requests[server] += round(value)
    return Reading(dict(requests), round(sum(value for name, _, _, value in samples if name in OPEN)))


def _samples(text: str) -> Iterator[tuple[str, str, str, float]]:
    for name, server, route, value in SAMPLE.findall(text):
        yield name, server, route, float(value)


def between(before: Reading, after: Reading) -> dict[str, int]:
    """Give the requests that each server answered from *before* to *after*, of those that answered any."""
    asked = {name: count - before.requests.get(name, 0) for name, count in after.requests.items()}
    return {name: count for name, count in asked.items() if count}
