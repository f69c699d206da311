"""The results of a benchmark, and the request counters of servers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from gymsdk.http import client
from gymsdk.observability.metrics import parse_samples

OPEN_GAUGES = frozenset({"sessions_open", "agent_sessions_open", "episodes_playing"})
"""Gauges that are 0 on an idle server."""

OPERATIONAL_ROUTES = frozenset({"/metrics", "/readyz", "/livez", "/healthz", "/health", "/"})
"""Routes that do not count as load, because the benchmark requests them itself."""


class Latency(BaseModel):
    """Percentiles of the time from a rollout's request to its response, in milliseconds."""

    model_config = ConfigDict(frozen=True)

    p50: float
    p90: float
    p99: float


class Memory(BaseModel):
    """Memory of a process and its workers before, halfway through and after a load, and its maximum, in megabytes."""

    model_config = ConfigDict(frozen=True)

    before: float
    half: float
    after: float
    most: float


class LoadResult(BaseModel):
    """The result of one load.

    Attributes:
        concurrency: The concurrency.
        rate: Rollouts per second.
        cpu: Milliseconds of CPU per rollout, by process.
        calls: Model calls per rollout.
        requests: HTTP requests per rollout, by server.
        reward: The mean reward.
        expected: The mean reward of the recording, or `None` if it is unknown.
        wrong: How many rewards differ from the recording, or `None` if it is unknown.
        failures: How many rollouts had no reward, by kind.
        messages: The first message of each kind of failure.
        open: Sessions and episodes that were still open after the load.
    """

    model_config = ConfigDict(frozen=True)

    environment: str
    concurrency: int
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
        """Whether every rollout had a reward and no reward was wrong."""
        return not (self.failures or self.wrong) and self.rollouts > 0


class BenchResult(BaseModel):
    """The results of one environment's servers.

    Attributes:
        ready: Seconds until the servers were ready, or `None` if the benchmark did not start them.
        ready_cpu: Seconds of CPU until then.
        ready_memory: Megabytes of memory when ready.
        loads: The result of each load.
    """

    model_config = ConfigDict(frozen=True)

    environment: str
    model: str
    ready: float | None
    ready_cpu: float | None
    ready_memory: float | None
    loads: tuple[LoadResult, ...]


def compute_latency(seconds: Sequence[float]) -> Latency | None:
    """Return the percentiles of *seconds* in milliseconds, or `None` if there are none."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    p50, p90, p99 = (
        round(1e3 * ordered[min(len(ordered) - 1, int(each * len(ordered)))], 3) for each in (0.5, 0.9, 0.99)
    )
    return Latency(p50=p50, p90=p90, p99=p99)


def compute_mean(values: Sequence[float]) -> float | None:
    """Return the mean of *values*, or `None` if there are none."""
    return sum(values) / len(values) if values else None


@dataclass(frozen=True, slots=True)
class MetricsReading:
    """The requests that each server has answered so far, and the open sessions and episodes of all of them."""

    requests: Mapping[str, int]
    open: int


async def read_metrics(urls: Iterable[str], headers_for: Callable[[str], client.Headers]) -> MetricsReading:
    """Read the metrics of the servers at *urls*. A server without metrics counts as idle."""
    answers = await asyncio.gather(
        *(client.get(f"{url}/metrics", headers=headers_for(url), timeout=30.0) for url in urls)
    )
    samples = [sample for answer in answers if answer.ok for sample in parse_samples(answer.text)]
    requests = Counter[str]()
    for name, labels, value in samples:
        if name == "requests_total" and labels["route"] not in OPERATIONAL_ROUTES:
            requests[labels["server"]] += round(value)
    return MetricsReading(dict(requests), round(sum(value for name, _, value in samples if name in OPEN_GAUGES)))


def count_requests_between(before: MetricsReading, after: MetricsReading) -> dict[str, int]:
    """Return the number of requests that each server answered between two readings, without servers that had none."""
    counts = {name: count - before.requests.get(name, 0) for name, count in after.requests.items()}
    return {name: count for name, count in counts.items() if count}
