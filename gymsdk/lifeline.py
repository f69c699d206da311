"""A lifeline: a process that ends with the one that started it, however that one ends, and is told its task by it."""

from __future__ import annotations

import os
import select
import signal
import threading
import time

from gymsdk.errors import GymsdkError

PATIENCE = 60.0
"""Seconds that the one who started this process may take to say what it is for."""


def line(file: int = 0, *, seconds: float = PATIENCE) -> bytes:
    """Give the one line that comes down the lifeline before it is held; raises `GymsdkError` where none does."""
    read = b""
    until = time.monotonic() + seconds
    while not read.endswith(b"\n"):
        left = until - time.monotonic()
        if left <= 0 or not select.select([file], [], [], left)[0]:
            raise GymsdkError(
                f"nobody said within {seconds:g} s what this server is to be; `gymsdk serve NAME --separate` does"
            )
        if not (some := os.read(file, 65536)):
            raise GymsdkError("whoever started this server ended before it was told what to be; start that again")
        read += some
    return read


def held(file: int = 0) -> None:
    """Have this process end as by SIGTERM once nobody holds the other end of *file*, by default standard input."""
    threading.Thread(target=_end, args=(file,), name="lifeline", daemon=True).start()


def _end(file: int) -> None:
    # Past `sys.stdin`, whose lock would be held when the interpreter ends.
    while os.read(file, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
