"""Run work beside the caller: as a task with a start and an end, or in a thread with an event loop of its own."""

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

from gymsdk.deadlines import CANCEL_GRACE_SECONDS
from gymsdk.errors import GymsdkError

Work: TypeAlias = Callable[[asyncio.Event, asyncio.Event], Coroutine[Any, Any, None]]
"""A background task: it sets the first event once it is up, and ends when the second event is set."""

BLOCKED_SECONDS = 60.0
"""Seconds without an iteration after which an event loop counts as blocked, not just as busy."""

log = logging.getLogger("gymsdk")


class BackgroundTask:
    """Runs *work* as an asyncio task; *what* is its name in messages."""

    def __init__(self, what: str, work: Work) -> None:
        self.what = what
        self._up = asyncio.Event()
        self._over = asyncio.Event()
        self._told = False
        self.task = asyncio.ensure_future(work(self._up, self._over))

    async def wait_until_up(self, seconds: float) -> None:
        """Wait until the work is up; raises `GymsdkError` if it fails or takes longer than *seconds*."""
        risen = asyncio.ensure_future(self._up.wait())
        await asyncio.wait({self.task, risen}, timeout=seconds, return_when="FIRST_COMPLETED")
        risen.cancel()
        if self.task.done():
            raise self.describe_failure()
        if not self._up.is_set():
            raise GymsdkError(f"{self.what} did not start within {seconds:g} seconds; check what it waits for")

    def describe_failure(self) -> GymsdkError:
        """Return the error to raise after the work has ended on its own; the caller must report it."""
        self._told = True
        error = None if self.task.cancelled() else self.task.exception()
        if isinstance(error, GymsdkError):
            return error
        return GymsdkError(f"{self.what} ended unexpectedly{f': {error}' if error else ''}")

    async def stop(self, seconds: float) -> None:
        """End the work within *seconds*; cancel it after that, and abandon it if it ignores the cancellation."""
        self._over.set()
        await asyncio.wait({self.task}, timeout=seconds)
        if not self.task.done():
            log.warning("%s did not end within %g seconds; it is left behind", self.what, seconds)
            self.task.cancel()
            await asyncio.wait({self.task}, timeout=CANCEL_GRACE_SECONDS)
            return
        if not self._told and not self.task.cancelled() and (error := self.task.exception()):
            log.warning("%s ended with an error: %r", self.what, error)


def run_in_thread(work: Work, name: str) -> Work:
    """Return *work* as work that runs in its own thread, on its own event loop.

    Use it for what must happen in time although the caller's event loop is busy, such as heartbeats. Setting the second
    event ends the work, and cancelling the returned work cancels it.

    Args:
        work: The work. It must not use anything that belongs to the caller's event loop.
        name: The name of the thread.
    """

    async def run(up: asyncio.Event, over: asyncio.Event) -> None:
        here, there = asyncio.get_running_loop(), asyncio.new_event_loop()
        there_over = asyncio.Event()
        task = there.create_task(_run_and_report(work, partial(_call, here, up.set), there_over))
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


class LoopMonitor:
    """Tells other threads whether this event loop still runs; the servers of a blocked loop answer no request."""

    def __init__(self, limit: float = BLOCKED_SECONDS) -> None:
        self._limit = limit
        self._at = time.monotonic()

    def is_recent(self) -> bool:
        """Return whether the event loop has run within the limit."""
        return time.monotonic() - self._at < self._limit

    async def run(self, up: asyncio.Event, over: asyncio.Event) -> None:
        """Record the time every second until *over* is set."""
        up.set()
        while not over.is_set():
            self._at = time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await over.wait()


async def _run_and_report(work: Work, risen: Callable[[], None], over: asyncio.Event) -> None:
    """Run *work*, and call *risen* when it is up."""
    up = asyncio.Event()

    async def report() -> None:
        await up.wait()
        risen()

    reporting = asyncio.ensure_future(report())
    try:
        await work(up, over)
    finally:
        reporting.cancel()


def _run(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None], done: concurrent.futures.Future[None]) -> None:
    """Run *task* on *loop* in this thread, close the loop, and report how the task ended."""
    try:
        try:
            loop.run_until_complete(task)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
    except BaseException as error:  # noqa: BLE001 - the thread that waits for `ended` raises it
        done.set_exception(error)
    else:
        done.set_result(None)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    # Fails if the loop is closed, and then nothing waits for the call.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function)
