"""A supervisor: processes that are started, watched, started again when they end, and ended together."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TextIO

from gymsdk.errors import GymsdkError, UsageError
from gymsdk.outlet import Outlet

FIRST, LONGEST = 0.1, 10.0
"""Seconds before a process that ended is started again: twice as many each time, up to a bound."""

HEALTHY = 30.0
"""Seconds a process has to live for its next pause to be the first again."""

USAGE = 2
"""The exit code of what was asked for wrongly: again would be as wrong."""

LAST_WORDS = 1.0
"""Seconds that what an ended process wrote last may take to be passed on."""

LINE = 2**20
"""Bytes a line of a process's output may have to be passed on in one piece."""

log = logging.getLogger("gymsdk")


@dataclass(frozen=True, slots=True)
class Charge:
    """A process to be: its *name*, the words that start it, the socket it is handed down, open under the same number.

    Connections wait at the socket while nobody is there to answer them. A process that opens one itself is handed
    none. It is started *again* for as long as that says so, and may end at most so many times (*tries*) before it is
    ready; any other end is everybody's.
    """

    name: str
    words: Sequence[str]
    at: socket.socket | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    again: Callable[[], bool] = lambda: True
    tries: int | None = None


@dataclass(frozen=True, slots=True)
class Exit:
    """How the process *pid* ended: by its exit *code*, negative for a signal, at *at* (seconds since the epoch)."""

    code: int
    at: float
    restarts: int
    pid: int


