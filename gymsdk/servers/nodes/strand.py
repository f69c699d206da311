"""A strand: something that runs beside others until it is told to end, its start and its end bounded."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from gymsdk.bounds import GRACE
from gymsdk.errors import GymsdkError

Work: TypeAlias = Callable[[asyncio.Event, asyncio.Event], Coroutine[Any, Any, None]]
"""What runs: it sets the first event once it is up, and ends when the second is set."""

BLOCKED_SECONDS = 60.0
"""Seconds without a turn after which an event loop counts as blocked, and not only as busy."""

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


def in_thread(work: Work, name: str) -> Work:
    """Return *work* as one that runs in its own thread, on its own event loop.

    Use it for what must happen in time however busy the caller's event loop is, such as heartbeats. Setting the second
    event ends the work, and cancelling the returned work cancels it.

    Args:
        work: What runs. It must not use anything that belongs to the caller's event loop.
        name: The name of the thread.
    """

    async def run(up: asyncio.Event, over: asyncio.Event) -> None:
        here, there = asyncio.get_running_loop(), asyncio.new_event_loop()
        there_over = asyncio.Event()
        task = there.create_task(_reporting(work, partial(_call, here, up.set), there_over))
        ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        target = partial(contextvars.copy_context().run, _run, there, task, ended)
        threading.Thread(target=target, name=name, daemon=True).start()
        waiting: asyncio.Future[Any] = asyncio.wrap_future(ended)
        ending: asyncio.Future[Any] = asyncio.ensure_future(over.wait())
        try:
            await asyncio.wait([waiting, ending], return_when="FIRST_COMPLETED")
            _call(there, there_over.set)
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            _call(there, task.cancel)
            raise
        finally:
            ending.cancel()

    return run


class Pulse:
    """Tells other threads whether this event loop still runs: a blocked one answers nobody, and may never again."""

    def __init__(self, limit: float = BLOCKED_SECONDS) -> None:
        self._limit = limit
        self._at = time.monotonic()

    def is_recent(self) -> bool:
        """Return whether the event loop has run within the limit."""
        return time.monotonic() - self._at < self._limit

    async def run(self, up: asyncio.Event, over: asyncio.Event) -> None:
        """Note each second that the event loop runs, until it is *over*."""
        up.set()
        while not over.is_set():
            self._at = time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await over.wait()


async def _reporting(work: Work, risen: Callable[[], None], over: asyncio.Event) -> None:
    """Run *work*, and call *risen* once it is up."""
    up = asyncio.Event()

    async def report() -> None:
        await up.wait()
        risen()

    reporting = asyncio.ensure_future(report())
    try:
        await work(up, over)
    finally:
        reporting.cancel()


def _run(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None], ended: concurrent.futures.Future[None]) -> None:
    """Run *task* on *loop* in this thread, close the loop, and report how the task ended."""
    try:
        try:
            loop.run_until_complete(task)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
    except BaseException as error:  # noqa: BLE001 - whoever waits in the other thread raises it
        ended.set_exception(error)
    else:
        ended.set_result(None)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    # A loop that has been closed needs no news.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function)
