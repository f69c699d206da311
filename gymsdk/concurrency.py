"""Event loops, deadlines, bounded threads for blocking code, and the limit of open files."""

from __future__ import annotations

import asyncio
import contextvars
import dis
import inspect
import logging
import os
import queue
import resource
import sys
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Generic, TypeVar, TypeVarTuple

from gymsdk.errors import Failed

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

MAX_TURN_SECONDS = 2 * MAX_SLICE_SECONDS
"""Seconds that the event loop waits for a thread before it goes on beside it."""

CANCEL_GRACE_SECONDS = 1.0
"""Seconds that a cancelled coroutine has to clean up before it is abandoned."""

EVENT_LOOP_VARIABLE = "GYMSDK_EVENT_LOOP"
"""The environment variable that selects the event loop: `uvloop`, the default, or `asyncio`."""

T = TypeVar("T")
log = logging.getLogger("gymsdk")


def create_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop: uvloop's, which costs about half the CPU time per request, or else asyncio's.

    asyncio's loop is used if `GYMSDK_EVENT_LOOP` is `asyncio`, or if uvloop is not installed, as on PyPy.
    """
    if os.environ.get(EVENT_LOOP_VARIABLE) == "asyncio":
        return asyncio.new_event_loop()
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


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

    __slots__ = ("_at", "_pausable", "_paused_at", "_pauses")

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
            "%s held the event loop for %.0f ms; write it as a plain `def`, or offload the work", name, seconds * 1e3
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


def _log_late_failure(task: asyncio.Future[Any]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.warning("abandoned code failed after its deadline: %r", error)


Ts = TypeVarTuple("Ts")


class ThreadPool:
    """Runs blocking calls, each in a daemon thread that is reused afterwards.

    If a call exceeds its time limit, its thread is abandoned and no longer counts towards *limit*.

    Args:
        limit: The maximum number of simultaneous calls.
        max_hung: The number of hung threads at which further calls are refused.
    """

    def __init__(self, limit: int = 64, *, max_hung: int = 256) -> None:
        self._limit = limit
        self._max_hung = max_hung
        self._initialize()

    def _initialize(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._semaphore = CrossLoopSemaphore(self._limit)
        self._idle: list[queue.SimpleQueue[_Job]] = []
        self._hung = 0

    @property
    def hung(self) -> int:
        """The number of abandoned threads that are still running."""
        return self._hung

    async def run(self, function: Callable[[*Ts], T], *args: *Ts, timeout: float | None = None) -> T:  # noqa: ASYNC109 - counts from the start of the call
        """Run *function* in a thread and return its result.

        If the call exceeds its time limit, or the caller is cancelled, the thread is abandoned.

        Args:
            function: The function.
            *args: Its arguments.
            timeout: Seconds that the call may take, without the wait for a free thread; `None` for no limit.

        Raises:
            TimeoutError: The call takes longer.
            Failed: Too many threads hang, or the function tried to exit the process.
        """
        if self._process != os.getpid():
            self._initialize()  # threads do not survive a fork
        semaphore = self._semaphore
        await semaphore.acquire()
        try:
            outcome = await self._run_in_thread(function, args, timeout)
        finally:
            semaphore.release()
        return _unwrap_outcome(outcome, function)

    async def _run_in_thread(
        self, function: Callable[[*Ts], T], args: tuple[*Ts], limit: float | None
    ) -> Callable[[], T]:
        self._check_hung_threads()
        future: asyncio.Future[Callable[[], T]] = asyncio.get_running_loop().create_future()
        context = contextvars.copy_context()

        def work() -> Callable[[], object]:
            outcome = _capture_outcome(lambda: context.run(function, *args))
            return lambda: resolve_future(future, outcome)

        job = _Job(work)
        self._submit(job)
        try:
            async with asyncio.timeout(limit):
                return await future
        except TimeoutError:
            raise TimeoutError(f"{_get_function_name(function)} has not returned after {limit:g} s") from None
        finally:
            self._abandon_if_running(job)

    def _check_hung_threads(self) -> None:
        if self._hung >= self._max_hung:
            raise Failed(
                f"{self._hung} calls hang in abandoned threads, so no further call is started; "
                "find the blocking call without a timeout in the environment's hooks and tools",
                kind="threads_exhausted",
                retryable=True,
            )

    def _submit(self, job: _Job) -> None:
        with self._lock:
            jobs = self._idle.pop() if self._idle else None
        if jobs is None:
            jobs = queue.SimpleQueue()
            threading.Thread(target=self._run_jobs, args=(jobs,), name="gymsdk", daemon=True).start()
        jobs.put(job)

    def _run_jobs(self, jobs: queue.SimpleQueue[_Job]) -> None:
        while True:
            job = jobs.get()
            deliver = job.work()
            if not self._finish(job, jobs):
                return
            deliver()
            del job, deliver  # an idle thread must not keep a result alive

    def _finish(self, job: _Job, jobs: queue.SimpleQueue[_Job]) -> bool:
        with self._lock:
            if job.abandoned:
                self._hung -= 1
                return False
            job.finished = True
            self._idle.append(jobs)
            return True

    def _abandon_if_running(self, job: _Job) -> None:
        with self._lock:
            if not job.finished:
                job.abandoned = True
                self._hung += 1


class CrossLoopSemaphore:
    """A first-come, first-served semaphore for tasks of any number of event loops and threads."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._free = count
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """The number of tasks that wait for a permit."""
        return len(self._waiters)

    async def acquire(self) -> None:
        """Wait for a permit and take it."""
        with self._lock:
            if self._free > 0:
                self._free -= 1
                return
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            self._stop_waiting(waiter)
            raise

    def _stop_waiting(self, waiter: asyncio.Future[None]) -> None:
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                return
        self.release()  # the waiter had received a permit already

    def release(self) -> None:
        """Return a permit; the task that has waited longest receives it."""
        with self._lock:
            while self._waiters:
                if resolve_future(self._waiters.popleft(), None):
                    return
            self._free += 1


