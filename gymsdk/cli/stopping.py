"""The end of a command: after its work, or after Ctrl-C or SIGTERM, it cleans up within a bound and exits.

Code of an environment's author may leave tasks that swallow their cancellation, and threads that block. Both would keep
`asyncio.run` and the interpreter waiting forever.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from gymsdk.cli import process_exit
from gymsdk.descriptors import raise_open_file_limit
from gymsdk.errors import GymsdkError, describe_exception

STOP_SECONDS = 15.0
"""Seconds the work may take to clean up after a signal."""

CANCEL_SECONDS = 3.0
"""Seconds that tasks which outlive the work may take to end once they are cancelled."""

T = TypeVar("T")
log = logging.getLogger("gymsdk")


class Stopped(KeyboardInterrupt):
    """A signal ended the work; *code* is the exit code that says which."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def run_until_signal(work: Coroutine[Any, Any, T], *, last_words: str = "", quiet: bool = False) -> T:
    """Give what *work* returns; raises `Stopped` where a signal ends it first.

    Work that cannot be stopped ends with the process, after *last_words*. That it is being stopped is said on standard
    error, unless that is to be *quiet*.
    """
    stop = _SignalHandler(last_words, quiet=quiet)
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return run_in_new_loop(stop.around(work))
    except asyncio.CancelledError:
        if not stop.code:
            # Nobody asked for this: as a stop it would pass for a run that went well.
            raise RuntimeError("the work was cancelled, and by no signal") from None
        raise Stopped(stop.code) from None
    except SystemExit as error:
        # Raised in a task of an author's own, it ends the loop, and would end the command as if all had gone well.
        raise GymsdkError(
            f"a background task of an environment ended with {describe_exception(error)}; catch that there"
        ) from error
    finally:
        stop.over()
        for number, handler in before.items():
            signal.signal(number, handler)


def run_in_new_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run *work* on a new event loop and give what it returns.

    Like `asyncio.run`, but tasks that do not end within `CANCELLING` seconds of their cancellation are named in a
    warning and left behind, threads of the loop's executor are left to `exiting.exit_in_time`, and this process may
    have as many files open as the system allows it.
    """
    raise_open_file_limit()
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(work)
    finally:
        try:
            loop.run_until_complete(_cancel_others())
            loop.run_until_complete(asyncio.wait({loop.create_task(loop.shutdown_asyncgens())}, timeout=CANCEL_SECONDS))
        finally:
            asyncio.set_event_loop(None)
            loop.close()


async def _cancel_others() -> None:
    """Cancel all other tasks of the running loop, wait for them, and name those that do not end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if not others:
        return
    _, pending = await asyncio.wait(others, timeout=CANCEL_SECONDS)
    for task in pending:
        log.warning(
            "%s did not end within %g s of its cancellation; it is left behind", _describe_task(task), CANCEL_SECONDS
        )
    process_exit.unfinished_tasks.extend(pending)


def _describe_task(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    where = f" ({Path(frames[0].f_code.co_filename).name}:{frames[0].f_lineno})" if frames else ""
    return f"{task.get_name()}{where}"


def run_interruptibly(work: Callable[[], T]) -> T:
    """Give what *work* returns, which waits in this thread; raises `Stopped` where a signal ends it first."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise Stopped(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return work()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _SignalHandler:
    """A signal handler: the first signal cancels the work, the second ends the process."""

    def __init__(self, last_words: str, *, quiet: bool) -> None:
        self.code = 0
        self._quiet = quiet
        self._last_words = last_words
        self._cancel: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._clock: threading.Timer | None = None

    async def around(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        self._cancel = asyncio.get_running_loop(), task
        if self.code:
            task.cancel()
        try:
            return await task
        finally:
            self._cancel = None

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self.code:
            self._exit()
        self.code = 128 + number
        # A loop that somebody's code holds hears of nothing: the clock runs in a thread.
        self._clock = threading.Timer(STOP_SECONDS, self._exit)
        self._clock.daemon = True
        self._clock.start()
        if not self._quiet:
            _print_error("\nstopping; once more to stop at once\n")
        if self._cancel:
            loop, task = self._cancel
            loop.call_soon_threadsafe(task.cancel)

    def over(self) -> None:
        """Let the process live on: the work has ended."""
        if self._clock:
            self._clock.cancel()

    def _exit(self) -> None:
        _print_error(self._last_words)
        os._exit(self.code)


def _print_error(text: str) -> None:
    # Past `sys.stderr`, whose lock the interrupted code may hold.
    os.write(2, text.encode())
