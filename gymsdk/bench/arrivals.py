"""The open loop: rollouts that arrive at a given rate, whether or not the servers have answered the earlier ones."""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field

from gymsdk.bench.report import OpenLoop, compute_percentile
from gymsdk.rollouts.jobs import Job

KEEPING_UP_SHARE = 0.95
"""The share of the offered rate that servers must achieve to count as keeping up."""

TRIMMED_SHARE = 0.1
"""The share of arrivals and of completions at both ends that the rates leave out: a load starts and ends with few."""


@dataclass(slots=True)
class ArrivalLog:
    """When the rollouts of an open loop were due, were sent and were complete, in seconds after the start.

    Attributes:
        due: When each rollout was due.
        late: How long after that the load generator sent each rollout that did not wait for the limit.
        waits: How long each rollout waited for fewer outstanding rollouts, or because the load generator was late.
        completed: When each rollout was complete, in the order of completion.
        outstanding: The number of outstanding rollouts.
        most: The highest number of outstanding rollouts.
        delayed: How many rollouts waited for the limit.
    """

    due: array[float] = field(default_factory=lambda: array("d"))
    late: array[float] = field(default_factory=lambda: array("d"))
    waits: array[float] = field(default_factory=lambda: array("d"))
    completed: array[float] = field(default_factory=lambda: array("d"))
    outstanding: int = 0
    most: int = 0
    delayed: int = 0

    def record_sent(self, due: float, now: float, *, delayed: bool) -> None:
        """Record that a rollout that was due at *due* is sent at *now*; *delayed* if it waited for the limit."""
        self.due.append(due)
        self.waits.append(now - due)
        if delayed:
            self.delayed += 1
        else:
            self.late.append(now - due)
        self.outstanding += 1
        self.most = max(self.most, self.outstanding)

    def record_completed(self, now: float) -> None:
        """Record that a rollout is complete."""
        self.completed.append(now)
        self.outstanding -= 1

    def summarise(self, rate: float) -> OpenLoop:
        """Return the offered and the achieved rate of a load that was to have *rate* arrivals per second."""
        offered, achieved = compute_rate(self.due), compute_rate(self.completed)
        keeps_up = None
        if offered is not None and achieved is not None:
            keeps_up = achieved >= KEEPING_UP_SHARE * offered
        return OpenLoop(
            rate=rate,
            offered=None if offered is None else round(offered, 2),
            achieved=None if achieved is None else round(achieved, 2),
            keeps_up=keeps_up,
            most=self.most,
            delayed=self.delayed,
            late_p99=round(1e3 * compute_percentile(sorted(self.late), 0.99), 3) if self.late else 0.0,
        )


def compute_rate(times: array[float]) -> float | None:
    """Return the events per second in the middle of *times*, which are in order, or `None` if there are too few.

    The rates of arrivals and of completions are then comparable: a constant latency moves the completions, but does not
    spread them.
    """
    trimmed = times[int(TRIMMED_SHARE * len(times)) : len(times) - int(TRIMMED_SHARE * len(times))]
    if len(trimmed) < 2 or trimmed[-1] <= trimmed[0]:  # noqa: PLR2004  # a rate needs an interval
        return None
    return (len(trimmed) - 1) / (trimmed[-1] - trimmed[0])


def draw_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Yield the times of a Poisson process with *rate* arrivals per second, in seconds after the start."""
    rng, arrival = random.Random(seed), 0.0
    while True:
        arrival += rng.expovariate(rate)
        yield arrival


async def send_at_arrivals(
    jobs: Iterable[Job],
    arrivals: Iterable[float],
    send: Callable[[Job], Awaitable[None]],
    record: Callable[[float], None],
    *,
    limit: int,
    seconds: float | None = None,
) -> ArrivalLog:
    """Send each job at its arrival time, or as soon as fewer than *limit* rollouts are outstanding.

    Args:
        jobs: The jobs.
        arrivals: The time of each job, in seconds after the start.
        send: Sends a job and waits for its result.
        record: Called with the latency of each job. The latency counts from the arrival time: a job that waits to be
            sent is late for its client, too.
        limit: The most outstanding rollouts.
        seconds: The time after which no more jobs arrive.

    Returns:
        The times of all jobs, once all are complete.
    """
    log, slots, start = ArrivalLog(), asyncio.Semaphore(limit), time.perf_counter()

    async def run(job: Job, due: float) -> None:
        try:
            await send(job)
        finally:
            slots.release()
        now = time.perf_counter() - start
        log.record_completed(now)
        record(now - due)

    async with asyncio.TaskGroup() as group:
        for job, due in zip(jobs, arrivals, strict=False):
            if seconds is not None and due > seconds:
                break
            if (remaining := due - (time.perf_counter() - start)) > 0:
                await asyncio.sleep(remaining)
            # Before `acquire`: afterwards, a rollout that waited looks like one that did not.
            delayed = slots.locked()
            await slots.acquire()
            log.record_sent(due, time.perf_counter() - start, delayed=delayed)
            group.create_task(run(job, due))
    return log
