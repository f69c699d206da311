"""Measure the lag of an event loop: how late its callbacks run because other callbacks keep the loop busy."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

BUSY_INTERVAL_SECONDS = 0.02
"""Seconds between two samples while a server of the process answers requests."""

IDLE_INTERVAL_SECONDS = 0.25
"""Seconds between two samples while no server answers requests, so that an idle process hardly uses the CPU."""

LAG_BUCKET_SECONDS = tuple(
    float(f"{step}e{exponent}") for exponent in range(-3, 2) for step in (1, 1.3, 1.8, 2.4, 3.2, 4.2, 5.6, 7.5)
)
"""Upper bounds of the histogram buckets, in seconds: eight per power of ten, from 1 ms to 75 s."""


class Server(Protocol):
    """A server whose requests run on the loop."""

    in_flight: int
    loop_lag: LoopLagSampler | None


class LoopLagSampler:
    """Samples the lag of one event loop with a timer.

    A stall delays all callbacks that are due while it lasts, not only the timer. Therefore a sample that is later than
    the interval also counts the samples that the stall has prevented. The histogram then shows the lag at a random
    moment, and not the lag of a random sample.

    Args:
        always_busy: Whether the timer is always fast.

    Attributes:
        servers: The servers of the loop. The timer is faster while one of them has requests in flight.
        counts: The number of samples per bucket of `LAG_BUCKET_SECONDS`; the last number counts higher lags.
        seconds: The sum of all samples.
        longest: The highest sample.
    """

    def __init__(self, *, always_busy: bool = False) -> None:
        self._always_busy = always_busy
        self.servers: list[Server] = []
        self.counts = [0] * (len(LAG_BUCKET_SECONDS) + 1)
        self.seconds = 0.0
        self.longest = 0.0
        self._is_idle = True
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timer on the running loop."""
        self._schedule()

    def wake(self) -> None:
        """Sample at the fast interval from now on, because a request has arrived."""
        if self._is_idle:
            self.stop()
            self._schedule()

    def stop(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def record(self, lag: float) -> None:
        """Count a sample of *lag* seconds and the samples that a stall of this length has prevented."""
        self.longest = max(self.longest, lag)
        while True:
            self.counts[bisect_left(LAG_BUCKET_SECONDS, lag)] += 1
            self.seconds += lag
            lag -= BUSY_INTERVAL_SECONDS
            if lag <= 0:
                return

    def _schedule(self) -> None:
        self._is_idle = not (self._always_busy or any(server.in_flight for server in self.servers))
        interval = IDLE_INTERVAL_SECONDS if self._is_idle else BUSY_INTERVAL_SECONDS
        # Not the loop's own clock: uvloop updates it only once per pass.
        self._due = time.monotonic() + interval
        self._timer = asyncio.get_running_loop().call_later(interval, self._tick)

    def _tick(self) -> None:
        self.record(max(0.0, time.monotonic() - self._due))
        self._schedule()


_samplers: dict[asyncio.AbstractEventLoop, LoopLagSampler] = {}
"""The sampler of each event loop that runs servers."""


@contextmanager
def sample_loop_lag(server: Server) -> Iterator[LoopLagSampler]:
    """Sample the lag of the running loop while *server* runs; all servers of a loop share one sampler."""
    loop = asyncio.get_running_loop()
    sampler = _samplers.setdefault(loop, LoopLagSampler())
    sampler.servers.append(server)
    server.loop_lag = sampler
    if len(sampler.servers) == 1:
        sampler.start()
    try:
        yield sampler
    finally:
        sampler.servers.remove(server)
        if not sampler.servers:
            sampler.stop()
            del _samplers[loop]
