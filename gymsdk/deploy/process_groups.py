"""Make sure that no process group outlives the supervisor that started it, not even when the supervisor is killed."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

from gymsdk.deploy import orphan_reaper
from gymsdk.errors import GymsdkError

log = logging.getLogger("gymsdk")


class ProcessGroups:
    """Reports the process groups of this process to an orphan reaper, which kills them when this process is killed.

    Args:
        seconds: The time that the groups get to end on their own after this process was killed.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._pipe: int | None = None
        self._reaper: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the orphan reaper; raises `GymsdkError` if the system cannot start another process."""
        try:
            reader, self._pipe = os.pipe()
            try:
                self._reaper = await self._start_reaper(reader)
            finally:
                os.close(reader)
        except OSError as error:
            raise GymsdkError(f"no process can be started here ({error.strerror or error})") from None
        finally:
            if self._reaper is None:
                self._close_pipe()

    def add(self, pid: int) -> None:
        """Report that the process *pid* leads a new group."""
        self._write(pid)

    def remove(self, pid: int) -> None:
        """Report that the process *pid* and its group have ended."""
        self._write(-pid)

    async def stop(self) -> None:
        """End the orphan reaper; call it when no group is left."""
        if self._reaper is not None:
            # Killed first, and not left to notice the closed pipe: a process forked from this one may hold the pipe
            # open for as long as it lives, and `kill` would take the exit code of a reaper that has already ended.
            with suppress(ProcessLookupError):
                self._reaper.kill()
        self._close_pipe()
        if self._reaper is not None:
            await self._reaper.wait()

    async def _start_reaper(self, reader: int) -> asyncio.subprocess.Process:
        command = [sys.executable, "-I", "-S", str(Path(orphan_reaper.__file__)), str(self._seconds)]
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=reader,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            # In its own session, so that neither Ctrl-C nor a closed terminal ends it before the groups.
            start_new_session=True,
        )

    def _write(self, number: int) -> None:
        if self._pipe is None:
            return
        try:
            os.write(self._pipe, f"{number}\n".encode())
        except BrokenPipeError:
            self._close_pipe()
            log.warning(
                "the process that kills orphaned servers has ended; restart this process at the next opportunity"
            )

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
