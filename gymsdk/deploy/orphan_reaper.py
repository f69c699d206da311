"""Kill the process groups that a killed supervisor leaves behind.

`process_groups.ProcessGroups` runs this file as a script, by its path and with an isolated interpreter (`-I -S`):
it imports nothing but the standard library. The supervisor writes a process ID to its standard input when a process
group starts, and the negative ID when the group has ended. The end of the input means that the supervisor is gone.
The argument is the number of seconds that the remaining processes get to end on their own.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

POLL_SECONDS = 0.05
"""Seconds between two checks of the remaining processes: they are no children, so that nothing reports their end."""


def read_process_ids(lines: Iterable[str]) -> set[int]:
    """Read *lines* to their end and return the IDs of the processes that have not ended by then."""
    running: set[int] = set()
    for line in lines:
        pid = int(line)
        if pid > 0:
            running.add(pid)
        else:
            running.discard(-pid)
    return running


def kill_after(pids: set[int], seconds: float) -> None:
    """Kill the process groups of *pids*: each as soon as its leader has ended, all of them after *seconds*."""
    deadline = time.monotonic() + seconds
    while pids and time.monotonic() < deadline:
        running = {pid for pid in pids if _is_running(pid)}
        _kill_groups(pids - running)
        pids = running
        time.sleep(POLL_SECONDS)
    _kill_groups(pids)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # The process runs, as another user.
        return True
    return True


def _kill_groups(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A service manager that signals the whole service must not end this process before the last server.
        signal.signal(number, signal.SIG_IGN)
    kill_after(read_process_ids(sys.stdin), float(sys.argv[1]))
