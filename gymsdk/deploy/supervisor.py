"""Handing down: what a supervisor gives the servers it starts, settings by a pipe, where nobody else reads them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TextIO

from pydantic import BaseModel, ConfigDict, ValidationError

from gymsdk.deploy import parent
from gymsdk.deploy.parent import Bequest
from gymsdk.descriptors import ListeningSocket
from gymsdk.errors import GymsdkError, UsageError
from gymsdk.observability.logging import LogRelay, read_lines
from gymsdk.servers.reports import Exit

FIRST, LONGEST = 0.1, 10.0
"""Seconds before a process that ended is started again: twice as many each time, up to a bound."""

HEALTHY = 30.0
"""Seconds a process has to live for its next pause to be the first again."""

USAGE = 2
"""The exit code of what was asked for wrongly: again would be as wrong."""

LAST_WORDS = 1.0
"""Seconds that what an ended process wrote last may take to be passed on."""

log = logging.getLogger("gymsdk")


@dataclass(frozen=True, slots=True)
class Charge:
    """A process to be: its *name*, the words that start it, the socket it is handed down, open under the same number.

    Connections wait at the socket while nobody is there to answer them. A process that opens one itself is handed
    none. What is *handed* to it comes down its standard input, which then is its lifeline. It is started *again* for as
    long as that says so, and may end at most so many times (*tries*) before it is ready; any other end is everybody's.
    """

    name: str
    words: Sequence[str]
    at: socket.socket | None = None
    handed: bytes = b""
    again: Callable[[], bool] = lambda: True
    tries: int | None = None


class _Unstarted(Exception):
    """The system does not start a process: it has no memory or number left, or the program is not there."""


class Supervisor:
    """Keeps *charges* running; what they write goes to *out*, each line behind its process's name unless it is *bare*.

    One that ends is started again. They end with this process, however that ends: each has *seconds* to do so, and is
    killed then; the *last* of them is told to end when the others have. Whenever one has ended that is to be started
    again, *ended* is called.
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
        self._outlet = LogRelay(out or sys.stderr)
        self._bequest = Bequest(seconds)
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
            waiting.add_done_callback(_logged(f"the restart of the server {name!r}"))

    def pid(self, name: str) -> int | None:
        """Give the process that is *name* just now, `None` between two of them."""
        process = self._running.get(name)
        return None if process is None else process.pid

    def pids(self) -> dict[str, int]:
        """Give the processes that run just now, by name."""
        return {name: process.pid for name, process in self._running.items()}

    async def run(self) -> None:
        """Run until cancelled; raises `GymsdkError` where one is asked for wrongly. Nothing is left running."""
        watches: dict[asyncio.Task[None], str] = {}
        try:
            self._outlet.start()
            await self._bequest.begin()
            watches |= {asyncio.create_task(self._watched(each)): each.name for each in self._charges}
            await asyncio.wait(watches, return_when="FIRST_EXCEPTION")
        finally:
            await asyncio.shield(asyncio.ensure_future(self._end(watches)))
            self._outlet.close()
        wrong = [error for each in watches if not each.cancelled() and (error := each.exception())]
        for error in wrong[1:]:
            log.error("%s", error)
        if wrong:
            raise wrong[0]

    def ready(self, name: str) -> None:
        """Know that the process *name* does what it is there for: its end from now on is no fault of its beginning."""
        self._ready.add(name)

    async def _watched(self, charge: Charge) -> None:
        name, pause = charge.name, FIRST
        while name not in self._ending:
            began = time.monotonic()
            try:
                pid, code = await self._lived(charge)
            except _Unstarted as error:
                if name not in self._ready:
                    raise GymsdkError(f"the server {name!r} cannot be started ({error})") from None
                how = f"cannot be started ({error})"
            else:
                if name in self._ending:
                    return
                self._noted(name, pid, code)
                if name in self._asked:
                    self._asked.discard(name)
                    continue
                self._check(charge, code)
                how = f"ended ({told(code)})"
            pause = FIRST if time.monotonic() - began > HEALTHY else pause
            log.warning("the server %r %s; it is started again in %.1f s", name, how, pause)
            await asyncio.sleep(pause)
            pause = min(LONGEST, 2 * pause)

    def _noted(self, name: str, pid: int, code: int) -> None:
        before = self.exits.get(name)
        self.exits[name] = Exit(code=code, at=time.time(), restarts=before.restarts + 1 if before else 1, pid=pid)
        self._told_of()

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
        name = charge.name
        process, hand, mouth = await _begun(charge)
        self._running[name] = process
        self._bequest.add(process.pid)
        passing = asyncio.create_task(self._passed_on(name, mouth))
        passing.add_done_callback(_logged(f"what the server {name!r} writes"))
        holding = asyncio.create_task(_held(hand, charge.handed))
        holding.add_done_callback(_logged(f"what the server {name!r} is handed"))
        try:
            return process.pid, await process.wait()
        finally:
            self._running.pop(name, None)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            self._bequest.remove(process.pid)
            # What it wrote last; those who inherited its mouth are not waited for.
            try:
                await asyncio.wait({passing}, timeout=LAST_WORDS)
            finally:
                passing.cancel()
                holding.cancel()
                await asyncio.wait({passing, holding})

    async def _passed_on(self, name: str, mouth: int) -> None:
        async for line in read_lines(mouth):
            if line:
                self._last_lines[name] = line
            self._outlet.put(line if self._bare else f"{name:<{self._width}} | {line}")

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
        if watches:
            await asyncio.wait(watches)
        await self._bequest.end()

    async def _told(self, names: Sequence[str]) -> None:
        waiting = {asyncio.ensure_future(self._ended(name, self._running[name])): name for name in names}
        for each, name in waiting.items():
            each.add_done_callback(_logged(f"the end of the server {name!r}"))
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
            with suppress(ProcessLookupError):
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


