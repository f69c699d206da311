"""The cost of `gymsdk serve` before anybody asks: from its start until all servers answer, and while they idle.

usage: serving.py [NAME...]

Serves the named environments (by default all that are installed) a few times, in one process and in a process for
each server. Exits with 1 where a limit is exceeded.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from gymsdk import installed

TICKS = os.sysconf("SC_CLK_TCK")
STARTS = 3
IDLE = 10.0
"""Seconds that the servers are watched while nobody asks anything."""


@dataclass(frozen=True)
class Figure:
    """One measurement, with the most it may be where there is a limit."""

    name: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def kept(self) -> bool:
        """Whether it is within its limit."""
        return self.limit is None or self.value <= self.limit

    def __str__(self) -> str:
        bound = "" if self.limit is None else f" (limit {self.limit:g})"
        return f"{self.name:<52} {self.value:8.3g} {self.unit}{bound}{'' if self.kept else '  EXCEEDED'}"


@dataclass(frozen=True)
class Limits:
    """The most that some figures may be, where there is a limit."""

    cpu: float | None = None
    memory: float | None = None
    idle: float | None = None
    stop: float = 10.0


TOGETHER = Limits(cpu=3.0, memory=300.0, idle=20.0, stop=5.0)


@dataclass(frozen=True)
class Served:
    """A process that serves: what it took to be ready."""

    process: subprocess.Popen[str]
    told: dict[str, object]
    seconds: float
    cpu: float


def main() -> None:
    """Print every figure."""
    names = sys.argv[1:] or list(installed())
    servers = 3 * len(names) + 2
    print(f"serving {', '.join(names)}: {servers} servers in one process")
    figures = measured(names, TOGETHER)
    print(*figures, sep="\n")
    print(f"the same, each server in a process of its own (--separate): {servers + 1} processes")
    apart = measured([*names, "--separate"], Limits())
    print(*apart, sep="\n")
    sys.exit(not all(figure.kept for figure in (*figures, *apart)))


def measured(words: list[str], limits: Limits) -> list[Figure]:
    """Give the least of some starts, for whatever else runs here only adds, and what the last of them does idle."""
    starts = []
    for number in range(STARTS):
        starts.append(served(words))
        if number < STARTS - 1:
            stopped(starts[-1])
    last = starts[-1]
    pids = processes(last.process.pid)
    memory, before = sum(map(proportional, pids)), sum(map(cpu, pids))
    time.sleep(IDLE)
    idle = sum(map(cpu, pids)) - before
    asked(str(last.told["head"]) + "/server_instances")
    return [
        Figure("start to ready: CPU", min(each.cpu for each in starts), "s", limits.cpu),
        Figure("start to ready: wall clock", min(each.seconds for each in starts), "s"),
        Figure("memory when ready (PSS)", memory, "MB", limits.memory),
        Figure(f"CPU while idle, per second over {IDLE:g} s", 1e3 * idle / IDLE, "ms", limits.idle),
        Figure("stop: wall clock", stopped(last), "s", limits.stop),
    ]


def served(words: list[str]) -> Served:
    """Start it and wait for its line."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "gymsdk", "serve", *words, "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    told = json.loads(process.stdout.readline())
    return Served(process, told, time.perf_counter() - began, sum(map(cpu, processes(process.pid))))


def stopped(one: Served) -> float:
    """Stop it and give the seconds that took."""
    began = time.perf_counter()
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(30) == 0
    assert one.process.stdout is not None
    one.process.stdout.close()
    return time.perf_counter() - began


def asked(url: str) -> None:
    """Have the head ask each server whether it is there."""
    with urllib.request.urlopen(url) as answer:
        assert {each["status"] for each in json.load(answer)} == {"success"}


def cpu(pid: int) -> float:
    """Give the seconds of CPU, user's and system's, that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def processes(pid: int) -> list[int]:
    """Give a process and those that it has started."""
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def proportional(pid: int) -> float:
    """Give the megabytes (10^6 bytes) a process has in memory, those that it shares divided by who shares them."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    (line,) = (each for each in lines if each.startswith("Pss:"))
    return int(line.split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    main()
