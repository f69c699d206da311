"""An outlet: lines written by a thread of its own, so that nobody waits for whoever reads them."""

from __future__ import annotations

import queue
import threading
from typing import TextIO

MOST = 10_000
"""Lines that wait to be written; beyond these they are left out, and counted."""

PATIENCE = 1.0
"""Seconds that what waits may take to be written at the end."""


class Outlet:
    """Writes lines to *out*, in their order, at most *most* of them waiting."""

    def __init__(self, out: TextIO, *, most: int = MOST) -> None:
        self._out = out
        self._lines: queue.Queue[str | None] = queue.Queue(most)
        self._lost = 0
        self._writing = threading.Thread(target=self._write, name="outlet", daemon=True)
        self._writing.start()

    def say(self, line: str) -> None:
        """Have *line* be written, or left out where too many wait."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Have what waits be written, as far as that is read in time."""
        try:
            self._lines.put(None, timeout=PATIENCE)
        except queue.Full:
            return
        self._writing.join(PATIENCE)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            lost, self._lost = self._lost, 0
            told = f"({lost} lines were left out: nobody read them)\n" if lost else ""
            try:
                self._out.write(f"{told}{line}\n")
                self._out.flush()
            except (OSError, ValueError):
                # Nobody is there to read any more.
                return
