"""Timers that are cheap to start and to cancel, for deadlines that hardly any operation reaches.

A timer of the event loop costs about as much as parsing a short response, and most are cancelled within milliseconds.
The timers of this module share one timer of the loop for each tenth of a second.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import weakref
from collections.abc import Callable
from types import TracebackType
from weakref import WeakKeyDictionary

TICK_SECONDS = 0.1
"""By how much a shared timer may be late."""

MIN_SHARED_SECONDS = 5.0
"""Shorter timers are not shared, because they would be late by more than a fiftieth of their time."""


class SharedTimer:
    """A timer that shares its tick with others; `cancel` stops it."""

    __slots__ = ("_callback", "_timers")

    def __init__(self, callback: Callable[[], object], timers: dict[SharedTimer, None]) -> None:
        self._callback = callback
        self._timers = timers
        timers[self] = None

    def cancel(self) -> None:
        """Do not call the callback any more."""
        timers = self._timers
        timers.pop(self, None)
        if not timers:
            # An empty dictionary keeps the memory of its largest size, about 10 kB, until its tick comes.
            timers.clear()

    def run(self) -> None:
        """Call the callback."""
        self._callback()


class _Clock:
    """The shared timers of one event loop, by the tick in which they end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # The clock is the value of a dictionary whose weak key is the loop, so it must not keep the loop or its timers.
        self._loop = weakref.ref(loop)
        self._ticks: dict[int, dict[SharedTimer, None]] = {}
        self._order: list[int] = []
        self._next_tick: int | None = None

    def start(self, when: float, callback: Callable[[], object]) -> SharedTimer:
        tick = math.ceil(when / TICK_SECONDS)
        timers = self._ticks.get(tick)
        if timers is None:
            timers = self._ticks[tick] = {}
            heapq.heappush(self._order, tick)
            if self._next_tick is None or tick < self._next_tick:
                self._wait_for(tick)
        return SharedTimer(callback, timers)

    def _wait_for(self, tick: int) -> None:
        loop = self._loop()
        assert loop is not None, "the loop runs"
        self._next_tick = tick
        loop.call_at(tick * TICK_SECONDS, self._run, tick)

    def _run(self, tick: int) -> None:
        """Run the timers of *tick*, and wait for the next tick that has any; an earlier tick may have come before."""
        if tick != self._next_tick:
            return
        self._next_tick = None
        due = self._ticks.pop(heapq.heappop(self._order))
        while self._order and not self._ticks[self._order[0]]:
            del self._ticks[heapq.heappop(self._order)]
        if self._order:
            self._wait_for(self._order[0])
        for timer in list(due):
            # A callback may cancel a timer of the same tick.
            if timer in due:
                del due[timer]
                self._call(timer)

    def _call(self, timer: SharedTimer) -> None:
        """Call the callback of *timer*; its error must not prevent the callbacks of other timers."""
        try:
            timer.run()
        except Exception as error:  # noqa: BLE001 - reported as the event loop reports the errors of callbacks
            if (loop := self._loop()) is not None:
                loop.call_exception_handler({"message": f"the callback of {timer!r} failed", "exception": error})


_clocks: WeakKeyDictionary[asyncio.AbstractEventLoop, _Clock] = WeakKeyDictionary()


def call_at(
    loop: asyncio.AbstractEventLoop, when: float, callback: Callable[[], object]
) -> SharedTimer | asyncio.TimerHandle:
    """Call *callback* at a time of the clock of *loop*, or up to `TICK_SECONDS` later; return the timer."""
    if when - loop.time() < MIN_SHARED_SECONDS:
        return loop.call_at(when, callback)
    clock = _clocks.get(loop)
    if clock is None:
        clock = _clocks[loop] = _Clock(loop)
    return clock.start(when, callback)


class timeout_at:  # noqa: N801 - a context manager, used like a function
    """Cancel the block at a time of the event loop's clock, like `asyncio.timeout_at`, but with a shared timer.

    Args:
        when: The time; `None` for no limit, so that only `expire` ends the block.

    Attributes:
        is_expired: Whether the block was cancelled by this timeout.

    Raises:
        TimeoutError: The time came inside the block.
    """

    __slots__ = ("_cancelling", "_task", "_timer", "_when", "is_expired")

    def __init__(self, when: float | None) -> None:
        self._when = when
        self.is_expired = False
        self._task: asyncio.Task[object] | None = None
        self._timer: SharedTimer | asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._task = task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a timeout must be used inside a task")
        self._cancelling = task.cancelling()
        if self._when is not None:
            self._timer = call_at(task.get_loop(), self._when, self.expire)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self._timer is not None:
            self._timer.cancel()
            # The timer refers to this object: without this line, each call would leave a reference cycle.
            self._timer = None
        if self.is_expired and task is not None:
            is_cancelled_by_others = task.uncancel() > self._cancelling
            if not is_cancelled_by_others and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def expire(self) -> None:
        """Cancel the block now; nothing happens before the block begins and after it has ended."""
        if self._task is not None and not self.is_expired:
            self.is_expired = True
            self._task.cancel()
