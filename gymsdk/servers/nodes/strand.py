"""A strand: something that runs beside others until it is told to end, its start and its end bounded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from gymsdk.bounds import GRACE
from gymsdk.errors import GymsdkError

Work: TypeAlias = Callable[[asyncio.Event, asyncio.Event], Coroutine[Any, Any, None]]
"""What runs: it sets the first event once it is up, and ends when the second is set."""

log = logging.getLogger("gymsdk")


class Strand:
    """*work* in a task of its own, as *what* it is called."""

    def __init__(self, what: str, work: Work) -> None:
        self.what = what
        self._up = asyncio.Event()
        self._over = asyncio.Event()
        self._told = False
        self.task = asyncio.ensure_future(work(self._up, self._over))

    async def up(self, seconds: float) -> None:
        """Wait until it is up; raises `GymsdkError` where it is not within *seconds*, or ends before it is."""
        risen = asyncio.ensure_future(self._up.wait())
        await asyncio.wait({self.task, risen}, timeout=seconds, return_when="FIRST_COMPLETED")
        risen.cancel()
        if self.task.done():
            raise self.broken()
        if not self._up.is_set():
            raise GymsdkError(f"{self.what} did not begin within {seconds:g} seconds; mend what it waits for")

    def broken(self) -> GymsdkError:
        """Give what to raise where it has ended by itself; whoever raises it tells of it."""
        self._told = True
        error = None if self.task.cancelled() else self.task.exception()
        if isinstance(error, GymsdkError):
            return error
        return GymsdkError(f"{self.what} ended by itself{f': {error}' if error else ''}")

    async def end(self, seconds: float) -> None:
        """Have it end within *seconds*; where it does not it is cancelled, and left behind where that does not help."""
        self._over.set()
        await asyncio.wait({self.task}, timeout=seconds)
        if not self.task.done():
            log.warning("%s did not end within %g seconds, and is left behind", self.what, seconds)
            self.task.cancel()
            await asyncio.wait({self.task}, timeout=GRACE)
            return
        if not self._told and not self.task.cancelled() and (error := self.task.exception()):
            log.warning("%s did not end well: %r", self.what, error)
