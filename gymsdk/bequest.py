"""A bequest: what a process leaves to its survivor, the processes that are to end when it is killed."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

from gymsdk import survivor
from gymsdk.errors import GymsdkError

log = logging.getLogger("gymsdk")


class Bequest:
    """Tells a survivor which processes there are; they have *seconds* to end when this one is killed."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._mouth: int | None = None
        self._survivor: asyncio.subprocess.Process | None = None

    async def begin(self) -> None:
        """Start the survivor; raises `GymsdkError` where the system has no process more."""
        try:
            theirs, self._mouth = os.pipe()
            try:
                self._survivor = await self._begun(theirs)
            finally:
                os.close(theirs)
        except OSError as error:
            raise GymsdkError(f"no process can be started here ({error.strerror or error})") from None
        finally:
            if self._survivor is None:
                self._close()

    def add(self, pid: int) -> None:
        """Tell of a process that leads a group."""
        self._say(pid)

    def remove(self, pid: int) -> None:
        """Tell that a process is over, and all that it had started."""
        self._say(-pid)

    async def end(self) -> None:
        """Let the survivor go: nothing is left to it."""
        if self._survivor is not None:
            # What this process forked may hold our end of the pipe, too: it would wait for as long as that lives. And
            # first: of one that ends by itself meanwhile, `kill` would take the exit code from whoever waits for it.
            with suppress(ProcessLookupError):
                self._survivor.kill()
        self._close()
        if self._survivor is not None:
            await self._survivor.wait()

    async def _begun(self, ear: int) -> asyncio.subprocess.Process:
        words = [sys.executable, "-I", "-S", str(Path(survivor.__file__)), str(self._seconds)]
        return await asyncio.create_subprocess_exec(
            *words,
            stdin=ear,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            # Neither Ctrl-C nor the end of a terminal is to end it first.
            start_new_session=True,
        )

    def _say(self, number: int) -> None:
        if self._mouth is None:
            return
        try:
            os.write(self._mouth, f"{number}\n".encode())
        except BrokenPipeError:
            self._close()
            log.warning("the process that ends servers which hang has ended; start this one anew when you can")

    def _close(self) -> None:
        if self._mouth is not None:
            os.close(self._mouth)
            self._mouth = None
