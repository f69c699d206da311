"""Pacing: bounds the work that a server starts in one pass of its event loop."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

TARGET = 0.02
"""Seconds that one pass of the event loop should take at most."""

MOST = 64
"""Pieces of work that start in one pass at most."""

PERIOD = 0.5
"""Seconds over which the rate of starts is measured."""


class Pacer:
    """Starts work in the order it arrives, and only so much per pass of the event loop that a pass stays short.

    One pass runs every callback that is ready. If a server started thousands of requests at once, one pass would take
    seconds, and so would the answer to a health request, which takes several passes. The number of starts per pass
    doubles while passes are shorter than *target* seconds and halves while they are longer. It is never less than one,
    so the queue always advances. Work that waits elsewhere, for example for a model, does not lengthen a pass and does
    not hold back other work.
    """

    def __init__(self, *, target: float = TARGET, most: int = MOST) -> None:
        self._target = target
        self._most = most
        self._quota = most
        self._left = most
        self._waiting: OrderedDict[Hashable, Callable[[], None]] = OrderedDict()
        self._is_scheduled = False
        self._pass_began = 0.0
        self._starts = 0
        self._period_began = time.monotonic()
        self._rate = 0.0

    def __len__(self) -> int:
        """Return how many pieces of work wait."""
        return len(self._waiting)

    def start(self, key: Hashable, work: Callable[[], None]) -> None:
        """Run *work* now, or in a later pass if other work waits or this pass has started enough."""
        if self._waiting or self._left <= 0:
            self._waiting[key] = work
        self._schedule()
        if key not in self._waiting:
            self._run(work)

    def drop(self, key: Hashable) -> None:
        """Forget the waiting work of *key*, if there is any."""
        self._waiting.pop(key, None)

    def drain_time(self) -> float:
        """Estimate the seconds until all work that waits has started."""
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
        """Adapt the quota to how long the last pass took, and start waiting work."""
        self._is_scheduled = False
        took = time.perf_counter() - self._pass_began
        if took > self._target:
            self._quota = max(1, self._quota // 2)
        elif self._left <= 0:
            self._quota = min(self._most, self._quota * 2)
        self._measure()
        self._left = self._quota
        if self._waiting:
            self._schedule()
        while self._waiting and self._left > 0:
            self._run(self._waiting.popitem(last=False)[1])

    def _measure(self) -> None:
        now = time.monotonic()
        if now - self._period_began >= PERIOD:
            self._rate = self._starts / (now - self._period_began)
            self._starts, self._period_began = 0, now
