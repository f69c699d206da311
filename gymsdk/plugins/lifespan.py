"""What an environment shares among its episodes: the value of its `lifespan`, for as long as that lasts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from gymsdk.complaints import INTERRUPTS, raised
from gymsdk.errors import BrokenEnvironment, Failed, GymsdkError, UsageError

OPENING = 600.0
"""Seconds a `lifespan` may take to begin, and to end."""

GRACE = 1.0
"""Seconds that a cancelled `lifespan` has to clean up before it is left behind."""

log = logging.getLogger("gymsdk")


class Lifespan:
    """The lifespan of environment *name*: *asked* gives it anew each time, and is `None` where there is none.

    One task enters the context manager, holds it open and leaves it, whichever tasks call `begin` and `end`: anyio's
    cancel scopes, and so the clients built on them, must be left in the task that entered them. What the context
    manager yielded is *shared*.
    """

    def __init__(self, name: str, asked: Callable[[], AbstractAsyncContextManager[Any] | None] | None) -> None:
        self._where = f"environment {name!r}"
        self._asked = asked
        self._entered = 0
        self._turn = asyncio.Lock()
        self._holder: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self.shared: Any = None

    def check_entered(self) -> None:
        """Raise `UsageError` if the lifespan has not begun, `Failed` if it ended by itself."""
        if not self._asked:
            return
        if not self._entered:
            raise UsageError(f"{self._where} has a lifespan; play it inside `async with environment:`")
        if self._holder is not None and self._holder.done():
            message = f"{self._where}: what hook 'lifespan' opened has ended, and the log says why; start the run again"
            raise Failed(message, kind="lifespan_ended", stage="reset", retryable=True)

    async def enter(self) -> None:
        """Enter the lifespan if no caller has yet; raises `BrokenEnvironment`."""
        async with self._turn:
            if not self._entered and self._asked:
                await self._open(self._asked)
            self._entered += 1

    async def exit(self) -> None:
        """Leave the lifespan with the last caller that entered it.

        An error is logged and not raised, since it changes nothing that was graded.
        """
        async with self._turn:
            self._entered -= 1
            if not self._entered:
                await self._close()

    async def _open(self, asked: Callable[[], AbstractAsyncContextManager[Any] | None]) -> None:
        opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._over = over = asyncio.Event()
        self._holder = holder = asyncio.create_task(self._hold(asked, opened, over), name=f"lifespan of {self._where}")
        try:
            async with asyncio.timeout(OPENING):
                self.shared = await opened
        except TimeoutError as error:
            raise self._broken(error) from error
        finally:
            if not opened.done() or opened.cancelled() or opened.exception():
                self._holder = None
                await _stop(holder)

    async def _hold(
        self,
        asked: Callable[[], AbstractAsyncContextManager[Any] | None],
        opened: asyncio.Future[Any],
        over: asyncio.Event,
    ) -> None:
        """Enter the context manager, give what it yields to *opened*, and leave it once it is *over*."""
        try:
            context = asked()
            if context is None:
                opened.set_result(None)
                await over.wait()
                return
            async with context as shared:
                opened.set_result(shared)
                await over.wait()
        except asyncio.CancelledError as error:
            # A background task that the author's code started has failed, and took its task group with it.
            if not opened.done():
                opened.set_exception(self._broken(error))
            elif not (over.is_set() or opened.cancelled()):
                log.warning("%s: what hook 'lifespan' opened was cancelled before its end", self._where)
            raise
        except INTERRUPTS as error:
            if not opened.done():
                opened.set_exception(self._broken(error))
            raise
        except BaseException as error:  # noqa: BLE001  # an author's code may raise anything
            if opened.done():
                log.warning("%s: hook 'lifespan' did not end well: %r", self._where, error)
            else:
                opened.set_exception(error if isinstance(error, GymsdkError) else self._broken(error))

    def _broken(self, error: BaseException) -> BrokenEnvironment:
        broken = BrokenEnvironment(f"{self._where}: hook 'lifespan' raised {raised(error)}")
        broken.__cause__ = error
        return broken

    async def _close(self) -> None:
        self.shared = None
        holder, self._holder = self._holder, None
        if holder is None:
            return
        self._over.set()
        await asyncio.wait({holder}, timeout=OPENING)
        if not holder.done():
            log.warning("%s: hook 'lifespan' did not end within %g s; it is left behind", self._where, OPENING)
            await _stop(holder)


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=GRACE)
