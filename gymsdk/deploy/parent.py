"""The child's end of the pipe from its supervisor: read the configuration line, and end when the supervisor ends."""

from __future__ import annotations

import os
import select
import signal
import threading
import time

from gymsdk.errors import GymsdkError

CONFIG_WAIT_SECONDS = 60.0
"""Seconds that the parent may take to write the configuration line."""


def read_config_line(file: int = 0, *, seconds: float = CONFIG_WAIT_SECONDS) -> bytes:
    """Read the line that the supervisor writes to a server's standard input when the server starts.

    Args:
        file: The descriptor to read from, by default standard input.
        seconds: The longest time to wait for the line.

    Raises:
        GymsdkError: The line does not arrive in time, or the parent ends before it has written the line.
    """
    line = b""
    deadline = time.monotonic() + seconds
    while not line.endswith(b"\n"):
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not select.select([file], [], [], remaining)[0]:
            raise GymsdkError(
                f"this server received no configuration on standard input within {seconds:g} s;"
                " start it with `gymsdk serve NAME --separate`"
            )
        if not (chunk := os.read(file, 65536)):
            raise GymsdkError(
                "the process that started this server ended before it sent the configuration; start that process again"
            )
        line += chunk
    return line


def watch_parent(file: int = 0) -> None:
    """Send SIGTERM to this process once the parent has closed its end of *file*, by default standard input."""
    threading.Thread(target=_terminate_at_end, args=(file,), name="parent-watch", daemon=True).start()


def _terminate_at_end(file: int) -> None:
    # Not through `sys.stdin`: this thread would hold its lock when the interpreter ends.
    while os.read(file, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
