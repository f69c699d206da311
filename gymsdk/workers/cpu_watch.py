"""Watch CPU time, to tell code that works on a busy machine from code that hangs.

How long a call takes depends on what else the machine does; how much CPU time it takes hardly does. Code that uses no
CPU time waits for something that may never come.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from gymsdk.tracing import ACTIVE_COUNTER

CHECK_SECONDS = 1.0
"""Seconds between two readings of CPU time."""

MIN_CPU_SHARE = 0.001
"""The share of a core below which code counts as waiting: far less than it gets on a busy machine."""

Excess: TypeAlias = Literal["cpu", "idle"]
"""Which limit was exceeded."""

T = TypeVar("T")

CAN_READ = Path("/proc/self/stat").exists()
"""Whether the system tells the CPU time of other threads and processes. Without it, the time that passes is limited."""

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class CpuWatch:
    """Limits CPU time from the first check on, and the time in which none is used.

    Most calls end before the first check and cost nothing.

    Args:
        read: Returns the CPU time so far in seconds, `None` if the watched code has not begun.
        cpu: Seconds of CPU time that the code may use.
        idle: Seconds after which code hangs that used less than `MIN_CPU_SHARE` of a core.
        read_activity: Like *read*, with what the code may wait for; *read* by default.

    Attributes:
        excess: The limit that was exceeded, `None` so far.
    """

    def __init__(
        self,
        read: Callable[[], float | None],
        *,
        cpu: float,
        idle: float,
        read_activity: Callable[[], float | None] | None = None,
    ) -> None:
        self._read = read
        self._read_activity = read_activity
        self._cpu = cpu
        self._idle = idle
        self._first: float | None = None
        self._marked = self._idle_seconds = 0.0
        self.excess: Excess | None = None

    def check(self) -> Excess | None:
        """Read the CPU time, and return the limit that was exceeded; call this once in `CHECK_SECONDS`.

        The time between two calls counts as `CHECK_SECONDS`, because this process may have been stopped meanwhile.
        """
        used = self._read()
        active = used if self._read_activity is None else self._read_activity()
        if used is None or active is None:
            return None
        if not CAN_READ:
            self._idle_seconds += CHECK_SECONDS
            self.excess = "idle" if self._idle_seconds >= self._cpu + self._idle else None
        elif self._first is None:
            self._first, self._marked = used, active
        elif used - self._first > self._cpu:
            self.excess = "cpu"
        elif abs(active - self._marked) >= MIN_CPU_SHARE * self._idle:
            # A process that has ended takes its CPU time out of the sum, and the next one begins at zero.
            self._marked, self._idle_seconds = active, 0.0
        else:
            self._idle_seconds += CHECK_SECONDS
            self.excess = "idle" if self._idle_seconds >= self._idle else None
        return self.excess

    def describe_hang(self) -> str:
        """Return why the code counts as hanging, if `excess` is `idle`."""
        if CAN_READ:
            return f"it has used no CPU time for {self._idle:g} s"
        return f"it has not returned after {self._cpu + self._idle:g} s"


@asynccontextmanager
async def limit_cpu(watch: CpuWatch) -> AsyncIterator[None]:
    """Cancel the block if a limit of *watch* is exceeded.

    Raises:
        TimeoutError: The limit `watch.excess` was exceeded.
    """
    async with asyncio.timeout(None) as timeout:
        checks = _Checks(watch, timeout)
        try:
            yield
        finally:
            checks.timer.cancel()


class _Checks:
    """Checks a watch again and again, and ends a timeout when a limit is exceeded."""

    def __init__(self, watch: CpuWatch, timeout: asyncio.Timeout) -> None:
        self._watch = watch
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        # Cancelling a timer also ends the reference cycle with its callback.
        self.timer = self._loop.call_later(CHECK_SECONDS, self._check)

    def _check(self) -> None:
        if self._watch.check():
            self._timeout.reschedule(self._loop.time())
        else:
            self.timer = self._loop.call_later(CHECK_SECONDS, self._check)


def compute_longest_seconds(cpu: float, idle: float) -> float:
    """Return the longest time that code takes within these limits of a `CpuWatch`."""
    return cpu / MIN_CPU_SHARE + idle


class ThreadClock:
    """The CPU time of the thread in which one call runs, and of the processes that run on its behalf."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._start_ticks = 0

    def measure(self, call: Callable[[], T]) -> T:
        """Make *call* and measure it."""
        self._start_ticks = int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_SECOND) if CAN_READ else 0
        self._thread = threading.get_native_id()
        try:
            return call()
        finally:
            self._thread = None

    def read(self) -> float | None:
        """Return the CPU time of the call and of the processes that it has started, `None` unless it is in progress."""
        return self._read(lambda process: _read_start_ticks(process) >= self._start_ticks)

    def read_activity(self) -> float | None:
        """Return the CPU time of the thread and of all its processes, `None` unless the call is in progress.

        Earlier calls in the thread may have started processes, such as a sandbox, for this call or for other episodes.
        """
        return self._read(lambda _: True)

    def _read(self, counts: Callable[[int], bool]) -> float | None:
        thread = self._thread
        if thread is None:
            return None
        folder = Path(f"/proc/{os.getpid()}/task/{thread}")
        return _read_cpu_seconds(folder) + sum(map(read_tree_cpu_seconds, filter(counts, _list_children([folder]))))


def read_own_cpu_seconds(process: int) -> float:
    """Return the CPU time of *process*, 0 if it has ended."""
    return _read_cpu_seconds(Path(f"/proc/{process}"))


def read_tree_cpu_seconds(process: int) -> float:
    """Return the CPU time of *process* and of all processes that descend from it, 0 if it has ended."""
    folder = Path(f"/proc/{process}")
    children = _list_children(folder.glob("task/*"))
    return _read_cpu_seconds(folder, ended_children=True) + sum(map(read_tree_cpu_seconds, children))


@contextmanager
def count_worker_cpu(process: int) -> Iterator[None]:
    """Add the CPU time of the worker *process* inside the block to the current hook's counter."""
    counter = ACTIVE_COUNTER.get()
    if counter is None:
        yield
        return
    started = _read_process_cpu(process)
    try:
        yield
    finally:
        counter.worker_cpu_seconds += max(0.0, _read_process_cpu(process) - started)


def _read_process_cpu(process: int) -> float:
    try:
        # The CPU clock of another process, numbered as by clock_getcpuclockid(3).
        return time.clock_gettime((~process << 3) | 2)
    except OSError:
        return 0.0


def _list_children(threads: Iterable[Path]) -> list[int]:
    """Return the processes that these threads have started and that run."""
    try:
        return [int(process) for folder in threads for process in (folder / "children").read_text().split()]
    except OSError:  # a thread has ended
        return []


def _read_cpu_seconds(folder: Path, *, ended_children: bool = False) -> float:
    # Fields 14 to 17 of proc(5): user and system time, and those of the children that the process has waited for.
    return sum(_read_stat(folder, slice(14, 18 if ended_children else 16))) / _TICKS_PER_SECOND


def _read_start_ticks(process: int) -> int:
    """Return when *process* started, in clock ticks since the system did, 0 if it has ended."""
    return sum(_read_stat(Path(f"/proc/{process}"), slice(22, 23)))


def _read_stat(folder: Path, numbers: slice) -> list[int]:
    """Return fields of `stat` by their numbers in proc(5), nothing if the thread or process has ended."""
    try:
        # The second field, the name, may contain spaces.
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [*map(int, fields[numbers.start - 3 : numbers.stop - 3])]
