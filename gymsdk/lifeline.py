"""A lifeline: a process that ends with the one that started it, however that one ends."""

from __future__ import annotations

import os
import signal
import threading


def held(file: int = 0) -> None:
    """Have this process end as by SIGTERM once nobody holds the other end of *file*, by default standard input."""
    threading.Thread(target=_end, args=(file,), name="lifeline", daemon=True).start()


def _end(file: int) -> None:
    # Past `sys.stdin`, whose lock would be held when the interpreter ends.
    while os.read(file, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
