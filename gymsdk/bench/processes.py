"""The CPU time and the memory of a process and its descendants."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias

import psutil

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


def measure_process(pid: int, measure: MemoryMeasure = "RSS") -> ProcessUsage:
    """Return the resources used by *pid* and its descendants.

    Args:
        pid: The process.
        measure: How to measure the memory; see `choose_memory_measure`.

    Raises:
        ProcessLookupError: The process does not exist.
    """
    try:
        process = psutil.Process(pid)
        children = process.children(recursive=True)
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        raise ProcessLookupError(f"process {pid} does not exist on this machine") from None
    return ProcessUsage(
        cpu=times.user + times.system,
        memory=_measure_memory(process, measure),
        children_cpu=times.children_user + times.children_system + sum(map(_sum_cpu, children)),
        children_memory=sum(_measure_memory(child, measure) for child in children),
    )


def choose_memory_measure(pids: Iterable[int]) -> MemoryMeasure:
    """Return `PSS` if the system reports it for all *pids*, else `RSS`; processes of other users have no PSS here."""
    return "PSS" if all(map(_has_pss, pids)) else "RSS"


def is_running(pid: int) -> bool:
    """Return whether *pid* is a process of this machine that has not ended."""
    try:
        # A zombie has ended, but its parent has not waited for it yet.
        return psutil.Process(pid).status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    except psutil.NoSuchProcess:
        return False


def _sum_cpu(process: psutil.Process) -> float:
    """Return the seconds of CPU of *process* and of its children that have ended, 0 if it has ended itself."""
    try:
        return sum(process.cpu_times()[:4])
    except psutil.NoSuchProcess:
        return 0.0


def _measure_memory(process: psutil.Process, measure: MemoryMeasure) -> float:
    """Return megabytes of memory, 0 if *process* has ended."""
    try:
        used = process.memory_info().rss
        # A descendant may hide its PSS, even from its own user.
        with suppress(psutil.AccessDenied):
            used = process.memory_full_info().pss if measure == "PSS" else used
    except psutil.NoSuchProcess:
        return 0.0
    return used / 1e6


def _has_pss(pid: int) -> bool:
    try:
        return hasattr(psutil.Process(pid).memory_full_info(), "pss")
    except psutil.Error:
        return False
