"""Functions that the tests offload; Ray workers import this module."""

from __future__ import annotations

import os
import time
from pathlib import Path

from gymsdk import offload


@offload(timeout=20)
def grade(folder: str, number: int) -> tuple[int, str]:
    """Leave a file for each execution, and return the number and the node's process."""
    time.sleep(0.01)
    Path(folder, f"{number}-{os.urandom(4).hex()}").touch()
    return number, os.environ.get("RAY_RAYLET_PID", "")


@offload(timeout=5)
def fail(text: str) -> None:
    raise LookupError(text)


@offload(timeout=2, cpu=0.3)
def burn() -> None:
    while True:
        pass


@offload(timeout=0.5, cpu=0.2)
def hang() -> None:
    time.sleep(60)


@offload(timeout=5)
def exit_now() -> None:
    os._exit(3)


@offload(timeout=5)
def square(number: int) -> int:
    return number * number
