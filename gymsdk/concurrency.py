"""Event loops, and coroutines that share one."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any, TypeVar

from gymsdk.console import open_standard_files

INTERRUPTS = (KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)
"""Exceptions that stop running code from outside; they must never be caught as errors of an environment.

Every other exception raised by an environment's code is an error of that code, including exceptions that do not derive
from `Exception`: `SystemExit`, or a panic in a Rust extension.
"""

MAX_SLICE_SECONDS = 0.005
"""Seconds that work on many items takes before other work gets a turn."""

CANCEL_GRACE_SECONDS = 1.0
"""Seconds that a cancelled coroutine has to clean up before it is abandoned."""

EVENT_LOOP_VARIABLE = "GYMSDK_EVENT_LOOP"
"""The environment variable that selects the event loop: `uvloop`, the default, or `asyncio`."""

T = TypeVar("T")


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


async def yield_regularly(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield *items*, and let the event loop run its other tasks whenever this has taken `MAX_SLICE_SECONDS`."""
    pause_at = time.monotonic() + MAX_SLICE_SECONDS
    for item in items:
        yield item
        if time.monotonic() >= pause_at:
            await asyncio.sleep(0)
            pause_at = time.monotonic() + MAX_SLICE_SECONDS
