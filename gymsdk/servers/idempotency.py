"""Once: what is asked for twice under one key is done once, and answered each time."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeAlias

Operation: TypeAlias = Callable[[], Coroutine[Any, Any, bytes]]
"""Does what was asked for, and gives the answer; whatever it raises, each who waits is told, and nothing is kept."""

ENTRY_OVERHEAD_BYTES = 512
"""Bytes an answer takes that is kept, beside what it says and its key."""


@dataclass(slots=True, eq=False)
class _RunningOperation:
    task: asyncio.Task[bytes]
    waiting: int = 0


class IdempotencyCache:
    """The answers of the last *seconds*, as many as go into *largest* bytes, and what is still under way."""

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
        """Give how many answers are kept."""
        return len(self._kept)

    async def __call__(self, key: str, work: Operation, *, keep: bool = True) -> bytes:
        """Give the answer under *key*: the one there is, the one under way, or that of *work*, to *keep* or not.

        It is given up where nobody waits for it any more.
        """
        self._forget()
        if key in self._kept:
            return self._kept[key][0]
        begun = self._begun.get(key) or self._begin(key, work, keep=keep)
        begun.waiting += 1
        try:
            return await asyncio.shield(begun.task)
        finally:
            begun.waiting -= 1
            if not begun.waiting and not begun.task.done():
                # Who asks from now on is not to be given an answer that never comes.
                self._begun.pop(key, None)
                begun.task.cancel()

    async def aclose(self) -> None:
        """Give up what is under way, and wait until it has ended; what is kept is forgotten."""
        for each in self._tasks:
            if not each.cancelling():
                # What has been given up before is being cleaned up by now.
                each.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        self._kept.clear()
        self._size = 0

    def _begin(self, key: str, work: Operation, *, keep: bool) -> _RunningOperation:
        # Of its own: it may outlast the request that began it, and ends with the last one that waits.
        begun = self._begun[key] = _RunningOperation(asyncio.create_task(work()))
        self._tasks.add(begun.task)
        begun.task.add_done_callback(lambda task: self._end(key, task, keep=keep))
        return begun

    def _end(self, key: str, task: asyncio.Task[bytes], *, keep: bool) -> None:
        self._tasks.discard(task)
        if key in self._begun and self._begun[key].task is task:
            del self._begun[key]
        if not task.cancelled() and task.exception() is None and keep:
            self._keep(key, task.result())

    def _keep(self, key: str, answer: bytes) -> None:
        self._drop(key)
        # A copy: orjson's bytes keep the whole buffer they were written into, many times what they say.
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
