"""Exit the process within a time limit, even if an environment's code left threads and tasks running.

This module is separate from `stopping`, so that a command without an event loop does not import `asyncio`.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress

EXIT_SECONDS = 15.0
"""Seconds that the interpreter may wait for threads before the process exits."""

unfinished_tasks: list[object] = []
"""Tasks that did not end. This list keeps them alive, because destroying them prints errors."""

_exit_codes: list[int] = []
"""The exit code, once it is known."""


def limit_exit_time(code: int) -> None:
    """Make this process exit with *code* within `EXIT_SECONDS`.

    The interpreter waits for every thread that is not a daemon. After `EXIT_SECONDS`, the process names the threads
    that still run on standard error and exits without them.
    """
    _exit_codes.append(code)
    clock = threading.Timer(EXIT_SECONDS, _exit_without_threads)
    clock.daemon = True
    clock.start()


@atexit.register
def _exit_without_tasks() -> None:
    # Registered before all other functions, so it runs last. Without it, the interpreter would destroy the tasks now.
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
    """Return the line of the environment's code that *thread* executes."""
    import traceback

    from gymsdk.errors import find_author_line

    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001  # documented, in spite of its name
    return find_author_line(traceback.extract_stack(frame)) or "not in Python code"
