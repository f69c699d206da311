"""Deadlines for an environment's code: the current stage's deadline, and coroutines that run until a deadline."""

from __future__ import annotations

import asyncio
import logging
import time
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

INTERRUPTS = (KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)
"""Exceptions that stop running code from outside; they must never be caught as errors of an environment.

Every other exception raised by an environment's code is an error of that code, including exceptions that do not derive
from `Exception`: `SystemExit`, or a panic in a Rust extension.
"""

DEFAULT_STAGE_SECONDS = 600.0
"""Seconds that a stage may take if it has no deadline."""

MAX_LOOP_BLOCK_SECONDS = 0.05
"""Seconds that a coroutine may block the event loop before a warning names it."""

CANCEL_GRACE_SECONDS = 1.0
"""Seconds that a cancelled coroutine has to clean up before it is abandoned."""

T = TypeVar("T")
log = logging.getLogger("gymsdk")


class Deadline:
    """A time of the event loop's clock until which code must finish.

    Args:
        at: The time of the event loop's clock.
        pausable: Whether the deadline moves while the code waits for an operation with its own time limit. The deadline
            of `verify` does: time spent in a queue for a worker or for a slow judge does not make a verifier slow.
    """

    def __init__(self, at: float, *, pausable: bool = False) -> None:
        self._at = at
        self._pausable = pausable
        self._pauses = 0
        self._paused_at = 0.0

    def get_remaining_seconds(self) -> float:
        """Return the seconds until the deadline, 0 if it has passed."""
        now = self._paused_at if self._pauses else asyncio.get_running_loop().time()
        return max(0.0, self._at - now)

    @property
    def at(self) -> float:
        """The deadline as of now, as a time of the event loop's clock."""
        return asyncio.get_running_loop().time() + self.get_remaining_seconds()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the deadline's clock inside the block, if the deadline is pausable."""
        if not self._pausable:
            yield
            return
        loop = asyncio.get_running_loop()
        if not self._pauses:
            self._paused_at = loop.time()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._at += loop.time() - self._paused_at


_current_deadline: ContextVar[Deadline | None] = ContextVar("gymsdk_deadline", default=None)


def get_deadline() -> Deadline:
    """Return the deadline of the current stage; outside a stage, `DEFAULT_STAGE_SECONDS` from now."""
    return _current_deadline.get() or Deadline(get_loop_time_after(DEFAULT_STAGE_SECONDS))


@contextmanager
def apply_deadline(deadline: Deadline) -> Iterator[None]:
    """Make *deadline* the current deadline inside the block."""
    token = _current_deadline.set(deadline)
    try:
        yield
    finally:
        _current_deadline.reset(token)


@contextmanager
def pause_deadline() -> Iterator[None]:
    """Pause the current deadline inside the block, which waits for an operation with its own time limit."""
    deadline = _current_deadline.get()
    if deadline is None:
        yield
        return
    with deadline.pause():
        yield


def get_loop_time_after(seconds: float) -> float:
    """Return the time of the event loop's clock *seconds* from now."""
    return asyncio.get_running_loop().time() + seconds


@types.coroutine
def warn_when_blocking(coroutine: Coroutine[Any, Any, T], name: str) -> Generator[Any, Any, T]:
    """Run *coroutine*, and log a warning whenever it blocks the loop for more than `MAX_LOOP_BLOCK_SECONDS`.

    The measure is wall-clock time, so it includes other causes that stop the thread: a garbage collection, which with
    a thousand episodes in memory can exceed the limit, or a busy machine.

    Args:
        coroutine: The coroutine.
        name: Its name in the warning.

    Raises:
        RuntimeError: The coroutine raised `SystemExit`.
    """
    resume: Callable[[Any], Any] = coroutine.send
    value: Any = None
    while True:
        started = time.perf_counter()
        try:
            awaited = resume(value)
        except StopIteration as stop:
            result: T = stop.value
            return result
        except SystemExit as error:
            # Raised in a task, SystemExit would stop the loop and all other episodes.
            raise RuntimeError(f"it ended with {error!r}") from error
        finally:
            blocked = time.perf_counter() - started
            if blocked > MAX_LOOP_BLOCK_SECONDS:
                log.warning(
                    "%s held the event loop for %.0f ms; write it as a plain `def`, or offload the work",
                    name,
                    blocked * 1e3,
                )
        try:
            value = yield awaited
            resume = coroutine.send
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as error:  # noqa: BLE001 - passed on to the coroutine, as `yield from` does
            value, resume = error, coroutine.throw


async def run_until_deadline(coroutine: Coroutine[Any, Any, T], deadline: Deadline, *, name: str | None = None) -> T:
    """Run *coroutine* in a task and cancel the task at *deadline*.

    A coroutine that suppresses its cancellation is abandoned after `CANCEL_GRACE_SECONDS`.

    Args:
        coroutine: The coroutine.
        deadline: When to cancel it.
        name: The name of the task.

    Returns:
        The result of the coroutine.

    Raises:
        TimeoutError: The coroutine did not finish in time.
    """
    task = asyncio.create_task(coroutine, name=name)
    try:
        while not task.done() and (remaining := deadline.get_remaining_seconds()):
            # The deadline may have moved, so wait again, but do not poll while it is paused.
            await asyncio.wait({task}, timeout=max(remaining, MAX_LOOP_BLOCK_SECONDS))
    except asyncio.CancelledError:
        await cancel_and_wait(task)
        task.add_done_callback(_log_late_failure)
        raise
    if not task.done():
        await cancel_and_wait(task)
    if not task.done():
        task.add_done_callback(_log_late_failure)
        raise TimeoutError
    if task.cancelled():
        raise TimeoutError
    return task.result()


async def cancel_and_wait(task: asyncio.Future[Any]) -> None:
    """Cancel *task* and wait at most `CANCEL_GRACE_SECONDS` until it is done."""
    task.cancel()
    await asyncio.wait({task}, timeout=CANCEL_GRACE_SECONDS)


def _log_late_failure(task: asyncio.Future[Any]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.warning("abandoned code failed after its deadline: %r", error)
