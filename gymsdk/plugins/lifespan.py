"""The `lifespan` hook of an environment: what its episodes share, held open by one task."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from gymsdk.concurrency import INTERRUPTS, cancel_and_wait
from gymsdk.errors import BrokenEnvironment, Failed, GymsdkError, UsageError, describe_exception

LIFESPAN_SECONDS = 600.0
"""Seconds that a `lifespan` may take to start, and to end."""

log = logging.getLogger("gymsdk")


class Lifespan:
    """The `lifespan` of one environment.

    One task enters the context manager, holds it open and leaves it, regardless of the tasks that call `enter` and
    `exit`: anyio's cancel scopes, and the clients built on them, must be left in the task that entered them.

    Args:
        name: The environment's name.
        factory: Returns a new context manager; `None` if the environment has no `lifespan`.

    Attributes:
        shared: The value that the context manager yielded.
    """

    def __init__(self, name: str, factory: Callable[[], AbstractAsyncContextManager[Any] | None] | None) -> None:
        self._where = f"environment {name!r}"
        self._factory = factory
        self._entered = 0
        self._lock = asyncio.Lock()
        self._holder: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self.shared: Any = None

    def check_entered(self) -> None:
        """Raise `UsageError` if the lifespan has not been entered, `Failed` if it ended by itself."""
        if not self._entered:
            raise UsageError(f"{self._where} has a lifespan; play it inside `async with environment:`")
        if self._holder is not None and self._holder.done():
            message = f"{self._where}: hook 'lifespan' ended during the run; see the log, and start the run again"
            raise Failed(message, kind="lifespan_ended", stage="reset", retryable=True)

    async def enter(self) -> None:
        """Enter the lifespan unless another caller has; raises `BrokenEnvironment` if that fails."""
        async with self._lock:
            if not self._entered and self._factory:
                await self._open(self._factory)
            self._entered += 1

    async def exit(self) -> None:
        """Leave the lifespan if no other caller uses it.

        An error is logged and not raised, because it does not change results.
        """
        async with self._lock:
            self._entered -= 1
            if not self._entered:
                await self._close()

    async def _open(self, factory: Callable[[], AbstractAsyncContextManager[Any] | None]) -> None:
        opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._closing = closing = asyncio.Event()
        hold = self._hold_open(factory, opened, closing)
        self._holder = holder = asyncio.create_task(hold, name=f"lifespan of {self._where}")
        try:
            async with asyncio.timeout(LIFESPAN_SECONDS):
                self.shared = await opened
        except TimeoutError as error:
            raise self._build_error(error) from error
        finally:
            if not opened.done() or opened.cancelled() or opened.exception():
                self._holder = None
                await cancel_and_wait(holder)

    async def _hold_open(
        self,
        factory: Callable[[], AbstractAsyncContextManager[Any] | None],
        opened: asyncio.Future[Any],
        closing: asyncio.Event,
    ) -> None:
        """Enter the context manager, set *opened* to the value that it yields, and leave it once *closing* is set."""
        try:
            context = factory()
            if context is None:
                opened.set_result(None)
                await closing.wait()
                return
            async with context as shared:
                opened.set_result(shared)
                await closing.wait()
        except asyncio.CancelledError as error:
            # A background task of the author's code may have failed and cancelled its task group, with this task.
            if not opened.done():
                opened.set_exception(self._build_error(error))
            elif not (closing.is_set() or opened.cancelled()):
                log.warning("%s: hook 'lifespan' was cancelled before the end of the run", self._where)
            raise
        except INTERRUPTS as error:
            if not opened.done():
                opened.set_exception(self._build_error(error))
            raise
        except BaseException as error:  # noqa: BLE001 - an author's code may raise any exception
            if opened.done():
                log.warning("%s: hook 'lifespan' failed when it ended: %r", self._where, error)
            else:
                opened.set_exception(error if isinstance(error, GymsdkError) else self._build_error(error))

    def _build_error(self, error: BaseException) -> BrokenEnvironment:
        broken = BrokenEnvironment(f"{self._where}: hook 'lifespan' raised {describe_exception(error)}")
        broken.__cause__ = error
        return broken

    async def _close(self) -> None:
        self.shared = None
        holder, self._holder = self._holder, None
        if holder is None:
            return
        self._closing.set()
        await asyncio.wait({holder}, timeout=LIFESPAN_SECONDS)
        if not holder.done():
            log.warning("%s: hook 'lifespan' did not end within %g s and is abandoned", self._where, LIFESPAN_SECONDS)
            await cancel_and_wait(holder)
