"""The background event loop on which all Gymnasium environments of a process run their episodes, in one thread."""

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

SHUTDOWN_SECONDS = 15.0
"""Seconds that an interrupted call, or all remaining work at exit, may take to end."""

log = logging.getLogger("gymsdk")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_detached: set[_Job[Any]] = set()
_abandoned: list[object] = []
_is_shut_down = False


class _Job(Generic[T]):
    """A coroutine that another thread submits to the background loop."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None
        self.done = threading.Event()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._coroutine)
        self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        if self._task:
            self._task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        _detached.discard(self)
        # At exit, only daemon threads still wait: they would print a traceback of the cancellation.
        if not (_is_shut_down and task.cancelled()):
            self.done.set()

    def result(self) -> T:
        assert self._task is not None, "a job that is done has been started"
        return self._task.result()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run *coroutine* on the background loop from any thread and return its result.

    Raises:
        UsageError: The caller runs on the background loop itself.
    """
    loop = _get_loop()
    if _is_running_loop(loop):
        coroutine.close()
        raise UsageError(
            "a Gymnasium environment cannot be used inside a hook or a model on its own event loop; use `gymsdk.play`"
        )
    job = _Job(coroutine)
    try:
        loop.call_soon_threadsafe(job.start)
        job.done.wait()
    except BaseException:
        # After Ctrl-C, no half-played episode must continue in the background.
        loop.call_soon_threadsafe(job.cancel)
        job.done.wait(SHUTDOWN_SECONDS)
        raise
    return job.result()


def run_detached(coroutine: Coroutine[Any, Any, None]) -> None:
    """Start *coroutine* on the background loop and return at once; safe to call from a finalizer in any thread."""
    # Without the lock, which the interrupted thread may hold.
    if _loop is None:
        coroutine.close()
        return
    job = _Job(_log_errors(coroutine))
    _detached.add(job)
    _loop.call_soon_threadsafe(job.start)


def wait_for_detached() -> None:
    """Wait up to `SHUTDOWN_SECONDS` for the detached coroutines, and cancel the rest."""
    deadline = time.monotonic() + SHUTDOWN_SECONDS
    for job in tuple(_detached):
        if not job.done.wait(max(0.0, deadline - time.monotonic())) and _loop:
            _loop.call_soon_threadsafe(job.cancel)
            job.done.wait(1.0)


def shut_down() -> None:
    """Wait for the detached coroutines and cancel everything else on the loop; called when the interpreter exits."""
    global _is_shut_down  # noqa: PLW0603  # there is one per process
    wait_for_detached()
    if _loop:
        _is_shut_down = True
        cancelled = asyncio.run_coroutine_threadsafe(_cancel_all_tasks(), _loop)
        with suppress(TimeoutError):
            cancelled.result(SHUTDOWN_SECONDS)


async def _cancel_all_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=SHUTDOWN_SECONDS / 2)
    await asyncio.get_running_loop().shutdown_asyncgens()


async def _log_errors(coroutine: Coroutine[Any, Any, None]) -> None:
    try:
        await coroutine
    except Exception as error:  # noqa: BLE001  # no caller awaits the result
        log.warning("an environment that was left open could not be closed: %r", error)


def _is_running_loop(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _get_loop() -> asyncio.AbstractEventLoop:
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
        except BaseException as error:  # noqa: BLE001  # the task has the exception, for its caller
            log.warning("code of an environment raised %r on the event loop that it shares with others", error)


def _reset_after_fork() -> None:
    global _lock, _loop
    # The loop's thread exists only in the parent, and may have held the lock. Closing the loop here would remove its
    # wake-up pipe from the selector, which the parent still uses.
    _abandoned.extend((_loop, *_detached))
    for task in asyncio.all_tasks(_loop) if _loop else ():
        # The task continues in the parent: asyncio must not report it as destroyed here.
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001  # asyncio's own way to say so
    _detached.clear()
    _lock, _loop = threading.Lock(), None


os.register_at_fork(after_in_child=_reset_after_fork)
