"""An outlet: lines of other processes, read as they come, and written by a thread of its own that nobody waits for."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import AsyncIterator
from typing import TextIO

MOST = 10_000
"""Lines that wait to be written; beyond these they are left out, and counted."""

PATIENCE = 1.0
"""Seconds that what waits may take to be written at the end."""

LINE = 2**20
"""Bytes that a line may have to be read in one piece."""


class Outlet:
    """Writes lines to *out*, in their order, at most *most* of them waiting."""

    def __init__(self, out: TextIO, *, most: int = MOST) -> None:
        self._out = out
        self._lines: queue.Queue[str | None] = queue.Queue(most)
        self._lost = 0
        self._writing = threading.Thread(target=self._write, name="outlet", daemon=True)

    def start(self) -> None:
        """Write what waits, and what comes."""
        self._writing.start()

    def put(self, line: str) -> None:
        """Have *line* be written, or left out where too many wait."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Have what waits be written, as far as that is read in time."""
        if self._writing.ident is None:
            return
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


async def lines(mouth: int) -> AsyncIterator[str]:
    """Yield the lines that come out of the pipe *mouth*, which is closed then, one longer than `LINE` in pieces."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(mouth, "rb", 0)
    )
    try:
        begun = b""
        while some := await reader.read(LINE):
            *whole, begun = (begun + some).split(b"\n")
            if len(begun) > LINE:
                whole, begun = [*whole, begun], b""
            for line in whole:
                yield _text(line)
        if begun:
            yield _text(begun)
    finally:
        transport.close()


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip()
