"""Limits on the load that requests put on a process: memory for large bodies, and work per pass of the event loop."""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, MutableMapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

LARGE_BODY_BYTES = 4 * 2**20
"""Bytes from which a body counts; the number of requests bounds smaller bodies."""

HEAVY_BODY_BYTES = 16 * 2**20
"""Bytes in memory after parsing from which a smaller body counts too."""

MEMORY_SHARE = 4
"""By default, large bodies may take this fraction (one in `MEMORY_SHARE`) of the machine's memory."""

_RESERVATION_KEY = "gymsdk.reserved_bytes"
_CGROUP_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")


_budgets: WeakKeyDictionary[asyncio.AbstractEventLoop, BodyBudget] = WeakKeyDictionary()

TARGET_PASS_SECONDS = 0.02
"""Longest time that one pass of the event loop should take, in seconds."""

MAX_QUOTA = 64
"""Most requests that start in one pass."""

PACE_MEASURE_SECONDS = 0.5
"""Seconds over which the rate of starts is measured."""


class BodyBudget:
    """Grants memory to large bodies in order of arrival.

    A body that is larger than the whole budget is admitted alone.
    """

    def __init__(self) -> None:
        self.used = 0
        self._waiting: deque[tuple[int, int, asyncio.Future[None]]] = deque()

    async def reserve(self, scope: MutableMapping[str, Any], size: int, max_bytes: int) -> None:
        """Wait until `size` bytes are free and reserve them for the request until `release`.

        Args:
            scope: The request's scope.
            size: The size of the body in bytes.
            max_bytes: The bytes that all large bodies may take.
        """
        if _RESERVATION_KEY in scope:
            return
        if self._waiting or not self._fits(size, max_bytes):
            granted = asyncio.get_running_loop().create_future()
            self._waiting.append((size, max_bytes, granted))
            try:
                await granted
            except asyncio.CancelledError:
                if granted.done() and not granted.cancelled():
                    self._free(size)
                else:
                    self._waiting = deque(entry for entry in self._waiting if entry[2] is not granted)
                    self._admit()
                raise
        else:
            self.used += size
        scope[_RESERVATION_KEY] = size

    def resize(self, scope: MutableMapping[str, Any], size: int) -> None:
        """Change the reservation of a request without waiting, because the memory is in use already."""
        previous = scope.get(_RESERVATION_KEY, 0)
        scope[_RESERVATION_KEY] = size
        self._free(previous - size)

    def release(self, scope: MutableMapping[str, Any]) -> None:
        """Free the reservation of a request, if it has one."""
        if (size := scope.pop(_RESERVATION_KEY, None)) is not None:
            self._free(size)

    def _free(self, size: int) -> None:
        self.used -= size
        self._admit()

    def _fits(self, size: int, max_bytes: int) -> bool:
        return not self.used or self.used + size <= max_bytes

    def _admit(self) -> None:
        while self._waiting and self._fits(*self._waiting[0][:2]):
            size, _, granted = self._waiting.popleft()
            if not granted.done():
                self.used += size
                granted.set_result(None)


def body_budget() -> BodyBudget:
    """Return the budget that all servers on the running event loop share."""
    return _budgets.setdefault(asyncio.get_running_loop(), BodyBudget())


@cache
def default_body_budget() -> int:
    """Return a quarter of the memory of the machine, or of the container if its limit is lower."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # The file may not exist, or contain `max`.
    with suppress(OSError, ValueError):
        memory = min(memory, int(_CGROUP_MEMORY_LIMIT.read_text()))
    return memory // MEMORY_SHARE


class Pacer:
    """Starts work in the order of arrival, with a bound per pass of the event loop that keeps each pass short.

    One pass runs every callback that is ready. If a server started thousands of requests at once, one pass would take
    seconds, and so would the response to a health check, which takes several passes. The number of starts per pass
    doubles while passes are shorter than `target` seconds and halves while they are longer. It is never less than one,
    so the queue always advances. Work that waits elsewhere, for example for a model, does not lengthen a pass and does
    not hold back other work.
    """

    def __init__(self, *, target: float = TARGET_PASS_SECONDS, max_quota: int = MAX_QUOTA) -> None:
        self._target = target
        self._max_quota = max_quota
        self._quota = max_quota
        self._left = max_quota
        self._waiting: OrderedDict[Hashable, Callable[[], None]] = OrderedDict()
        self._is_scheduled = False
        self._pass_began = 0.0
        self._starts = 0
        self._period_began = time.monotonic()
        self._rate = 0.0

    def __len__(self) -> int:
        """Return the number of queued pieces of work."""
        return len(self._waiting)

    def start(self, key: Hashable, work: Callable[[], None]) -> None:
        """Run `work` now, or in a later pass if other work is queued or this pass has used its quota."""
        if self._waiting or self._left <= 0:
            self._waiting[key] = work
        self._schedule()
        if key not in self._waiting:
            self._run(work)

    def drop(self, key: Hashable) -> None:
        """Remove the queued work of `key`, if there is any."""
        self._waiting.pop(key, None)

    def drain_time(self) -> float:
        """Estimate the seconds until all queued work has started."""
        return len(self._waiting) / self._rate if self._rate else 0.0

    def _run(self, work: Callable[[], None]) -> None:
        self._left -= 1
        self._starts += 1
        work()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._pass_began = time.perf_counter()
            asyncio.get_running_loop().call_soon(self._next_pass)

    def _next_pass(self) -> None:
        """Adapt the quota to the duration of the last pass, and start queued work."""
        self._is_scheduled = False
        took = time.perf_counter() - self._pass_began
        if took > self._target:
            self._quota = max(1, self._quota // 2)
        elif self._left <= 0:
            self._quota = min(self._max_quota, self._quota * 2)
        self._measure()
        self._left = self._quota
        if self._waiting:
            self._schedule()
        while self._waiting and self._left > 0:
            self._run(self._waiting.popitem(last=False)[1])

    def _measure(self) -> None:
        now = time.monotonic()
        if now - self._period_began >= PACE_MEASURE_SECONDS:
            self._rate = self._starts / (now - self._period_began)
            self._starts, self._period_began = 0, now
