"""Writing: lines on their way to files, which nobody waits for: whoever reads them may be slow, or have stopped."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

MOST = 10_000
"""Lines that wait at most: what comes when there are as many is dropped, and counted."""

ENDING = 2.0
"""Seconds that the end waits for lines that nobody takes."""


class Writer:
    """Writes lines in a thread of its own; *lost* makes the line that tells how many were dropped."""

    def __init__(self, lost: Callable[[int], bytes], most: int = MOST) -> None:
        self._lost = lost
        self._most = most
        self._thread: threading.Thread | None = None
        self._begin()

    def put(self, file: int, line: bytes) -> None:
        """Have *line* be written to *file*, or be counted where too many wait."""
        if self._process != os.getpid():
            # The thread is the parent's, and so is what waits for it.
            self._begin()
        with self._change:
            if len(self._waiting) >= self._most:
                self._dropped += 1
                return
            self._waiting.append((file, line))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gymsdk-logs", daemon=True)
                self._thread.start()
            self._change.notify_all()

    def flush(self, seconds: float = ENDING) -> bool:
        """Wait until all that came has been written, *seconds* at most; gives whether it has."""
        if self._process != os.getpid():
            return True
        with self._change:
            return self._change.wait_for(lambda: not self._waiting and not self._writing, seconds)

    def _begin(self) -> None:
        self._process = os.getpid()
        self._change = threading.Condition()
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._writing = False
        self._dropped = 0
        self._thread = None

    def _run(self) -> None:
        while True:
            with self._change:
                self._writing = False
                self._change.notify_all()
                self._change.wait_for(lambda: self._waiting)
                file, line = self._waiting.popleft()
                dropped, self._dropped, self._writing = self._dropped, 0, True
            _written(file, line)
            if dropped:
                _written(file, self._lost(dropped))


def _written(file: int, line: bytes) -> None:
    try:
        while line:
            line = line[os.write(file, line) :]
    except OSError:
        # Nobody reads it any more, or the disk is full: there is nowhere to say so.
        return
