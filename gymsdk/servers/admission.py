"""Limits how many episodes a server plays at the same time and how many wait."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gymsdk.servers.app import ServerOverloaded

DEFAULT_RETRY_SECONDS = 5.0
"""`Retry-After` in seconds while no episode has ended yet, so that no rate is known."""

MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0
"""Shortest and longest `Retry-After`, in seconds."""

MEASURE_SECONDS = 1.0
"""Seconds over which the rate of ended episodes is measured."""


class EpisodeSlots:
    """Grants episodes a slot in the order of their requests.

    A request beyond the queue is rejected with the time that the queue needs to drain at the current rate.

    Args:
        slots: How many episodes play at the same time.
        queue: How many more may wait.
    """

    def __init__(self, slots: int, queue: int) -> None:
        self._slots = slots
        self._queue = queue
        self._taken = 0
        self._waiting: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._ended = 0
        self._rate = 0.0
        self._period_began = time.monotonic()

    @property
    def taken(self) -> int:
        """The number of slots in use."""
        return self._taken

    @property
    def waiting(self) -> int:
        """The number of episodes that wait for a slot."""
        return len(self._waiting)

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[None]:
        """Wait for a slot and hold it inside the block.

        Raises:
            ServerOverloaded: All slots are taken and the queue is full.
        """
        await self._take_slot()
        try:
            yield
        finally:
            self._release_slot()

    async def _take_slot(self) -> None:
        if self._taken < self._slots and not self._waiting:
            self._taken += 1
            return
        if len(self._waiting) >= self._queue:
            sentence = f"all {self._slots} slots are taken by episodes, and {self._queue} more wait"
            raise ServerOverloaded(
                f"{sentence}; come back later, or send fewer at once", retry_after=self._drain_time()
            )
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[granted] = None
        try:
            await granted
        except asyncio.CancelledError:
            # A cancelled request leaves the queue, or returns the slot that it was granted meanwhile.
            self._waiting.pop(granted, None)
            if not granted.cancelled():
                self._pass_on()
            raise

    def _release_slot(self) -> None:
        self._ended += 1
        self._measure()
        self._pass_on()

    def _pass_on(self) -> None:
        """Grant a free slot to the first episode in the queue."""
        while self._waiting:
            granted, _ = self._waiting.popitem(last=False)
            # The request may be cancelled without having run yet.
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
