"""Event loops, deadlines, and coroutines that end at their deadline."""

from __future__ import annotations

import asyncio
import contextvars
import dis
import inspect
import logging
import os
import sys
import time
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Generic, TypeVar

from gymsdk.console import open_standard_files

INTERRUPTS = (KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)
"""Exceptions that stop running code from outside; they must never be caught as errors of an environment.

Every other exception raised by an environment's code is an error of that code, including exceptions that do not derive
from `Exception`: `SystemExit`, or a panic in a Rust extension.
"""

DEFAULT_STAGE_SECONDS = 600.0
"""Seconds that a stage may take if it has no deadline."""

MAX_LOOP_BLOCK_SECONDS = 0.05
"""Seconds that a coroutine may block the event loop before a warning names it."""

MAX_SLICE_SECONDS = 0.005
"""Seconds that work on many items takes before other work gets a turn."""

CANCEL_GRACE_SECONDS = 1.0
"""Seconds that a cancelled coroutine has to clean up before it is abandoned."""

EVENT_LOOP_VARIABLE = "GYMSDK_EVENT_LOOP"
"""The environment variable that selects the event loop: `uvloop`, the default, or `asyncio`."""

T = TypeVar("T")
log = logging.getLogger("gymsdk")


def create_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop: uvloop's, which costs about half the CPU time per request, or else asyncio's.

    asyncio's loop is used if `GYMSDK_EVENT_LOOP` is `asyncio`, in asyncio's debug mode from Python 3.12 on, and if
    uvloop is not installed, as on PyPy.
    """
    # uvloop reads the stack in debug mode, in a way that crashes the process since Python 3.12 has changed its frames.
    is_unsafe = sys.version_info >= (3, 12) and is_debug_mode()
    if is_unsafe or os.environ.get(EVENT_LOOP_VARIABLE) == "asyncio":
        return asyncio.new_event_loop()
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    # Programs that use gymsdk as a library may have been started without standard files, too.
    open_standard_files()
    return uvloop.new_event_loop()


def is_debug_mode() -> bool:
    """Return whether the user has switched on asyncio's debug mode, with its variable or with `python -X dev`."""
    return sys.flags.dev_mode or (not sys.flags.ignore_environment and bool(os.environ.get("PYTHONASYNCIODEBUG")))


