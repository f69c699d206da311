"""Read the metrics of servers before and after a load, and compute the differences."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import urlsplit

from gymsdk.bench.report import LoopLag, Traffic
from gymsdk.http import client
from gymsdk.observability.loop_lag import LAG_BUCKET_SECONDS
from gymsdk.observability.metrics import ParsedSample, parse_samples

OPEN_GAUGES = frozenset({"sessions_open", "agent_sessions_open", "episodes_playing"})
"""Gauges that are 0 on an idle server."""

OPERATIONAL_ROUTES = frozenset({"/metrics", "/readyz", "/livez", "/healthz", "/health", "/"})
"""Routes that do not count as load, because the benchmark requests them itself."""

ROUTE_COUNTERS = {"requests_total": "requests", "request_bytes_total": "received", "response_bytes_total": "sent"}
"""The counters that are summed over all routes of a server, with the names under which a reading has them."""

WAIT_COUNTERS = {
    "admission_seconds_total": "admission",
    "episode_queue_seconds_total": "queue",
    "serialise_seconds_total": "serialise",
}
"""The counters of a server that has `/run`, in seconds, with the names under which a reading has them."""

RUN_ROUTE = "/run"

LOCAL_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})

ProcessKey: TypeAlias = tuple[str, int]
"""The host and the ID of a process."""


@dataclass(frozen=True, slots=True)
class LagReading:
    """The histogram of a process's event-loop lag: cumulative counts per bucket, and the maximum since the start.

    Attributes:
        server: One of the servers of the process, and the number of the process if it is one of several workers.
        counts: The number of samples up to each of `LAG_BUCKET_SECONDS`, and of all samples.
        longest: The longest lag in seconds.
    """

    server: str
    counts: Sequence[float]
    longest: float


@dataclass(frozen=True, slots=True)
class MetricsReading:
    """The counters of servers at one moment.

    Attributes:
        requests: The requests that each server has answered.
        open: The open sessions and episodes of all servers.
        counters: All counters by name and server.
        lags: The event-loop lag by process.
    """

    requests: Mapping[str, int]
    open: int
    counters: Mapping[tuple[str, str], float] = field(default_factory=dict)
    lags: Mapping[ProcessKey, LagReading] = field(default_factory=dict)


async def read_metrics(urls: Iterable[str], headers_for: Callable[[str], client.Headers]) -> MetricsReading:
    """Read the metrics of the servers at *urls*. A server without metrics counts as idle."""
    listed = list(urls)
    answers = await asyncio.gather(
        *(
            client.get(f"{url}/metrics", headers=headers_for(url), timeout=30.0, retry=client.DEFAULT_RETRY)
            for url in listed
        )
    )
    samples = {url: parse_samples(answer.text) for url, answer in zip(listed, answers, strict=True) if answer.ok}
    counters: defaultdict[tuple[str, str], float] = defaultdict(float)
    for name, labels, value in (sample for url_samples in samples.values() for sample in url_samples):
        if (counter := _find_counter(name, labels)) is not None:
            counters[counter, labels["server"]] += value
    lags: dict[ProcessKey, LagReading] = {}
    for url, url_samples in samples.items():
        lags |= _read_lags(url, url_samples)
    return MetricsReading(
        requests={server: round(value) for (name, server), value in counters.items() if name == "requests"},
        open=round(
            sum(value for url_samples in samples.values() for name, _, value in url_samples if name in OPEN_GAUGES)
        ),
        counters=counters,
        lags=lags,
    )


def _find_counter(name: str, labels: Mapping[str, str]) -> str | None:
    """Return the name of the counter that a sample belongs to, or `None` if the benchmark does not use it."""
    if name in ROUTE_COUNTERS:
        return None if labels["route"] in OPERATIONAL_ROUTES else ROUTE_COUNTERS[name]
    if name == "request_seconds_sum" and labels["route"] == RUN_ROUTE:
        return "run"
    return WAIT_COUNTERS.get(name)


def _read_lags(url: str, samples: Sequence[ParsedSample]) -> dict[ProcessKey, LagReading]:
    """Return the event-loop lag of the processes behind *url*: one, or one for each worker."""
    host = urlsplit(url).hostname or ""
    by_worker: defaultdict[str, list[ParsedSample]] = defaultdict(list)
    for sample in samples:
        by_worker[sample[1].get("worker", "")].append(sample)
    lags = {}
    for worker, worker_samples in by_worker.items():
        ids = [round(value) for name, _, value in worker_samples if name == "process_id"]
        if (lag := _read_lag(worker_samples, worker)) is not None:
            lags["127.0.0.1" if host in LOCAL_HOSTS else host, ids[0] if ids else 0] = lag
    return lags


def _read_lag(samples: Sequence[ParsedSample], worker: str) -> LagReading | None:
    buckets = [(labels["server"], value) for name, labels, value in samples if name == "event_loop_lag_seconds_bucket"]
    longest = [value for name, _, value in samples if name == "event_loop_lag_max_seconds"]
    # Servers of another version may have other buckets.
    if len(buckets) != len(LAG_BUCKET_SECONDS) + 1 or not longest:
        return None
    server = f"{buckets[0][0]}, worker {worker}" if worker else buckets[0][0]
    return LagReading(server, [value for _, value in buckets], longest[0])


@dataclass(frozen=True, slots=True)
class MetricsDifference:
    """What a load has added to the counters of servers.

    Attributes:
        before: The reading before the load.
        after: The reading after the load.
    """

    before: MetricsReading
    after: MetricsReading

    def count_requests(self) -> dict[str, int]:
        """Return the number of requests that each server answered, without servers that had none."""
        counts = {name: count - self.before.requests.get(name, 0) for name, count in self.after.requests.items()}
        return {name: count for name, count in counts.items() if count}

    def compute_traffic(self, rollouts: int) -> dict[str, Traffic]:
        """Return the bytes per rollout of each server that had requests."""
        return {
            server: Traffic(
                received=round(self._get_added("received", server) / rollouts, 1),
                sent=round(self._get_added("sent", server) / rollouts, 1),
            )
            for server in self.count_requests()
        }

    def sum_run_seconds(self) -> dict[str, float]:
        """Return the seconds that all `/run` requests took in the servers, and those of `WAIT_COUNTERS`, by name."""
        servers = [server for (name, server) in self.after.counters if name == "run"]
        names = ("run", *WAIT_COUNTERS.values())
        return {name: sum(self._get_added(name, server) for server in servers) for name in names}

    def compute_lags(self, labels: Mapping[int, str]) -> dict[str, LoopLag]:
        """Return the event-loop lag of each process.

        Args:
            labels: The labels of processes on this machine, by their IDs. Others are named after one of their servers.
        """
        summaries = {}
        for (host, pid), lag in self.after.lags.items():
            label = labels.get(pid, lag.server) if host in LOCAL_HOSTS else lag.server
            if (summary := summarise_lag(lag, self.before.lags.get((host, pid)))) is not None:
                summaries[label] = summary
        return summaries

    def _get_added(self, name: str, server: str) -> float:
        return self.after.counters.get((name, server), 0.0) - self.before.counters.get((name, server), 0.0)


def summarise_lag(after: LagReading, before: LagReading | None) -> LoopLag | None:
    """Return the percentiles and the maximum of the samples between two readings; `None` without samples."""
    earlier = before.counts if before is not None else [0.0] * len(after.counts)
    counts = [count - earlier_count for count, earlier_count in zip(after.counts, earlier, strict=True)]
    if not counts[-1]:
        return None
    if before is None or after.longest > before.longest:
        longest = after.longest
    else:
        # The longest lag is older than the load; the last bucket with a sample bounds the longest lag of the load.
        longest = min(_find_quantile(counts, 1.0, after.longest), after.longest)
    p50, p99 = (min(_find_quantile(counts, share, after.longest), longest) for share in (0.5, 0.99))
    return LoopLag(p50=round(1e3 * p50, 3), p99=round(1e3 * p99, 3), max=round(1e3 * longest, 3))


def _find_quantile(counts: Sequence[float], share: float, longest: float) -> float:
    """Return the quantile of a histogram with cumulative *counts*, linear within its bucket, in seconds."""
    total = counts[-1]
    bounds = [0.0, *LAG_BUCKET_SECONDS, longest]
    index = next(index for index, count in enumerate(counts) if count >= share * total)
    below = counts[index - 1] if index else 0.0
    return bounds[index] + (bounds[index + 1] - bounds[index]) * (share * total - below) / (counts[index] - below)
