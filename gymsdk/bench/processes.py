"""The CPU time and the memory of a process and its descendants, which Linux reports in `/proc`."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

PROC = Path("/proc")
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

MemoryMeasure: TypeAlias = Literal["PSS", "RSS"]
"""How memory is measured: as the proportional set size, or as the resident set size.

The PSS counts a page that N processes share as 1/N page in each of them, so that the sum over processes counts it once.
The RSS counts this page in each process.
"""


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Seconds of CPU and megabytes (10^6 bytes) of memory of a process and of its child processes.

    The child processes are all descendants of the process. The CPU of descendants that have ended counts too. The
    memory is measured as the caller of `measure_process` asks.
    """

    cpu: float
    memory: float
    children_cpu: float
    children_memory: float


@dataclass(frozen=True, slots=True)
class _Process:
    """A process in `/proc`: its own CPU time, that of its children that have ended, and its resident memory."""

    id: int
    parent: int
    over: bool
    own: float
    ended: float
    resident: float


def measure_process(pid: int, measure: MemoryMeasure = "RSS") -> ProcessUsage:
    """Return the resources used by *pid* and its descendants.

    Args:
        pid: The process.
        measure: How to measure the memory; see `choose_memory_measure`.

    Raises:
        ProcessLookupError: The process does not exist.
    """
    processes = {process.id: process for process in _list_processes()}
    if pid not in processes:
        raise ProcessLookupError(f"process {pid} does not exist on this machine")
    process, children = processes[pid], [processes[child] for child in _find_descendants(pid, processes.values())]
    return ProcessUsage(
        cpu=process.own,
        memory=_measure_memory(process, measure),
        children_cpu=process.ended + sum(child.own + child.ended for child in children),
        children_memory=sum(_measure_memory(child, measure) for child in children),
    )


def choose_memory_measure(pids: Iterable[int]) -> MemoryMeasure:
    """Return `PSS` if the system reports it for all *pids*, else `RSS`; processes of other users have no PSS here."""
    return "RSS" if any(_read_pss(pid) is None for pid in pids) else "PSS"


def _measure_memory(process: _Process, measure: MemoryMeasure) -> float:
    pss = _read_pss(process.id) if measure == "PSS" else None
    # The process may have ended meanwhile.
    return process.resident if pss is None else pss


def _read_pss(pid: int) -> float | None:
    """Return the PSS of a process in megabytes, or `None` if the system does not report it."""
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("Pss:")), None)


def find_leaf_processes(pid: int) -> list[int]:
    """Return the descendants of *pid* that have no children."""
    processes = list(_list_processes())
    parents = {process.parent for process in processes}
    return [child for child in _find_descendants(pid, processes) if child not in parents]


def is_running(pid: int) -> bool:
    """Return whether *pid* is a process of this machine that has not ended."""
    process = _read_stat(pid)
    return process is not None and not process.over


def _find_descendants(pid: int, processes: Iterable[_Process]) -> Iterator[int]:
    children = defaultdict(list)
    for process in processes:
        children[process.parent].append(process.id)
    pending = list(children[pid])
    while pending:
        child = pending.pop()
        yield child
        pending += children[child]


def _list_processes() -> Iterator[_Process]:
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (process := _read_stat(int(entry.name))):
            yield process


def _read_stat(pid: int) -> _Process | None:
    try:
        stat = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        # The process has ended meanwhile.
        return None
    # The process name in front may contain anything. After it come the fields of proc(5), from the third one.
    fields = stat.rpartition(")")[2].split()
    user, system, user_ended, system_ended = (int(field) / CLOCK_TICKS for field in fields[11:15])
    return _Process(
        id=pid,
        parent=int(fields[1]),
        # A zombie, or dead: the parent has not waited for it yet.
        over=fields[0] in {"Z", "X"},
        own=user + system,
        ended=user_ended + system_ended,
        resident=int(fields[21]) * PAGE_BYTES / 1e6,
    )