def run_event_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run *work* like `asyncio.run`, on a loop of `create_event_loop`."""
    with asyncio.Runner(loop_factory=create_event_loop) as runner:
        return runner.run(work)


class Deadline:
    """A time of the event loop's clock until which code must finish.

    Args:
        at: The time of the event loop's clock.
        pausable: Whether the deadline moves while the code waits for an operation with its own time limit. The deadline
            of `verify` does: time spent in a queue for a worker or for a slow judge does not make a verifier slow.
    """

    __slots__ = ("_at", "_paused_at", "_pauses", "is_pausable")

    def __init__(self, at: float, *, pausable: bool = False) -> None:
        self._at = at
        self.is_pausable = pausable
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
        if not self.is_pausable:
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


class apply_deadline:  # noqa: N801 - a context manager, used like a function
    """Make *deadline* the current deadline inside the block."""

    __slots__ = ("_deadline", "_token")

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline

    def __enter__(self) -> None:
        self._token = _current_deadline.set(self._deadline)

    def __exit__(self, *_: object) -> None:
        _current_deadline.reset(self._token)


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


async def warn_when_blocking(coroutine: Coroutine[Any, Any, T], name: str) -> T:
    """Run *coroutine*, and log a warning whenever it blocks the loop for more than `MAX_LOOP_BLOCK_SECONDS`.

    The measure is wall-clock time, so it includes other causes that stop the thread: a garbage collection, which with
    a thousand episodes in memory can exceed the limit, or a busy machine.

    Args:
        coroutine: The coroutine.
        name: Its name in the warning.

    Raises:
        RuntimeError: The coroutine raised `SystemExit`.
    """
    # Since Python 3.12, asyncio makes a task of a coroutine only, not of a generator with `types.coroutine`.
    return await _resume_and_time(coroutine, name)


@types.coroutine
def _resume_and_time(coroutine: Coroutine[Any, Any, T], name: str) -> Generator[Any, Any, T]:
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
            _warn_if_blocked(time.perf_counter() - started, name)
        try:
            value = yield awaited
            resume = coroutine.send
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as error:  # noqa: BLE001 - passed on to the coroutine, as `yield from` does
            value, resume = error, coroutine.throw


def _warn_if_blocked(seconds: float, name: str) -> None:
    if seconds > MAX_LOOP_BLOCK_SECONDS:
        log.warning(
            "%s held the event loop for %.0f ms; write it as a plain `def`, or offload the work"
            " (on a busy machine, other programs may be the cause)",
            name,
            seconds * 1e3,
        )


@lru_cache(maxsize=1024)
def _is_without_await(code: types.CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_COROUTINE) and all(
        each.opname != "YIELD_VALUE" for each in dis.get_instructions(code)
    )


def never_suspends(function: Callable[..., object]) -> bool:
    """Return whether *function* is an `async def` without `await`, `async for` and `async with`.

    Only these suspend a coroutine, and each of them compiles to an instruction that yields.
    """
    function = getattr(function, "__func__", function)
    # A compiled function may have a code object without instructions.
    return isinstance(function, types.FunctionType) and _is_without_await(function.__code__)


def run_without_suspending(coroutine: Coroutine[Any, Any, T], name: str) -> T:
    """Run the coroutine of a function that `never_suspends`, and warn like `warn_when_blocking`.

    This costs a fraction of a task. Like a task, the coroutine has its own copy of the context.

    Args:
        coroutine: The coroutine.
        name: Its name in the warning.

    Raises:
        RuntimeError: The coroutine raised `SystemExit`.
        TimeoutError: The coroutine raised `CancelledError` itself.
    """
    started = time.perf_counter()
    try:
        contextvars.copy_context().run(coroutine.send, None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    except asyncio.CancelledError as error:
        raise TimeoutError from error
    except SystemExit as error:
        raise RuntimeError(f"it ended with {error!r}") from error
    finally:
        _warn_if_blocked(time.perf_counter() - started, name)
    coroutine.close()
    raise RuntimeError(f"{name} suspended")


def start_task(coroutine: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Future[T]:
    """Run *coroutine* in a task, at once until it suspends for the first time.

    A coroutine that does not suspend has finished when this function returns. Most hooks are such coroutines, and a
    task that the event loop starts later would cost more than their own work.

    Args:
        coroutine: The coroutine.
        name: The name of the task.

    Returns:
        The task, or a finished future.
    """
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is not None:
        # Such as the one that counts the CPU time of tasks.
        return loop.create_task(coroutine, name=name)
    if sys.version_info >= (3, 12):
        return asyncio.Task(coroutine, loop=loop, name=name, eager_start=True)
    first_step, context = _FirstStep(coroutine), contextvars.copy_context()
    task: asyncio.Task[T] = asyncio.Task(first_step.finish(), loop=loop, name=name, context=context)
    return first_step.run(loop, task, context) or task


class _FirstStep(Generic[T]):
    """The first step of a coroutine, which runs before the event loop starts the task of the coroutine.

    Python 3.12 has tasks that start eagerly. On Python 3.11, the task runs `finish`, and `run` makes it the current
    task meanwhile, so that timeouts and task groups in the coroutine find the same task in all steps.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._awaited: Any = None
        self._is_finished = False

    def run(
        self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[T], context: contextvars.Context
    ) -> asyncio.Future[T] | None:
        """Run the step; return a future with the outcome if the coroutine has finished, else `None`."""
        caller = asyncio.current_task(loop)
        if caller is not None:
            asyncio.tasks._leave_task(loop, caller)  # noqa: SLF001  # documented, for other implementations of tasks
        asyncio.tasks._enter_task(loop, task)  # noqa: SLF001
        future: asyncio.Future[T] = loop.create_future()
        try:
            self._awaited = context.run(self._coroutine.send, None)
        except StopIteration as stop:
            future.set_result(stop.value)
        except asyncio.CancelledError:
            future.cancel()
        except Exception as error:  # noqa: BLE001 - the caller takes it from the future
            future.set_exception(error)
        except BaseException:
            # Such as KeyboardInterrupt, which the caller gets; the task must not resume the coroutine.
            self._is_finished = True
            raise
        else:
            return None
        finally:
            asyncio.tasks._leave_task(loop, task)  # noqa: SLF001
            if caller is not None:
                asyncio.tasks._enter_task(loop, caller)  # noqa: SLF001
        self._is_finished = True
        return future

    async def finish(self) -> T:
        """Run the rest of the coroutine."""
        if self._is_finished:
            # Nobody waits for this task; the outcome is in the future.
            return None  # type: ignore[return-value]
        return await self._resume()

    @types.coroutine
    def _resume(self) -> Generator[Any, Any, T]:
        awaited, resume = self._awaited, self._coroutine.send
        while True:
            try:
                value = yield awaited
                resume = self._coroutine.send
            except GeneratorExit:
                self._coroutine.close()
                raise
            except BaseException as error:  # noqa: BLE001 - passed on to the coroutine, as `yield from` does
                value, resume = error, self._coroutine.throw
            try:
                awaited = resume(value)
            except StopIteration as stop:
                result: T = stop.value
                return result


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
    task = start_task(coroutine, name=name)
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


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of *coroutines*, which run at the same time; if one fails, cancel the others and raise."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _log_late_failure(task: asyncio.Future[Any]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.warning("abandoned code failed after its deadline: %r", error)


async def yield_regularly(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield *items*, and let the event loop run its other tasks whenever this has taken `MAX_SLICE_SECONDS`."""
    pause_at = time.monotonic() + MAX_SLICE_SECONDS
    for item in items:
        yield item
        if time.monotonic() >= pause_at:
            await asyncio.sleep(0)
            pause_at = time.monotonic() + MAX_SLICE_SECONDS
