"""Admission: how many episodes one server plays at once, and how many more may wait for a place."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gymsdk.servers.app import ServerOverloaded

DEFAULT_RETRY_SECONDS = 5.0
"""Seconds after which a refused client may come back while no episode has ended by which to tell."""

MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0
"""Seconds that a refused client is asked to wait, at least and at most."""

MEASURE_SECONDS = 1.0
"""Seconds over which the rate of ended episodes is measured."""


class EpisodeSlots:
    """Grants *places* episodes a place, in the order in which they ask; *queue* more may wait.

    Any further one is refused with the time that the queue needs to drain at the rate at which episodes end.
    """

    def __init__(self, places: int, queue: int) -> None:
        self._places = places
        self._queue = queue
        self._taken = 0
        self._waiting: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._ended = 0
        self._rate = 0.0
        self._period_began = time.monotonic()

    @property
    def taken(self) -> int:
        """How many places are taken."""
        return self._taken

    @property
    def waiting(self) -> int:
        """How many episodes wait for a place."""
        return len(self._waiting)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold a place inside the block, once there is one.

        Raises:
            Overloaded: The queue is full as well.
        """
        await self._acquire()
        try:
            yield
        finally:
            self._release()

    async def _acquire(self) -> None:
        if self._taken < self._places and not self._waiting:
            self._taken += 1
            return
        if len(self._waiting) >= self._queue:
            sentence = f"all {self._places} places are taken by episodes, and {self._queue} more wait"
            raise ServerOverloaded(
                f"{sentence}; come back later, or send fewer at once", retry_after=self._drain_time()
            )
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[granted] = None
        try:
            await granted
        except asyncio.CancelledError:
            # A cancelled request leaves the queue, or gives back the place that it was granted meanwhile.
            self._waiting.pop(granted, None)
            if not granted.cancelled():
                self._pass_on()
            raise

    def _release(self) -> None:
        self._ended += 1
        self._measure()
        self._pass_on()

    def _pass_on(self) -> None:
        """Grant a place that has become free to the first who waits."""
        while self._waiting:
            granted, _ = self._waiting.popitem(last=False)
            # The request may be cancelled, and not know it yet.
            if not granted.done():
                granted.set_result(None)
                return
        self._taken -= 1

    def _drain_time(self) -> float:
        self._measure()
        seconds = len(self._waiting) / self._rate if self._rate else DEFAULT_RETRY_SECONDS
        return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, seconds))

    def _measure(self) -> None:
        now = time.monotonic()
        if now - self._period_began >= MEASURE_SECONDS:
            self._rate = self._ended / (now - self._period_began)
            self._ended, self._period_began = 0, now
