"""The pace at which requests start, slots for running episodes, and responses that are kept for repeated requests.

`IdempotencyCache` answers a repeated request with its first answer, so that no episode is played twice.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from gymsdk.edge.errors import ServerOverloaded
from gymsdk.memory import EpisodeCounter

TARGET_PASS_SECONDS = 0.02
"""Longest time that one pass of the event loop should take, in seconds."""

MAX_QUOTA = 64
"""Most requests that start in one pass."""

MAX_QUOTA_BEHIND = 8
"""Most requests that start in one pass while responses of models wait for their turn.

With more, requests start faster than they end; with fewer, a pass has so little work that its own cost counts.
"""

PACE_MEASURE_SECONDS = 0.5
"""Seconds over which the rate of starts is measured."""

DEFAULT_RETRY_SECONDS = 5.0
"""`Retry-After` in seconds while no episode has ended yet, so that no rate is known."""

MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0
"""Shortest and longest `Retry-After`, in seconds."""

MEASURE_SECONDS = 1.0
"""Seconds over which the rate of ended episodes is measured."""


class Rate:
    """How often something happens per second, measured over periods of *seconds*."""

    def __init__(self, seconds: float) -> None:
        self.per_second = 0.0
        self._seconds = seconds
        self._count = 0
        self._period_began = time.monotonic()

    def count(self) -> None:
        """Note that it happens."""
        self._count += 1

    def measure(self) -> None:
        """Compute the rate if a period is over."""
        now = time.monotonic()
        if now - self._period_began >= self._seconds:
            self.per_second = self._count / (now - self._period_began)
            self._count, self._period_began = 0, now


class Pacer:
    """Starts work in the order of arrival, with a bound per pass of the event loop that keeps each pass short.

    One pass runs every callback that is ready. If a server started thousands of requests at once, one pass would take
    seconds, and so would the response to a health check, which takes several passes. The number of starts per pass
    doubles while passes are shorter than `target` seconds and halves while they are longer. It is never less than one,
    so the queue always advances. Work that waits elsewhere, for example for a model, does not lengthen a pass and does
    not hold back other work.

    While `is_behind` says that started work waits for its turn, at most `MAX_QUOTA_BEHIND` pieces start per pass. Then
    work ends before all other work has started, so that the caches of the CPU hold the running work.

    Without a pacer, a health check waits 2.7 times as long while 1,024 requests of 1 ms arrive at once
    (`benchmarks/edge.py pacing`).

    Args:
        target: The longest time that one pass should take, in seconds.
        is_behind: Returns whether started work waits for its turn.

    Attributes:
        waited: The seconds that all work has spent in the queue.
    """

    def __init__(
        self,
        *,
        target: float = TARGET_PASS_SECONDS,
        is_behind: Callable[[], bool] = lambda: False,
    ) -> None:
        self._target = target
        self._is_behind = is_behind
        self._quota = MAX_QUOTA
        self._left = MAX_QUOTA
        self.waited = 0.0
        self._waiting: OrderedDict[Hashable, tuple[Callable[[], None], float]] = OrderedDict()
        self._is_scheduled = False
        self._pass_began = 0.0
        self._starts = Rate(PACE_MEASURE_SECONDS)

    def __len__(self) -> int:
        """Return the number of queued pieces of work."""
        return len(self._waiting)

    def may_start(self) -> bool:
        """Return whether work may start now, and count it; otherwise it must wait, with `enqueue`."""
        self._schedule()
        if self._waiting or self._left <= 0:
            return False
        self._left -= 1
        self._starts.count()
        return True

    def enqueue(self, key: Hashable, work: Callable[[], None]) -> None:
        """Run `work` in a later pass; `drop` removes it by its `key`."""
        self._waiting[key] = (work, time.perf_counter())

    def drop(self, key: Hashable) -> None:
        """Remove the queued work of `key`, if there is any."""
        self._waiting.pop(key, None)

    def drain_time(self) -> float:
        """Estimate the seconds until all queued work has started."""
        return len(self._waiting) / self._starts.per_second if self._starts.per_second else 0.0

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
            self._quota = min(MAX_QUOTA, self._quota * 2)
        self._starts.measure()
        self._left = min(self._quota, MAX_QUOTA_BEHIND) if self._is_behind() else self._quota
        if self._waiting:
            self._schedule()
        while self._waiting and self._left > 0:
            self._left -= 1
            self._starts.count()
            work, queued_at = self._waiting.popitem(last=False)[1]
            self.waited += time.perf_counter() - queued_at
            work()


class EpisodeSlots:
    """Grants episodes a slot in the order of their requests: `async with slots` waits for one and holds it.

    A request beyond the queue is rejected with the time that the queue needs to drain at the current rate.

    Args:
        slots: How many episodes play at the same time.
        queue: How many more may wait.

    Attributes:
        waited: The seconds that all episodes have spent in the queue.
    """

    def __init__(self, slots: int, queue: int) -> None:
        self.waited = 0.0
        self._slots = slots
        self._queue = queue
        self._running = 0
        self._counter = EpisodeCounter()
        self._waiting: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._ended = Rate(MEASURE_SECONDS)

    @property
    def taken(self) -> int:
        """The number of slots in use."""
        return self._running

    @property
    def waiting(self) -> int:
        """The number of episodes that wait for a slot."""
        return len(self._waiting)

    async def __aenter__(self) -> None:
        """Wait for a slot, which is held inside the block.

        Raises:
            ServerOverloaded: All slots are taken and the queue is full.
        """
        await self._take_slot()
        self._counter.begin()

    async def __aexit__(self, *_: object) -> None:
        self._counter.end()
        self._release_slot()

    async def _take_slot(self) -> None:
        if self._running < self._slots and not self._waiting:
            self._running += 1
            return
        if len(self._waiting) >= self._queue:
            sentence = f"all {self._slots} slots are taken by episodes, and {self._queue} more wait"
            raise ServerOverloaded(
                f"{sentence}; come back later, or send fewer at once", retry_after=self._drain_time()
            )
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = None
        queued_at = time.perf_counter()
        try:
            await waiter
        except asyncio.CancelledError:
            # A cancelled request leaves the queue, or returns the slot that it was granted meanwhile.
            self._waiting.pop(waiter, None)
            if not waiter.cancelled():
                self._pass_on()
            raise
        finally:
            self.waited += time.perf_counter() - queued_at

    def _release_slot(self) -> None:
        self._ended.count()
        self._ended.measure()
        self._pass_on()

    def _pass_on(self) -> None:
        """Grant a free slot to the first episode in the queue."""
        while self._waiting:
            waiter, _ = self._waiting.popitem(last=False)
            # The request may be cancelled without having run yet.
            if not waiter.done():
                waiter.set_result(None)
                return
        self._running -= 1

    def _drain_time(self) -> float:
        self._ended.measure()
        rate = self._ended.per_second
        seconds = len(self._waiting) / rate if rate else DEFAULT_RETRY_SECONDS
        return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, seconds))


Operation: TypeAlias = Callable[[], Coroutine[Any, Any, bytes]]
"""An operation that returns a response body; an exception goes to every waiting request, and nothing is kept."""


class Claims(Protocol):
    """The claims of this process on ids that clients choose, if several processes serve one port."""

    def hold(self, id: str) -> None:
        """Keep the claim on *id* from expiring, until `let_go` has been called as often as this method."""

    def let_go(self, id: str, *, is_kept: bool) -> None:
        """End one use of *id*. After the last use, release the id, or renew its claim if *is_kept*."""


KEEP_SECONDS = 900.0
"""How long the response of an operation is kept."""

ENTRY_OVERHEAD_BYTES = 512
"""Bytes that a cached response takes in memory beside its content and key."""


@dataclass(slots=True, eq=False)
class _RunningOperation:
    task: asyncio.Task[bytes]
    waiting: int = 0


class IdempotencyCache:
    """Responses of recent operations, and the operations that still run.

    Args:
        seconds: How long a response is kept.
        largest: How many bytes all kept responses may take.
        clock: Returns the time in seconds.
        claims: Keeps the key of each operation claimed while the operation runs and while its response is kept.
    """

    def __init__(
        self,
        *,
        seconds: float = KEEP_SECONDS,
        largest: int = 64 * 2**20,
        clock: Callable[[], float] = time.monotonic,
        claims: Claims | None = None,
    ) -> None:
        self._claims = claims
        self._seconds = seconds
        self._largest = largest
        self._clock = clock
        self._begun: dict[str, _RunningOperation] = {}
        self._tasks: set[asyncio.Task[bytes]] = set()
        self._kept: OrderedDict[str, tuple[bytes, float]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        """Return the number of kept responses."""
        return len(self._kept)

    async def __call__(self, key: str, work: Operation, *, keep: bool = True) -> bytes:
        """Return the response under `key`: the kept one, that of the running operation, or that of `work`, started now.

        An operation for which no request waits any more is cancelled.

        Args:
            key: Identifies the operation.
            work: The operation.
            keep: Whether to keep the response.
        """
        self._forget()
        if key in self._kept:
            return self._kept[key][0]
        operation = self._begun.get(key) or self._begin(key, work, keep=keep)
        operation.waiting += 1
        try:
            return await asyncio.shield(operation.task)
        finally:
            operation.waiting -= 1
            if not operation.waiting and not operation.task.done():
                # A later request must start the operation anew instead of waiting for a cancelled one.
                self._begun.pop(key, None)
                operation.task.cancel()

    async def aclose(self) -> None:
        """Cancel running operations, wait for them to end, and drop all kept responses."""
        for task in self._tasks:
            if not task.cancelling():
                # A task that was cancelled before is already cleaning up.
                task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        self._kept.clear()
        self._size = 0

    def _begin(self, key: str, work: Operation, *, keep: bool) -> _RunningOperation:
        # A separate task: it may outlive the request that started it while another request waits for it.
        operation = self._begun[key] = _RunningOperation(asyncio.create_task(work()))
        self._tasks.add(operation.task)
        if self._claims is not None:
            self._claims.hold(key)
        operation.task.add_done_callback(lambda task: self._end(key, task, keep=keep))
        return operation

    def _end(self, key: str, task: asyncio.Task[bytes], *, keep: bool) -> None:
        self._tasks.discard(task)
        if key in self._begun and self._begun[key].task is task:
            del self._begun[key]
        if not task.cancelled() and task.exception() is None and keep:
            self._keep(key, task.result())
        if self._claims is not None:
            self._claims.let_go(key, is_kept=key in self._kept)

    def _keep(self, key: str, answer: bytes) -> None:
        self._drop(key)
        # A copy: bytes from orjson keep their whole output buffer alive, which is many times larger.
        self._kept[key] = (bytes(memoryview(answer)), self._clock())
        self._size += _entry_bytes(key, answer)
        self._forget()

    def _drop(self, key: str) -> None:
        if key in self._kept:
            self._size -= _entry_bytes(key, self._kept.pop(key)[0])

    def _forget(self) -> None:
        limit = self._clock() - self._seconds
        while self._kept:
            oldest, (_, since) = next(iter(self._kept.items()))
            if since > limit and self._size <= self._largest:
                return
            self._drop(oldest)


def _entry_bytes(key: str, answer: bytes) -> int:
    return ENTRY_OVERHEAD_BYTES + len(key) + len(answer)
