"""Large request bodies: how much memory those of all requests that are being answered may take together."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import MutableMapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

LARGE = 4 * 2**20
"""Bytes from which a body counts. Smaller ones are bounded by how many requests a server takes."""

HEAVY = 16 * 2**20
"""Bytes in memory from which a smaller one counts too."""

SHARE = 4
"""The part of the machine's memory, one in so many, that bodies may take if nothing is said."""

_KEY = "gymsdk.reserved"
_CGROUP = Path("/sys/fs/cgroup/memory.max")


class BodyBudget:
    """Lets large bodies in while all of them have at most *most* bytes; others wait their turn.

    A body that is larger than all of it is let in alone.
    """

    def __init__(self) -> None:
        self.used = 0
        self._waiting: deque[tuple[int, int, asyncio.Future[None]]] = deque()

    async def reserve(self, scope: MutableMapping[str, Any], size: int, most: int) -> None:
        """Wait until *size* bytes are free for the request of *scope*, and take them until `release`."""
        if _KEY in scope:
            return
        if self._waiting or not self._fits(size, most):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((size, most, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._free(size)
                else:
                    self._waiting = deque(each for each in self._waiting if each[2] is not turn)
                    self._admit()
                raise
        else:
            self.used += size
        scope[_KEY] = size

    def resize(self, scope: MutableMapping[str, Any], size: int) -> None:
        """Count *size* bytes for the request of *scope* from now on: nobody waits for what exists by now."""
        before = scope.get(_KEY, 0)
        scope[_KEY] = size
        self._free(before - size)

    def release(self, scope: MutableMapping[str, Any]) -> None:
        """Free what the request of *scope* has taken, if anything."""
        if (size := scope.pop(_KEY, None)) is not None:
            self._free(size)

    def _free(self, size: int) -> None:
        self.used -= size
        self._admit()

    def _fits(self, size: int, most: int) -> bool:
        return not self.used or self.used + size <= most

    def _admit(self) -> None:
        while self._waiting and self._fits(*self._waiting[0][:2]):
            size, _, turn = self._waiting.popleft()
            if not turn.done():
                self.used += size
                turn.set_result(None)


_budgets: WeakKeyDictionary[asyncio.AbstractEventLoop, BodyBudget] = WeakKeyDictionary()


def budget() -> BodyBudget:
    """Give the budget that all servers on the running event loop share."""
    return _budgets.setdefault(asyncio.get_running_loop(), BodyBudget())


@cache
def share_of_memory() -> int:
    """Give a quarter of the memory that this process may have: the machine's, or less if a container has less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # There may be no such file, or it says `max`.
    with suppress(OSError, ValueError):
        memory = min(memory, int(_CGROUP.read_text()))
    return memory // SHARE
