"""Run one command and end all its descendants when it ends, when this process is signalled, or when the parent dies.

`deploy.vllm` runs this file as a script, by its path and with an isolated interpreter (`-I -S`): it imports nothing
but the standard library. The arguments are the number of seconds that the descendants get to end, and the command.
The parent holds the other end of standard input; the end of the input means that the parent is gone. When this process
itself is killed, the kernel sends SIGTERM to the command. The exit code is that of the command.
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

PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG = 36, 1
"""The options of `prctl(2)`: adopt orphaned descendants, and receive a signal when the parent dies."""

POLL_SECONDS = 0.05
"""Seconds between two checks of the descendants: most are no children, so that nothing reports their end."""

STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
LIBC = ctypes.CDLL(None)


class CommandGuard:
    """Runs a command and ends its descendants.

    Args:
        command: The program and its arguments.
        seconds: The time that the command and its descendants get to end before they are killed.
    """

    def __init__(self, command: Sequence[str], seconds: float) -> None:
        self._seconds = seconds
        self._exit_code = 0
        self._signals = _open_signal_pipe()
        # An orphaned descendant becomes a child of this process, so that `find_descendants` finds it.
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
        started = subprocess.Popen(  # noqa: S603  # running the given command is this script's purpose
            command,
            stdin=subprocess.DEVNULL,
            preexec_fn=_terminate_with_parent(os.getpid()),  # noqa: PLW1509  # this process has one thread
        )
        self._command_pid: int | None = started.pid

    def run(self) -> int:
        """Wait for the command or for a reason to end it, end all descendants, and return the exit code."""
        while self._reap() and not self._wait_for_stop():
            pass
        self._end_descendants()
        return self._exit_code

    def _wait_for_stop(self) -> bool:
        """Wait for a signal or for the end of standard input; return whether the command must end."""
        ready, _, _ = select.select([0, self._signals], [], [])
        if 0 in ready and not os.read(0, 4096):
            return True
        return self._signals in ready and not STOP_SIGNALS.isdisjoint(os.read(self._signals, 4096))

    def _reap(self) -> bool:
        """Reap the children that have ended; return whether the command still runs."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pid = 0
            if not pid:
                return self._command_pid is not None
            if pid == self._command_pid:
                self._command_pid, self._exit_code = None, os.waitstatus_to_exitcode(status)

    def _end_descendants(self) -> None:
        """Terminate the command, which ends its own children best, then the other descendants, and kill the rest."""
        deadline = time.monotonic() + self._seconds
        if self._command_pid is not None:
            _send_signal(signal.SIGTERM, [self._command_pid])
            self._wait_until(lambda: self._command_pid is None, deadline - self._seconds / 3)
        _send_signal(signal.SIGTERM, find_descendants())
        self._wait_until(lambda: not find_descendants(), deadline)
        while remaining := find_descendants():
            _send_signal(signal.SIGKILL, remaining)
            self._wait_until(lambda: not find_descendants(), time.monotonic() + POLL_SECONDS)

    def _wait_until(self, is_true: Callable[[], bool], deadline: float) -> None:
        self._reap()
        while not is_true() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            self._reap()


def find_descendants() -> list[int]:
    """Return the IDs of the children of this process, of their children, and so on."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            # The process has ended meanwhile.
            continue
        children.setdefault(parent, []).append(int(folder.name))
    found = list(children.get(os.getpid(), []))
    for pid in found:
        found += children.get(pid, [])
    return found


def _open_signal_pipe() -> int:
    """Return a descriptor that yields the number of each signal, so that one `select` waits for signals and input."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (*STOP_SIGNALS, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return reader


def _terminate_with_parent(parent: int) -> Callable[[], None]:
    """Return a function for the child to run before the command: it requests SIGTERM for the death of *parent*."""

    def request_signal() -> None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return request_signal


def _send_signal(number: int, pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _exit_as(code: int) -> None:
    """End this process with the exit code of the command, or by the signal that ended the command."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    _exit_as(CommandGuard(sys.argv[2:], float(sys.argv[1])).run())
