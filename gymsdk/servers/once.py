"""Once: what is asked for twice under one key is done once, and answered each time."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeAlias

Work: TypeAlias = Callable[[], Coroutine[Any, Any, bytes]]
"""Does what was asked for, and gives the answer; whatever it raises, each who waits is told, and nothing is kept."""


@dataclass(slots=True, eq=False)
class _Begun:
    task: asyncio.Task[bytes]
    waiting: int = 0


class Once:
    """The answers of the last *seconds*, as many as go into *largest* bytes, and what is still under way."""

    def __init__(
        self, *, seconds: float = 900.0, largest: int = 64 * 2**20, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._largest = largest
        self._clock = clock
        self._begun: dict[str, _Begun] = {}
        self._kept: OrderedDict[str, tuple[bytes, float]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        """Give how many answers are kept."""
        return len(self._kept)

    async def __call__(self, key: str, work: Work) -> bytes:
        """Give the answer under *key*: the one there is, the one under way, or that of *work*.

        It is given up where nobody waits for it any more.
        """
        self._forget()
        if key in self._kept:
            return self._kept[key][0]
        begun = self._begun.get(key) or self._begin(key, work)
        begun.waiting += 1
        try:
            return await asyncio.shield(begun.task)
        finally:
            begun.waiting -= 1
            if not begun.waiting and not begun.task.done():
                # Who asks from now on is not to be given an answer that never comes.
                self._begun.pop(key, None)
                begun.task.cancel()

    def _begin(self, key: str, work: Work) -> _Begun:
        # Of its own: it may outlast the request that began it, and ends with the last one that waits.
        begun = self._begun[key] = _Begun(asyncio.create_task(work()))
        begun.task.add_done_callback(lambda task: self._end(key, task))
        return begun

    def _end(self, key: str, task: asyncio.Task[bytes]) -> None:
        if key in self._begun and self._begun[key].task is task:
            del self._begun[key]
        if not task.cancelled() and task.exception() is None:
            self._keep(key, task.result())

    def _keep(self, key: str, answer: bytes) -> None:
        # A copy: orjson's bytes keep the whole buffer they were written into, many times what they say.
        self._kept[key] = (bytes(memoryview(answer)), self._clock())
        self._size += len(answer)
        self._forget()

    def _forget(self) -> None:
        limit = self._clock() - self._seconds
        while self._kept:
            answer, since = next(iter(self._kept.values()))
            if since > limit and self._size <= self._largest:
                return
            self._kept.popitem(last=False)
            self._size -= len(answer)
