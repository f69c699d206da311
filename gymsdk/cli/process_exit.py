"""The end of the process: within a bound, whatever threads and tasks the code of an environment's author has left.

Apart from `stopping`, so that a command that needs no event loop does not import `asyncio`.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress

EXIT_SECONDS = 15.0
"""Seconds that the interpreter may wait for threads before it exits."""

unfinished_tasks: list[object] = []
"""Tasks that did not end. While they are in this list, they are not destroyed, which would print errors."""

_exit_codes: list[int] = []
"""The exit code, once it is known."""


def limit_exit_time(code: int) -> None:
    """Have this process end with *code* within `PATIENCE` seconds.

    The interpreter waits for every thread that is no daemon. Threads that still run after `PATIENCE` seconds are named
    on standard error, and the process exits without them.
    """
    _exit_codes.append(code)
    clock = threading.Timer(EXIT_SECONDS, _exit_without_threads)
    clock.daemon = True
    clock.start()


@atexit.register
def _exit_without_tasks() -> None:
    # Registered before all other functions, it runs after them. The interpreter would now destroy the tasks.
    if unfinished_tasks and _exit_codes:
        _exit_now()


def _exit_without_threads() -> None:
    for each in threading.enumerate():
        if not each.daemon and each is not threading.main_thread():
            words = f"thread {each.name!r} ({_find_author_line(each)}) is still running; the process exits without it\n"
            os.write(2, words.encode())
    _exit_now()


def _exit_now() -> None:
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(_exit_codes[-1])


def _find_author_line(thread: threading.Thread) -> str:
    """Give the line of the author's code that *thread* is at."""
    import traceback

    from gymsdk.errors import find_author_line

    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001  # documented, in spite of its name
    return find_author_line(traceback.extract_stack(frame)) or "at no line of Python"
