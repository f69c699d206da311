"""A cache that runs an operation once per key and gives repeated requests the same response."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeAlias

Operation: TypeAlias = Callable[[], Coroutine[Any, Any, bytes]]
"""An operation that returns a response body; an exception goes to every waiting request, and nothing is kept."""

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
    """

    def __init__(
        self, *, seconds: float = 900.0, largest: int = 64 * 2**20, clock: Callable[[], float] = time.monotonic
    ) -> None:
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
        for each in self._tasks:
            if not each.cancelling():
                # A task that was cancelled before is already cleaning up.
                each.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        self._kept.clear()
        self._size = 0

    def _begin(self, key: str, work: Operation, *, keep: bool) -> _RunningOperation:
        # A separate task: it may outlive the request that started it while another request waits for it.
        operation = self._begun[key] = _RunningOperation(asyncio.create_task(work()))
        self._tasks.add(operation.task)
        operation.task.add_done_callback(lambda task: self._end(key, task, keep=keep))
        return operation

    def _end(self, key: str, task: asyncio.Task[bytes], *, keep: bool) -> None:
        self._tasks.discard(task)
        if key in self._begun and self._begun[key].task is task:
            del self._begun[key]
        if not task.cancelled() and task.exception() is None and keep:
            self._keep(key, task.result())

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