async def _begun(charge: Charge) -> tuple[asyncio.subprocess.Process, int, int]:
    """Give a process, the pipe to its standard input, and that from all it writes; raises `_Unstarted`."""
    # Pipes of our own: asyncio waits for its own to be closed, which who inherited them need not do.
    try:
        with ExitStack() as ours, ExitStack() as theirs:
            (heard, hand), (mouth, said) = _pipe(theirs, ours), _pipe(ours, theirs)
            process = await asyncio.create_subprocess_exec(
                *charge.words,
                stdin=heard,
                stdout=said,
                stderr=said,
                pass_fds=[charge.at.fileno()] if charge.at else [],
                # Ctrl-C is the supervisor's alone to hear of.
                start_new_session=True,
            )
            ours.pop_all()
    except OSError as error:
        raise _Unstarted(error.strerror or str(error)) from error
    return process, hand, mouth


def _pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    """Give a pipe whose ends are closed with those that are to have them."""
    read, write = os.pipe()
    reader.callback(os.close, read)
    writer.callback(os.close, write)
    return read, write


async def _held(hand: int, handed: bytes) -> None:
    """Hand down what is *handed*, and hold the lifeline until cancelled; it is let go with this process: `lifeline`."""
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(hand, "wb", 0))
    try:
        transport.write(handed)
        await loop.create_future()
    finally:
        if not transport.is_closing():
            transport.abort()


def _logged(what: str) -> Callable[[asyncio.Future[None]], None]:
    """Give what tells of a future that went wrong, which nobody waits for."""

    def tell(future: asyncio.Future[None]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            log.error("%s went wrong: %s", what, error, exc_info=error)

    return tell


HEAD = "head_server"
"""What the head is called among the servers that are started."""

OPTIONS = ("--set", "--pin", "--model", "--base-url")
"""Options whose values may have a key in them, an address its query."""

STEPS = ("--separate", "--json", "--open", "--launch-vllm")
"""Options that are the supervisor's alone."""


class Handed(BaseModel):
    """What a command sets: *overrides* of its files, *settings* of environments, the *model*, its *pins* and addresses.

    Any of them may be a key, as *key* is, the model's: by which words and variables a process was started, others on
    its machine can read for as long as it lives. Those that one *supervisor* starts know each other by that.
    """

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    overrides: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    model: str | None = None
    pins: tuple[str, ...] = ()
    base_urls: tuple[str, ...] = ()
    key: str | None = None
    supervisor: str = ""

    def line(self) -> bytes:
        """Give the line that hands them down."""
        return self.model_dump_json().encode() + b"\n"


def taken(file: int) -> Handed:
    """Give what the supervisor hands down beside the socket under the number *file*.

    Raises `UsageError` where there is no such socket, `GymsdkError` where nothing is handed down.
    """
    socket_at(file).detach()
    try:
        return Handed.model_validate_json(parent.line())
    except ValidationError:
        raise GymsdkError(
            "what this server is told to be is none of ours; leave --only and --fd to --separate"
        ) from None


def again(words: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Give the *words* of the command by which one of its servers is started: without settings, *overrides* among them.

    What is the supervisor's alone is left out too.
    """
    kept = list(words[: words.index("--")] if "--" in words else words)
    for option in (*OPTIONS, "--head", "--port"):
        kept = _without(kept, option)
    pairs = zip(["", *kept], kept, strict=False)
    return [
        word for before, word in pairs if word not in STEPS and (word not in overrides or before == "--server-port")
    ]


def socket_at(file: int) -> socket.socket:
    """Give the socket that is open under a number; raises `UsageError` where none is that listens."""
    try:
        at = socket.socket(fileno=file)
        if at.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            # What a server starts in its turn is not to keep its port.
            os.set_inheritable(file, False)
            return ListeningSocket.from_socket(at)
        at.detach()
    except OSError:
        pass
    raise UsageError(f"--fd {file}: no socket that listens is open under that number; leave --fd to --separate")


def _without(words: list[str], option: str) -> list[str]:
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == option:
            next(rest, None)
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return kept
