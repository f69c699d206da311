"""Meters: what servers say at `/metrics` of the requests they have answered and of what is open in them."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from gymsdk.http import client


class Latency(BaseModel):
    """Milliseconds from a rollout's request to its answer: half of them took at most *p50*, and so on."""

    model_config = ConfigDict(frozen=True)

    p50: float
    p90: float
    p99: float


class Memory(BaseModel):
    """Megabytes that a process and its workers had before a load, halfway, after it, and at most meanwhile."""

    model_config = ConfigDict(frozen=True)

    before: float
    half: float
    after: float
    most: float


class LoadResult(BaseModel):
    """What came of one load: *rollouts* of one environment, *at_once* of them in flight.

    *cpu* is milliseconds a rollout by process, *requests* are HTTP requests a rollout by server, *calls* those of the
    model. *wrong* counts rewards that differ from the recording's, *expected* is its mean; both are missing where
    nobody knows them. *open* is what sessions and episodes were left when nobody was at anything.
    """

    model_config = ConfigDict(frozen=True)

    environment: str
    at_once: int
    rollouts: int
    seconds: float
    rate: float
    latency: Latency | None
    cpu: dict[str, float]
    memory: dict[str, Memory]
    calls: float
    requests: dict[str, float]
    reward: float | None
    expected: float | None
    wrong: int | None
    failures: dict[str, int]
    messages: dict[str, str]
    open: int

    @property
    def is_correct(self) -> bool:
        """Whether every rollout had its reward, none of them wrong."""
        return not (self.failures or self.wrong) and self.rollouts > 0


class BenchResult(BaseModel):
    """What was found of the servers of one environment: their start, where they are the bench's own, and the loads.

    Seconds until ready, seconds of CPU until then, megabytes when ready.
    """

    model_config = ConfigDict(frozen=True)

    environment: str
    model: str
    ready: float | None
    ready_cpu: float | None
    ready_memory: float | None
    loads: tuple[LoadResult, ...]


def compute_latency(seconds: Sequence[float]) -> Latency | None:
    """Give the percentiles of some *seconds*, in milliseconds; `None` where there are none."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    p50, p90, p99 = (
        round(1e3 * ordered[min(len(ordered) - 1, int(each * len(ordered)))], 3) for each in (0.5, 0.9, 0.99)
    )
    return Latency(p50=p50, p90=p90, p99=p99)


def compute_mean(values: Sequence[float]) -> float | None:
    """Give the mean of some *values*, `None` where there are none."""
    return sum(values) / len(values) if values else None


SAMPLE_PATTERN = re.compile(r'^gymsdk_(\w+)\{server="([^"]*)"(?:,route="([^"]*)")?[^}]*\} ([^ ]+)$', re.MULTILINE)

OPEN_GAUGES = frozenset({"sessions_open", "agent_sessions_open", "episodes_playing"})
"""The gauges that are 0 where nobody is at anything."""

OPERATIONAL_ROUTES = frozenset({"/metrics", "/readyz", "/livez", "/healthz", "/health", "/"})
"""Routes that count as no work: a bench asks them itself."""


@dataclass(frozen=True, slots=True)
class MetricsReading:
    """Requests answered so far by each server, and how much is open in all of them together."""

    requests: Mapping[str, int]
    open: int


async def read_metrics(urls: Iterable[str], carried: Callable[[str], client.Headers]) -> MetricsReading:
    """Give what the servers at *urls* say, asked with what is *carried* there; who tells nothing was asked nothing."""
    answers = await asyncio.gather(*(client.get(f"{url}/metrics", headers=carried(url), timeout=30.0) for url in urls))
    samples = [sample for answer in answers if answer.ok for sample in _parse_samples(answer.text)]
    requests = Counter[str]()
    for name, server, route, value in samples:
        if name == "requests_total" and route not in OPERATIONAL_ROUTES:
            requests[server] += round(value)
    return MetricsReading(dict(requests), round(sum(value for name, _, _, value in samples if name in OPEN_GAUGES)))


def _parse_samples(text: str) -> Iterator[tuple[str, str, str, float]]:
    for name, server, route, value in SAMPLE_PATTERN.findall(text):
        yield name, server, route, float(value)


def count_requests_between(before: MetricsReading, after: MetricsReading) -> dict[str, int]:
    """Give the requests that each server answered from *before* to *after*, of those that answered any."""
    asked = {name: count - before.requests.get(name, 0) for name, count in after.requests.items()}
    return {name: count for name, count in asked.items() if count}
