"""A warden: a process that runs one command, and leaves nothing of it when told to end or when its keeper is gone.

It is run by its path, before anything is installed for it: the standard library is all it needs. Its keeper holds the
other end of its standard input. Where the warden itself is killed, the command is told to end.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

CHILD_SUBREAPER, PARENT_DEATH = 36, 1
"""What Linux calls these by `prctl`: orphans become children of the one, a signal tells of the other."""

STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
TICK = 0.05
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
