"""A survivor: a process that outlives the one that started it, and kills what of its servers hangs on after it.

It is run by its path, before anything is installed for it: the standard library is all it needs. At its standard input
it is told of processes that lead groups, `PID` when one begins and `-PID` when it is over; once that input ends, they
have some seconds to end, too. A server that never lets its own threads run hears of nothing, and is killed then.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

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
