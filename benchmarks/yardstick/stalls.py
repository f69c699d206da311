"""Run a `gymsdk` command and record how long its event loop stalls.

usage: python stalls.py REPORT COMMAND [ARGUMENT...]

While an event loop of the command runs, a timer is due every 10 ms. The stall is the time by which the timer is late:
every other timer and every response waits that long, too. The script writes the longest stall, the number of stalls
over 100 ms, the CPU time and the peak memory to the file REPORT as JSON.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from pathlib import Path
from typing import Any

import uvloop

TICK_SECONDS = 0.01
STALL_SECONDS = 0.1
"""The duration from which a stall counts."""


class StallWatch:
    """Records by how much the timers of an event loop are late."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.stalls = 0

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start to record the stalls of *loop*."""
        loop.call_soon(self._tick, loop, loop.time())

    def _tick(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        late = max(0.0, loop.time() - due)
        self.longest = max(self.longest, late)
        self.stalls += late > STALL_SECONDS
        loop.call_later(TICK_SECONDS, self._tick, loop, loop.time() + TICK_SECONDS)


WATCH = StallWatch()


def watch_loops() -> None:
    """Watch every event loop of this process from the moment it runs."""

    def build_run(run: Any) -> Any:
        def run_until_complete(loop: asyncio.AbstractEventLoop, future: Any) -> Any:
            WATCH.watch(loop)
            return run(loop, future)

        return run_until_complete

    for kind in (asyncio.BaseEventLoop, uvloop.Loop):
        kind.run_until_complete = build_run(kind.run_until_complete)  # type: ignore[method-assign]  # to watch the command unchanged


def write_report(path: Path) -> None:
    """Write what was recorded."""
    kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    report = {
        "longest_stall": WATCH.longest,
        "stalls": WATCH.stalls,
        "cpu": sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, kinds)),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    path.write_text(json.dumps(report))


def main(report: Path, *arguments: str) -> None:
    """Run the command."""
    from gymsdk.cli import main as run_command

    watch_loops()
    try:
        run_command(list(arguments))
    finally:
        write_report(report)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
