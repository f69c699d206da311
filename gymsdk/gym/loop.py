"""The background event loop that plays every episode of Gymnasium's faces: one thread per process."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

from gymsdk.errors import UsageError

T = TypeVar("T")

GIVING_UP = 15.0
"""Seconds an interrupted call may take to end what it has begun, and all that is left at exit."""

log = logging.getLogger("gymsdk")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_left: set[_Job[Any]] = set()
_abandoned: list[object] = []
_shut = False


class _Job(Generic[T]):
    """A coroutine on its way through the background loop."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None
        self.ended = threading.Event()

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._coroutine)
        self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        if self._task:
            self._task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        _left.discard(self)
        # Who still waits while the interpreter ends is a daemon thread, and would print that it was cancelled.
        if not (_shut and task.cancelled()):
            self.ended.set()

    def result(self) -> T:
        assert self._task is not None, "it has ended, so it has begun"
        return self._task.result()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Give what *coroutine* gives, run on the background loop: from any thread, beside any running loop."""
    loop = _running()
    if _is_here(loop):
        coroutine.close()
        raise UsageError(
            "a Gymnasium environment was used inside a hook or a model on its own event loop; use `gymsdk.play` there"
        )
    job = _Job(coroutine)
    try:
        loop.call_soon_threadsafe(job.begin)
        job.ended.wait()
    except BaseException:
        # Ctrl-C here must not leave an episode half played there.
        loop.call_soon_threadsafe(job.cancel)
        job.ended.wait(GIVING_UP)
        raise
    return job.result()


def leave(coroutine: Coroutine[Any, Any, None]) -> None:
    """Have *coroutine* run without waiting for it: a garbage collector may call this in any thread, at any line."""
    # No lock here: the thread that is being interrupted may hold it.
    if _loop is None:
        coroutine.close()
        return
    job = _Job(_told(coroutine))
    _left.add(job)
    _loop.call_soon_threadsafe(job.begin)


def settle() -> None:
    """Wait until all that was left to the loop has ended, `GIVING_UP` seconds at most; what has not is cancelled."""
    deadline = time.monotonic() + GIVING_UP
    for job in tuple(_left):
        if not job.ended.wait(max(0.0, deadline - time.monotonic())) and _loop:
            _loop.call_soon_threadsafe(job.cancel)
            job.ended.wait(1.0)


def shut() -> None:
    """Settle, then end whatever else runs there and close what the loop shares: the interpreter ends."""
    global _shut  # noqa: PLW0603  # there is one per process
    settle()
    if _loop:
        _shut = True
        emptied = asyncio.run_coroutine_threadsafe(_emptied(), _loop)
        with suppress(TimeoutError):
            emptied.result(GIVING_UP)


async def _emptied() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=GIVING_UP / 2)
    await asyncio.get_running_loop().shutdown_asyncgens()


async def _told(coroutine: Coroutine[Any, Any, None]) -> None:
    try:
        await coroutine
    except Exception as error:  # noqa: BLE001  # nobody waits for it
        log.warning("an environment that was left open did not close well: %r", error)


def _is_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _running() -> asyncio.AbstractEventLoop:
    global _loop  # noqa: PLW0603  # there is one per process
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_serve, args=(_loop,), name="gymsdk-gym", daemon=True).start()
        return _loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    while not loop.is_closed():
        try:
            loop.run_forever()
        except BaseException as error:  # noqa: BLE001  # a task keeps what it raised for whoever waits
            log.warning("an environment's code raised %r on the loop it shares with others", error)


def _forget() -> None:
    global _lock, _loop
    # The thread that ran it stayed with the parent, and may have held the lock. Closing the loop here would take its
    # wake-up pipe off the selector that the parent still polls.
    _abandoned.extend((_loop, *_left))
    for task in asyncio.all_tasks(_loop) if _loop else ():
        # It goes on in the parent, as the task that holds a lifespan does: it is no task that this process forgot.
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001  # asyncio's own way to say so
    _left.clear()
    _lock, _loop = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)