class Supervisor:
    """Keeps *charges* running; what they write goes to *out*, each line behind its process's name unless it is *bare*.

    One that ends is started again. At the end each has *seconds* to end, and is killed then; the *last* of them is
    told to end when the others have. Whenever one has ended that is to be started again, *ended* is called.
    """

    def __init__(
        self,
        charges: Sequence[Charge],
        *,
        seconds: float = 12.0,
        last: str | None = None,
        out: TextIO | None = None,
        bare: bool = False,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.exits: dict[str, Exit] = {}
        self._charges = charges
        self._seconds = seconds
        self._last = last
        self._outlet = Outlet(out or sys.stderr)
        self._last_lines: dict[str, str] = {}
        self._ready: set[str] = set()
        self._bare = bare
        self._told_of = ended
        self._width = max((len(each.name) for each in charges), default=0)
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._ending: set[str] = set()
        self._asked: set[str] = set()
        self._restarting: set[asyncio.Future[None]] = set()

    def restart(self, name: str) -> None:
        """Have the process *name* end as it does at the end, and start it again at once."""
        if (process := self._running.get(name)) is not None and name not in self._asked:
            self._asked.add(name)
            waiting = asyncio.ensure_future(self._ended(name, process))
            self._restarting.add(waiting)
            waiting.add_done_callback(self._restarting.discard)

    def pid(self, name: str) -> int | None:
        """Give the process that is *name* just now, `None` between two of them."""
        process = self._running.get(name)
        return None if process is None else process.pid

    def pids(self) -> dict[str, int]:
        """Give the processes that run just now, by name."""
        return {name: process.pid for name, process in self._running.items()}

    async def run(self) -> None:
        """Run until cancelled; raises `GymsdkError` where one is asked for wrongly. Nothing is left running."""
        watches = {asyncio.create_task(self._watched(each)): each.name for each in self._charges}
        try:
            ended, _ = await asyncio.wait(watches, return_when="FIRST_EXCEPTION")
            for each in ended:
                each.result()
        finally:
            await asyncio.shield(asyncio.ensure_future(self._end(watches)))
            self._outlet.close()

    def ready(self, name: str) -> None:
        """Know that the process *name* does what it is there for: its end from now on is no fault of its beginning."""
        self._ready.add(name)

    async def _watched(self, charge: Charge) -> None:
        pause = FIRST
        while charge.name not in self._ending:
            began = time.monotonic()
            pid, code = await self._lived(charge)
            if charge.name in self._ending:
                return
            before = self.exits.get(charge.name)
            self.exits[charge.name] = Exit(code, time.time(), before.restarts + 1 if before else 1, pid)
            self._told_of()
            if charge.name in self._asked:
                self._asked.discard(charge.name)
                continue
            self._check(charge, code)
            pause = FIRST if time.monotonic() - began > HEALTHY else pause
            log.warning("the server %r ended (%s); it is started again in %.1f s", charge.name, told(code), pause)
            await asyncio.sleep(pause)
            pause = min(LONGEST, 2 * pause)

    def _check(self, charge: Charge, code: int) -> None:
        """Raise where to start it again would change nothing."""
        name, how = charge.name, told(code)
        if not charge.again():
            raise GymsdkError(f"the server {name!r} ended ({how}); what it wrote says why")
        if name in self._ready:
            return
        if code == USAGE:
            raise UsageError(f"the server {name!r} cannot be served as asked; what it wrote says why")
        if charge.tries is not None and self.exits[name].restarts >= charge.tries:
            last = f": {self._last_lines[name]}" if name in self._last_lines else ""
            raise GymsdkError(f"the server {name!r} ended {charge.tries} times as it began ({how}){last}")

    async def _lived(self, charge: Charge) -> tuple[int, int]:
        """Give the process and the exit code of one life of *charge*; what it started and left behind ends with it."""
        # Pipes of our own: asyncio waits for its own to be closed, which who inherited them need not do.
        (theirs, lifeline), (mouth, said) = os.pipe(), os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *charge.words,
                env={**os.environ, **charge.environment},
                # Its other end is closed with this process, however that ends: see `lifeline`.
                stdin=theirs,
                stdout=said,
                stderr=said,
                pass_fds=[charge.at.fileno()] if charge.at else [],
                # Ctrl-C is the supervisor's alone to hear of.
                start_new_session=True,
            )
        except BaseException:
            os.close(lifeline)
            os.close(mouth)
            raise
        finally:
            os.close(theirs)
            os.close(said)
        self._running[charge.name] = process
        passing = asyncio.create_task(self._passed_on(charge.name, mouth))
        try:
            return process.pid, await process.wait()
        finally:
            self._running.pop(charge.name, None)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # What it wrote last; those who inherited its mouth are not waited for.
            await asyncio.wait({passing}, timeout=LAST_WORDS)
            passing.cancel()
            os.close(lifeline)

    async def _passed_on(self, name: str, mouth: int) -> None:
        reader = asyncio.StreamReader()
        file = os.fdopen(mouth, "rb", 0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), file
        )
        try:
            async for line in _lines(reader):
                said = line.decode(errors="replace").rstrip()
                if said:
                    self._last_lines[name] = said
                self._outlet.say(said if self._bare else f"{name:<{self._width}} | {said}")
        finally:
            transport.close()

    async def _end(self, watches: Mapping[asyncio.Task[None], str]) -> None:
        """End the processes, the last one when the others have; each within its seconds."""
        self._ending |= {each.name for each in self._charges}
        # One that is not there just now is between two lives, or about to be started: it is not waited for.
        for watch, name in watches.items():
            if name not in self._running:
                watch.cancel()
        await self._told([name for name in self._running if name != self._last])
        await self._told([name for name in self._running if name == self._last])
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

    async def _told(self, names: Sequence[str]) -> None:
        waiting = [asyncio.ensure_future(self._ended(name, self._running[name])) for name in names]
        if waiting:
            await asyncio.wait(waiting)

    async def _ended(self, name: str, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._seconds):
                await process.wait()
        except TimeoutError:
            log.warning("the server %r did not end within %g s, and is killed", name, self._seconds)
            process.kill()
            await process.wait()


def told(code: int) -> str:
    """Give an exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of *stream*, one that is longer than `LINE` in pieces."""
    begun = b""
    while some := await stream.read(LINE):
        *whole, begun = (begun + some).split(b"\n")
        for line in whole:
            yield line
        if len(begun) > LINE:
            yield begun
            begun = b""
    if begun:
        yield begun
