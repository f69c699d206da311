"""Daemon threads for blocking functions: bounded, under a deadline, replaced where one hangs."""

from __future__ import annotations

import asyncio
import contextvars
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, TypeVarTuple

from gymsdk.errors import Failed

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def resolve_future(future: asyncio.Future[T], value: T) -> bool:
    """Whether *future*'s loop still runs; if so the future gets *value*, from whatever thread this is called in."""
    try:
        future.get_loop().call_soon_threadsafe(_set_result, future, value)
    except RuntimeError:  # the loop is closed, so nobody waits
        return False
    return True


def _set_result(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


class _EndOfIteration:
    """What stands behind the last item of an iterator."""


END_OF_ITERATION = _EndOfIteration()


class CrossLoopSemaphore:
    """So many at once, whichever event loop each of them runs in."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._left = count
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> None:
        """Return once one of the permits is the caller's."""
        with self._lock:
            if self._left > 0:
                self._left -= 1
                return
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            self._give_up(turn)
            raise

    def _give_up(self, turn: asyncio.Future[None]) -> None:
        with self._lock:
            if turn in self._waiting:
                self._waiting.remove(turn)
                return
        self.release()  # the permit was on its way

    def release(self) -> None:
        """Hand one permit to whoever waits longest."""
        with self._lock:
            while self._waiting:
                if resolve_future(self._waiting.popleft(), None):
                    return
            self._left += 1


def iterate_in_thread(source: Callable[[], Iterable[T]]) -> Iterator[T]:
    """Yield the items of what *source* returns, made in one daemon thread from first to last.

    An item is made when it is asked for. The thread ends with the iteration, or once nothing refers to this iterator.
    """
    asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
    made: queue.SimpleQueue[Callable[[], T | _EndOfIteration]] = queue.SimpleQueue()
    context = contextvars.copy_context()

    def serve() -> None:
        items: Iterator[T] | None = None

        def following() -> T | _EndOfIteration:
            nonlocal items
            if items is None:
                items = iter(source())
            return next(items, END_OF_ITERATION)

        while asked.get():
            made.put(_capture_outcome(lambda: context.run(following)))

    threading.Thread(target=serve, name="gymsdk-iterator", daemon=True).start()
    try:
        while True:
            asked.put(True)
            item = made.get()()
            if isinstance(item, _EndOfIteration):
                return
            yield item
    finally:
        asked.put(False)


def _capture_outcome(function: Callable[[], T]) -> Callable[[], T]:
    """Call *function*, and give a function that ends the same way: with its value or with its exception."""
    try:
        value = function()
    except BaseException as raised:  # noqa: BLE001 - it is raised again where the caller waits
        error = raised

        def fail() -> T:
            raise error

        return fail
    return lambda: value


@dataclass(slots=True, eq=False)
class _Job:
    """One call: *work* makes it and gives what hands over its end; whoever is first sets *finished* or *abandoned*."""

    work: Callable[[], Callable[[], object]]
    finished: bool = False
    abandoned: bool = False


class ThreadPool:
    """At most *limit* blocking calls at once, each in a daemon thread: reused afterwards, abandoned where it hangs.

    An abandoned thread no longer counts towards *limit*; while *most_hung* of them hang, further calls are refused.
    """

    def __init__(self, limit: int = 64, *, max_hung: int = 256) -> None:
        self._limit = limit
        self._most_hung = max_hung
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._permits = CrossLoopSemaphore(self._limit)
        self._idle: list[queue.SimpleQueue[_Job]] = []
        self._hung = 0

    @property
    def hung(self) -> int:
        """How many abandoned threads have not come back."""
        return self._hung

    async def run(self, function: Callable[[*Ts], T], *args: *Ts, timeout: float | None = None) -> T:  # noqa: ASYNC109 - it counts from when the call begins, not from now
        """Give what *function* returns; raise `TimeoutError` where it runs longer than *timeout* seconds.

        There, and where the caller is cancelled, the thread is abandoned. Waiting for a thread does not count.
        """
        if self._process != os.getpid():
            self._begin()  # threads do not survive a fork
        permits = self._permits
        await permits.acquire()
        try:
            end = await self._end(function, args, timeout)
        finally:
            permits.release()
        return _unwrap_outcome(end, function)

    async def _end(self, function: Callable[[*Ts], T], args: tuple[*Ts], limit: float | None) -> Callable[[], T]:
        self._refuse_if_exhausted()
        ended: asyncio.Future[Callable[[], T]] = asyncio.get_running_loop().create_future()
        context = contextvars.copy_context()

        def work() -> Callable[[], object]:
            end = _capture_outcome(lambda: context.run(function, *args))
            return lambda: resolve_future(ended, end)

        job = _Job(work)
        self._start(job)
        try:
            async with asyncio.timeout(limit):
                return await ended
        except TimeoutError:
            raise TimeoutError(f"{_get_function_name(function)} has not returned after {limit:g} s") from None
        finally:
            self._leave(job)

    def _refuse_if_exhausted(self) -> None:
        if self._hung >= self._most_hung:
            raise Failed(
                f"{self._hung} calls hang in abandoned threads, so no further one is begun; "
                "find the blocking call without a timeout in the environment's hooks and tools",
                kind="threads_exhausted",
                retryable=True,
            )

    def _start(self, job: _Job) -> None:
        with self._lock:
            jobs = self._idle.pop() if self._idle else None
        if jobs is None:
            jobs = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(jobs,), name="gymsdk", daemon=True).start()
        jobs.put(job)

    def _serve(self, jobs: queue.SimpleQueue[_Job]) -> None:
        while True:
            job = jobs.get()
            hand_over = job.work()
            if not self._finish(job, jobs):
                return
            hand_over()
            del job, hand_over  # an idle thread must not keep a result alive

    def _finish(self, job: _Job, jobs: queue.SimpleQueue[_Job]) -> bool:
        with self._lock:
            if job.abandoned:
                self._hung -= 1
                return False
            job.finished = True
            self._idle.append(jobs)
            return True

    def _leave(self, job: _Job) -> None:
        with self._lock:
            if not job.finished:
                job.abandoned = True
                self._hung += 1


def _unwrap_outcome(end: Callable[[], T], function: Callable[..., object]) -> T:
    try:
        return end()
    except Exception:
        raise
    except BaseException as error:  # `sys.exit()` in a hook must not end the host, nor pass for a cancellation
        raise Failed(f"{_get_function_name(function)} ended with {error!r}", kind="exit") from error


def _get_function_name(function: Callable[..., object]) -> str:
    """Return what a message calls *function*: of a partial the function alone, as its arguments may hold anything."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__name__)
