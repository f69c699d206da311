"""Processes of this machine: the CPU and memory that one of them, and all that it has started, have used."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Used:
    """Seconds of CPU and megabytes (10^6 bytes) of memory: a process's own, and of its workers.

    The workers are all processes beneath it; the CPU of those that have ended counts too.
    """

    cpu: float
    memory: float
    workers_cpu: float
    workers_memory: float


@dataclass(frozen=True, slots=True)
class _Process:
    """A line of `/proc`: the CPU it has used itself, and that of its children which have ended."""

    id: int
    parent: int
    over: bool
    own: float
    ended: float
    memory: float


def used(pid: int) -> Used:
    """Give what the process *pid* and those beneath it have used; raises `ProcessLookupError` where there is none."""
    every = {each.id: each for each in _all()}
    if pid not in every:
        raise ProcessLookupError(f"there is no process {pid} on this machine")
    one, workers = every[pid], [every[each] for each in _beneath(pid, every.values())]
    return Used(
        cpu=one.own,
        memory=one.memory,
        workers_cpu=one.ended + sum(each.own + each.ended for each in workers),
        workers_memory=sum(each.memory for each in workers),
    )


def leaves(pid: int) -> list[int]:
    """Give the processes beneath *pid* that have none beneath themselves."""
    every = list(_all())
    parents = {each.parent for each in every}
    return [each for each in _beneath(pid, every) if each not in parents]


def is_here(pid: int) -> bool:
    """Give whether *pid* is a process of this machine that has not ended."""
    found = _read(pid)
    return found is not None and not found.over


def _beneath(pid: int, every: Iterable[_Process]) -> Iterator[int]:
    children = defaultdict(list)
    for each in every:
        children[each.parent].append(each.id)
    left = list(children[pid])
    while left:
        one = left.pop()
        yield one
        left += children[one]


def _all() -> Iterator[_Process]:
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (found := _read(int(entry.name))):
            yield found


def _read(pid: int) -> _Process | None:
    try:
        told = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        # It has ended meanwhile.
        return None
    # The name before may hold anything; what follows is in the order of proc(5), from its third field on.
    fields = told.rpartition(")")[2].split()
    user, system, user_ended, system_ended = (int(each) / TICKS for each in fields[11:15])
    return _Process(
        id=pid,
        parent=int(fields[1]),
        # Nobody has asked yet how it ended.
        over=fields[0] in {"Z", "X"},
        own=user + system,
        ended=user_ended + system_ended,
        memory=int(fields[21]) * PAGE / 1e6,
    )
