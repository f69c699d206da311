"""Bounds on an author's coroutines: a deadline they cannot outlast, a word about those that block the loop."""

from __future__ import annotations

import asyncio
import logging
import time
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from gymsdk.deadlines import Deadline

LONG = 0.05
"""Seconds a coroutine may hold the event loop before it is named."""

GRACE = 1.0
"""Seconds a cancelled coroutine gets to clean up before it is left behind."""

T = TypeVar("T")
log = logging.getLogger("gymsdk")


@types.coroutine
def watched(coroutine: Coroutine[Any, Any, T], what: str) -> Generator[Any, Any, T]:
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
            if held > LONG:
                log.warning("%s held the event loop for %.0f ms; make it `def`, or offload the work", what, held * 1e3)
        try:
            given = yield waited_for
            send = coroutine.send
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as error:  # noqa: BLE001  # handed to the coroutine, as `yield from` would
            given, send = error, coroutine.throw


async def bounded(coroutine: Coroutine[Any, Any, T], deadline: Deadline, *, name: str | None = None) -> T:
    """Await *coroutine* in a task called *name* until *deadline*, then cancel it; raises `TimeoutError`.

    A coroutine that swallows its cancellation is left behind after `GRACE` seconds.
    """
    task = asyncio.create_task(coroutine, name=name)
    try:
        while not task.done() and (left := deadline.get_remaining_seconds()):
            # Again where it has moved meanwhile, but not at every instant while it moves.
            await asyncio.wait({task}, timeout=max(left, LONG))
    except asyncio.CancelledError:
        await _stop(task)
        task.add_done_callback(_forget)
        raise
    if not task.done():
        await _stop(task)
    if not task.done():
        task.add_done_callback(_forget)
        raise TimeoutError
    if task.cancelled():
        raise TimeoutError
    return task.result()


async def _stop(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=GRACE)


def _forget(task: asyncio.Future[Any]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.warning("code left behind failed later: %r", error)
