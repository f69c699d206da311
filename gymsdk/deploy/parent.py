"""A warden: a process that runs one command, and leaves nothing of it when told to end or when its keeper is gone.

It is run by its path, before anything is installed for it: the standard library is all it needs. Its keeper holds the
other end of its standard input. Where the warden itself is killed, the command is told to end.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from gymsdk.errors import GymsdkError

PATIENCE = 60.0
"""Seconds that the one who started this process may take to say what it is for."""


def line(file: int = 0, *, seconds: float = PATIENCE) -> bytes:
    """Give the one line that comes down the lifeline before it is held; raises `GymsdkError` where none does."""
    read = b""
    until = time.monotonic() + seconds
    while not read.endswith(b"\n"):
        left = until - time.monotonic()
        if left <= 0 or not select.select([file], [], [], left)[0]:
            raise GymsdkError(
                f"nobody said within {seconds:g} s what this server is to be; `gymsdk serve NAME --separate` does"
            )
        if not (some := os.read(file, 65536)):
            raise GymsdkError("whoever started this server ended before it was told what to be; start that again")
        read += some
    return read


def held(file: int = 0) -> None:
    """Have this process end as by SIGTERM once nobody holds the other end of *file*, by default standard input."""
    threading.Thread(target=_end, args=(file,), name="lifeline", daemon=True).start()


def _end(file: int) -> None:
    # Past `sys.stdin`, whose lock would be held when the interpreter ends.
    while os.read(file, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


TICK = 0.05
"""Seconds between two looks who is left: processes that are no children tell of nothing."""


def told(lines: Iterable[str]) -> set[int]:
    """Give the processes that are not over when the *lines* about them are."""
    left: set[int] = set()
    for line in lines:
        pid = int(line)
        if pid > 0:
            left.add(pid)
        else:
            left.discard(-pid)
    return left


def ended(pids: set[int], seconds: float) -> None:
    """Wait until they have ended, and kill who has not in time, and whoever one that ended has left behind."""
    over = time.monotonic() + seconds
    while pids and time.monotonic() < over:
        here = {pid for pid in pids if _is_there(pid)}
        _kill(pids - here)
        pids = here
        time.sleep(TICK)
    _kill(pids)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # It is another user's by now, and there.
        return True
    return True


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Whoever stops a whole service at once is to find it there until the last server is gone.
        signal.signal(number, signal.SIG_IGN)
    ended(told(sys.stdin), float(sys.argv[1]))


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
        words = [sys.executable, "-I", "-S", str(Path(__file__)), str(self._seconds)]
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


CHILD_SUBREAPER, PARENT_DEATH = 36, 1
"""What Linux calls these by `prctl`: orphans become children of the one, a signal tells of the other."""

STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
LIBC = ctypes.CDLL(None)


class Warden:
    """Runs *words*, and has *seconds* to end what comes of them."""

    def __init__(self, words: Sequence[str], seconds: float) -> None:
        self._seconds = seconds
        self._code = 0
        self._ears = _ears()
        # Whoever loses its parent becomes a child of this process, and is found.
        LIBC.prctl(CHILD_SUBREAPER, 1)
        started = subprocess.Popen(  # noqa: S603  # it is there to run what it is told
            words,
            stdin=subprocess.DEVNULL,
            preexec_fn=_told_of_the_end_of(os.getpid()),  # noqa: PLW1509  # this process has one thread
        )
        self._command: int | None = started.pid

    def run(self) -> int:
        """Give how the command ended, once nothing is left of it."""
        while self._reaped() and not self._stopped():
            pass
        self._end()
        return self._code

    def _stopped(self) -> bool:
        """Wait for something to happen; whether it is that the command is to end."""
        ready, _, _ = select.select([0, self._ears], [], [])
        if 0 in ready and not os.read(0, 4096):
            return True
        return self._ears in ready and not STOPS.isdisjoint(os.read(self._ears, 4096))

    def _reaped(self) -> bool:
        """Take note of the processes that have ended; whether the command still runs."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pid = 0
            if not pid:
                return self._command is not None
            if pid == self._command:
                self._command, self._code = None, os.waitstatus_to_exitcode(status)

    def _end(self) -> None:
        """Ask the command, which ends its own best, then whoever is left, and kill who does not listen."""
        over = time.monotonic() + self._seconds
        if self._command is not None:
            _send(signal.SIGTERM, [self._command])
            self._until(lambda: self._command is None, over - self._seconds / 3)
        _send(signal.SIGTERM, descendants())
        self._until(lambda: not descendants(), over)
        while left := descendants():
            _send(signal.SIGKILL, left)
            self._until(lambda: not descendants(), time.monotonic() + TICK)

    def _until(self, true: Callable[[], bool], over: float) -> None:
        self._reaped()
        while not true() and time.monotonic() < over:
            time.sleep(TICK)
            self._reaped()


def descendants() -> list[int]:
    """Give the processes that come of this one."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            # It has ended since.
            continue
        children.setdefault(parent, []).append(int(folder.name))
    found = list(children.get(os.getpid(), []))
    for pid in found:
        found += children.get(pid, [])
    return found


def _ears() -> int:
    """Give a file that tells of signals, so that one wait hears of them and of the keeper."""
    ears, mouth = os.pipe()
    os.set_blocking(mouth, False)
    signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
    for number in (*STOPS, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return ears


def _told_of_the_end_of(warden: int) -> Callable[[], None]:
    def tell() -> None:
        LIBC.prctl(PARENT_DEATH, signal.SIGTERM)
        if os.getppid() != warden:
            os._exit(1)

    return tell


def _send(number: int, pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _exit(code: int) -> None:
    """End as the command did."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    _exit(Warden(sys.argv[2:], float(sys.argv[1])).run())