def resolve_future(future: asyncio.Future[T], value: T) -> bool:
    """Set the result of *future* from any thread; return `False` if its event loop is closed."""
    try:
        future.get_loop().call_soon_threadsafe(_set_result, future, value)
    except RuntimeError:  # the loop is closed
        return False
    return True


async def yield_regularly(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield *items*, and let the event loop run its other tasks whenever this has taken `MAX_SLICE_SECONDS`."""
    pause_at = time.monotonic() + MAX_SLICE_SECONDS
    for item in items:
        yield item
        if time.monotonic() >= pause_at:
            await asyncio.sleep(0)
            pause_at = time.monotonic() + MAX_SLICE_SECONDS


class ThreadIterator(Iterator[T]):
    """An iterator over the items of the iterable that *source* returns, computed on demand in one daemon thread.

    The thread ends with the iteration, after an error, or when this iterator is garbage-collected.
    """

    def __init__(self, source: Callable[[], Iterable[T]]) -> None:
        self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Callable[[], T | _EndOfIteration]] = queue.SimpleQueue()
        context = contextvars.copy_context()
        arguments = (source, self._requests, self._outcomes, context)
        threading.Thread(target=_compute_items, args=arguments, name="gymsdk-iterator", daemon=True).start()
        self._stop = weakref.finalize(self, self._requests.put, False)

    def __next__(self) -> T:
        item: T | _EndOfIteration = END_OF_ITERATION
        if self._stop.alive:
            self._requests.put(True)
            item = self._take(self._outcomes.get())
        if isinstance(item, _EndOfIteration):
            raise StopIteration
        return item

    async def next_in_turn(self) -> T | None:
        """Return the next item, `None` after the last one, while the event loop and the thread take turns.

        The loop stands still until the thread has computed the item, for `MAX_TURN_SECONDS` at most. If both ran at the
        same time, uvloop would wait for the interpreter lock at each event of a connection.
        """
        if not self._stop.alive:
            return None
        self._requests.put(True)
        try:
            outcome = self._outcomes.get(timeout=MAX_TURN_SECONDS)
        except queue.Empty:
            outcome = await asyncio.to_thread(self._outcomes.get)
        else:
            await asyncio.sleep(0)
        item = self._take(outcome)
        return None if isinstance(item, _EndOfIteration) else item

    def _take(self, outcome: Callable[[], T | _EndOfIteration]) -> T | _EndOfIteration:
        """Return the item of *outcome*; the thread stops after the last one, and after an error."""
        try:
            item = outcome()
        except BaseException:
            self._stop()
            raise
        if isinstance(item, _EndOfIteration):
            self._stop()
        return item


def _compute_items(
    source: Callable[[], Iterable[T]],
    requests: queue.SimpleQueue[bool],
    outcomes: queue.SimpleQueue[Callable[[], T | _EndOfIteration]],
    context: contextvars.Context,
) -> None:
    items: Iterator[T] | None = None

    def compute_next() -> T | _EndOfIteration:
        nonlocal items
        if items is None:
            items = iter(source())
        return next(items, END_OF_ITERATION)

    while requests.get():
        outcomes.put(_capture_outcome(lambda: context.run(compute_next)))


class _EndOfIteration:
    """A marker for the end of an iterator."""


END_OF_ITERATION = _EndOfIteration()


@dataclass(slots=True, eq=False)
class _Job:
    """One call in a thread.

    Attributes:
        work: Makes the call and returns a function that delivers its outcome.
        finished: Set by the thread if the caller still waits.
        abandoned: Set by the caller if the thread has not finished.
    """

    work: Callable[[], Callable[[], object]]
    finished: bool = False
    abandoned: bool = False


def _set_result(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _capture_outcome(function: Callable[[], T]) -> Callable[[], T]:
    """Call *function* and return a function with the same outcome: it returns the value or raises the exception."""
    try:
        value = function()
    except BaseException as raised:  # noqa: BLE001 - raised again where the caller waits
        error = raised

        def fail() -> T:
            raise error

        return fail
    return lambda: value


def _unwrap_outcome(outcome: Callable[[], T], function: Callable[..., object]) -> T:
    try:
        return outcome()
    except Exception:
        raise
    except BaseException as error:  # `sys.exit()` in a hook must neither end the host nor look like a cancellation
        raise Failed(f"{_get_function_name(function)} ended with {error!r}", kind="exit") from error


def _get_function_name(function: Callable[..., object]) -> str:
    """Return the name of *function* for a message, without the arguments of a partial, which may be secret."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__name__)


MAX_OPEN_FILES = 65535
"""The soft limit of open files, connections included, that a process requests."""

RESERVED_DESCRIPTORS = 128
"""Descriptors reserved for files, worker processes and the files of environments."""


def raise_open_file_limit() -> int:
    """Raise the soft limit of open files as far as the hard limit allows, and return the resulting limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def count_affordable(connections_each: int) -> int:
    """Return how many objects with *connections_each* connections this process can open in addition to its open files.

    The result is at least 1.
    """
    free = raise_open_file_limit() - sum(1 for _ in Path("/dev/fd").iterdir()) - RESERVED_DESCRIPTORS
    return max(free // connections_each, 1)
