"""Slots for running episodes, and responses that are kept for repeated requests.

`IdempotencyCache` answers a repeated request with its first answer, so that no episode is played twice.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from gymsdk.edge.errors import ServerOverloaded
from gymsdk.memory import EpisodeCounter

DEFAULT_RETRY_SECONDS = 5.0
"""`Retry-After` in seconds while no episode has ended yet, so that no rate is known."""

MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0
"""Shortest and longest `Retry-After`, in seconds."""

MEASURE_SECONDS = 1.0
"""Seconds over which the rate of ended episodes is measured."""


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
        self._ended = 0
        self._rate = 0.0
        self._period_began = time.monotonic()

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
        self._ended += 1
        self._measure()
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
        self._measure()
        seconds = len(self._waiting) / self._rate if self._rate else DEFAULT_RETRY_SECONDS
        return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, seconds))

    def _measure(self) -> None:
        now = time.monotonic()
        if now - self._period_began >= MEASURE_SECONDS:
            self._rate = self._ended / (now - self._period_began)
            self._ended, self._period_began = 0, now


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
