"""Deadlines: the time by which an author's code must have answered, as its stage sets it."""

from __future__ import annotations

import asyncio
import logging
import time
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

DEFAULT_STAGE_SECONDS = 600.0
"""Seconds a stage may take that has no deadline of its own."""


class Deadline:
    """A time of the event loop's clock; a *patient* one moves on while its code waits for something bounded itself.

    A verdict's is patient: an answer queued behind other answers' graders, or a slow judge, is no slow verifier.
    """

    def __init__(self, at: float, *, pausable: bool = False) -> None:
        self._at = at
        self._patient = pausable
        self._waiting = 0
        self._since = 0.0

    def get_remaining_seconds(self) -> float:
        """Give the seconds left, 0 where it has passed."""
        now = self._since if self._waiting else asyncio.get_running_loop().time()
        return max(0.0, self._at - now)

    @property
    def at(self) -> float:
        """The time it stands at now."""
        return asyncio.get_running_loop().time() + self.get_remaining_seconds()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let it move on with the clock inside the block, where it is patient."""
        if not self._patient:
            yield
            return
        loop = asyncio.get_running_loop()
        if not self._waiting:
            self._since = loop.time()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._at += loop.time() - self._since


_current_deadline: ContextVar[Deadline | None] = ContextVar("gymsdk_deadline", default=None)


def get_deadline() -> Deadline:
    """Give the deadline of the stage that runs; outside of any, `LONGEST` from now."""
    return _current_deadline.get() or Deadline(get_loop_time_after(DEFAULT_STAGE_SECONDS))


@contextmanager
def apply_deadline(deadline: Deadline) -> Iterator[None]:
    """Put what runs inside under *deadline*."""
    token = _current_deadline.set(deadline)
    try:
        yield
    finally:
        _current_deadline.reset(token)


@contextmanager
def pause_deadline() -> Iterator[None]:
    """Wait, inside the block, for something that has a bound of its own: a patient deadline does not count it."""
    deadline = _current_deadline.get()
    if deadline is None:
        yield
        return
    with deadline.pause():
        yield


def get_loop_time_after(seconds: float) -> float:
    """Give the time of the loop's clock *seconds* from now."""
    return asyncio.get_running_loop().time() + seconds


MAX_LOOP_BLOCK_SECONDS = 0.05
"""Seconds a coroutine may hold the event loop before it is named."""

CANCEL_GRACE_SECONDS = 1.0
"""Seconds a cancelled coroutine gets to clean up before it is left behind."""

T = TypeVar("T")
log = logging.getLogger("gymsdk")


@types.coroutine
def warn_when_blocking(coroutine: Coroutine[Any, Any, T], what: str) -> Generator[Any, Any, T]:
    """Run *coroutine*, naming it in a warning each time it holds the loop for more than `LONG` seconds.

    Measured is the wall clock, so that whatever else stops the thread meanwhile counts too: a garbage collection, which
    with a thousand episodes in memory may last longer than `LONG`, or a machine that is busy otherwise.
    """
    send: Callable[[Any], Any] = coroutine.send
    given: Any = None
    while True:
        started = time.perf_counter()
        try:
            waited_for = send(given)
        except StopIteration as stop:
            value: T = stop.value
            return value
        except SystemExit as error:
            # In a task, which is where this runs, it would end the loop and every other episode with it.
            raise RuntimeError(f"it ended with {error!r}") from error
        finally:
            held = time.perf_counter() - started
            if held > MAX_LOOP_BLOCK_SECONDS:
                log.warning("%s held the event loop for %.0f ms; make it `def`, or offload the work", what, held * 1e3)
        try:
            given = yield waited_for
            send = coroutine.send
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as error:  # noqa: BLE001  # handed to the coroutine, as `yield from` would
            given, send = error, coroutine.throw


async def run_until_deadline(coroutine: Coroutine[Any, Any, T], deadline: Deadline, *, name: str | None = None) -> T:
    """Await *coroutine* in a task called *name* until *deadline*, then cancel it; raises `TimeoutError`.

    A coroutine that swallows its cancellation is left behind after `GRACE` seconds.
    """
    task = asyncio.create_task(coroutine, name=name)
    try:
        while not task.done() and (left := deadline.get_remaining_seconds()):
            # Again where it has moved meanwhile, but not at every instant while it moves.
            await asyncio.wait({task}, timeout=max(left, MAX_LOOP_BLOCK_SECONDS))
    except asyncio.CancelledError:
        await _cancel_and_wait(task)
        task.add_done_callback(_log_late_failure)
        raise
    if not task.done():
        await _cancel_and_wait(task)
    if not task.done():
        task.add_done_callback(_log_late_failure)
        raise TimeoutError
    if task.cancelled():
        raise TimeoutError
    return task.result()


async def _cancel_and_wait(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=CANCEL_GRACE_SECONDS)


def _log_late_failure(task: asyncio.Future[Any]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.warning("code left behind failed later: %r", error)
