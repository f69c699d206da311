"""Run a `gymsdk` command and record the stalls of its event loop and the number of its tasks.

usage: python watched.py REPORT COMMAND [ARGUMENT...]

While an event loop of the command runs, a timer is due every 10 ms. The stall is the time by which the timer is late:
every other timer and every response waits that long, too. Once a second and at the end, the script writes to the file
REPORT, as JSON: the longest stall and when it ended, the number of stalls over 100 ms, the CPU time, the peak memory
and the number of tasks.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import uvloop

TICK_SECONDS = 0.01
STALL_SECONDS = 0.1
"""The duration from which a stall counts."""


REPORT_SECONDS = 1.0
"""Seconds between two reports."""


class LoopWatch:
    """Records by how much the timers of event loops are late, and the number of their tasks."""

    def __init__(self, report: Path) -> None:
        self.report = report
        self.longest = self.stalled_at = 0.0
        self.started = time.monotonic()
        self.stalls = 0
        self.tasks = 0
        self._next_count = 0.0

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start to record the stalls of *loop*."""
        loop.call_soon(self._tick, loop, loop.time())

    def _tick(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        late = max(0.0, loop.time() - due)
        if late > self.longest:
            self.longest, self.stalled_at = late, time.monotonic() - self.started
        self.stalls += late > STALL_SECONDS
        if loop.time() >= self._next_count:
            self._next_count = loop.time() + REPORT_SECONDS
            self.tasks = len(asyncio.all_tasks(loop))
        loop.call_later(TICK_SECONDS, self._tick, loop, loop.time() + TICK_SECONDS)

    def write_reports(self) -> None:
        """Replace the report file again and again, in a thread: the disk may be slow while the command writes."""
        while True:
            self.write_report()
            time.sleep(REPORT_SECONDS)

    def write_report(self) -> None:
        """Replace the report file."""
        kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
        report = {
            "longest_stall": self.longest,
            "stalled_at": self.stalled_at,
            "stalls": self.stalls,
            "tasks": self.tasks,
            "cpu": sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, kinds)),
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        written = self.report.with_suffix(".new")
        written.write_text(json.dumps(report))
        written.replace(self.report)


def watch_loops(watch: LoopWatch) -> None:
    """Watch every event loop of this process from the moment it runs."""

    def build_run(run: Any) -> Any:
        def run_until_complete(loop: asyncio.AbstractEventLoop, future: Any) -> Any:
            watch.watch(loop)
            return run(loop, future)

        return run_until_complete

    for kind in (asyncio.BaseEventLoop, uvloop.Loop):
        kind.run_until_complete = build_run(kind.run_until_complete)  # type: ignore[method-assign]  # nothing else is changed


def main(report: Path, *arguments: str) -> None:
    """Run the command."""
    from gymsdk.cli import main as run_command

    watch = LoopWatch(report)
    watch_loops(watch)
    threading.Thread(target=watch.write_reports, daemon=True).start()
    try:
        run_command(list(arguments))
    finally:
        watch.write_report()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
