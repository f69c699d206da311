"""A claim: the right to play at a face of an environment, one thread's at a time, in the process it was made in."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gymsdk.errors import UsageError


class Claim:
    """Nobody's at first."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()

    @contextmanager
    def held(self, anew: Callable[[], None]) -> Iterator[None]:
        """Hold it inside the block; in a fork *anew* is called first. Raises `UsageError` where it is held."""
        if self._process != os.getpid():
            # Whoever held it in the parent does not run here.
            self._begin()
            anew()
        if not self._lock.acquire(blocking=False):
            raise UsageError("another thread is using this environment; make one for each thread")
        try:
            yield
        finally:
            self._lock.release()
