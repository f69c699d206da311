"""The cost of `gymsdk serve` before anybody asks: from its start until all servers answer, and while they idle.

usage: serving.py [NAME...]

Serves the named environments (by default all that are installed) a few times. Exits with 1 where a limit is exceeded.
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
class Served:
    """A process that serves: what it took to be ready."""

    process: subprocess.Popen[str]
    told: dict[str, object]
    seconds: float
    cpu: float


def main() -> None:
    """Print every figure."""
    names = sys.argv[1:] or list(installed())
    print(f"serving {', '.join(names)}: {3 * len(names) + 2} servers in one process")
    figures = measured(names)
    print(*figures, sep="\n")
    sys.exit(not all(figure.kept for figure in figures))


def measured(names: list[str]) -> list[Figure]:
    """Give the least of some starts, for whatever else runs here only adds, and what the last of them does idle."""
    starts = []
    for number in range(STARTS):
        starts.append(served(names))
        if number < STARTS - 1:
            stopped(starts[-1])
    last = starts[-1]
    memory, before = resident(last.process.pid), cpu(last.process.pid)
    time.sleep(IDLE)
    idle = cpu(last.process.pid) - before
    asked(str(last.told["head"]) + "/server_instances")
    return [
        Figure("start to ready: CPU", min(each.cpu for each in starts), "s", 3.0),
        Figure("start to ready: wall clock", min(each.seconds for each in starts), "s"),
        Figure("memory when ready (RSS)", memory, "MB", 300.0),
        Figure(f"CPU while idle, per second over {IDLE:g} s", 1e3 * idle / IDLE, "ms", 20.0),
        Figure("stop: wall clock", stopped(last), "s", 5.0),
    ]


def served(names: list[str]) -> Served:
    """Start it and wait for its line."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "gymsdk", "serve", *names, "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    told = json.loads(process.stdout.readline())
    return Served(process, told, time.perf_counter() - began, cpu(process.pid))


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


def resident(pid: int) -> float:
    """Give the megabytes (10^6 bytes) a process has in memory."""
    (line,) = (each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("VmRSS"))
    return int(line.split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    main()
