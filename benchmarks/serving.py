"""Measure the start-up, idle resource use and shutdown of `gymsdk serve`, without any load.

usage: serving.py [NAME...]

The script serves the named environments (default: all installed environments) several times, first in one process and
then with one process per server. The exit status is 1 if a limit is exceeded.
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
"""Seconds of the measurement without requests."""


@dataclass(frozen=True)
class Figure:
    """One measurement and its limit, if it has a limit."""

    name: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def within_limit(self) -> bool:
        """Whether the value is within the limit."""
        return self.limit is None or self.value <= self.limit

    def __str__(self) -> str:
        bound = "" if self.limit is None else f" (limit {self.limit:g})"
        return f"{self.name:<52} {self.value:8.3g} {self.unit}{bound}{'' if self.within_limit else '  EXCEEDED'}"


@dataclass(frozen=True)
class Limits:
    """The limits of one topology; None means no limit."""

    cpu: float | None = None
    memory: float | None = None
    idle: float | None = None
    stop: float = 10.0


ONE_PROCESS_LIMITS = Limits(cpu=3.0, memory=300.0, idle=20.0, stop=5.0)


@dataclass(frozen=True)
class Served:
    """A running `gymsdk serve`, with the wall time and CPU time of its start-up."""

    process: subprocess.Popen[str]
    ready: dict[str, object]
    seconds: float
    cpu: float


def main() -> None:
    """Print all measurements."""
    names = sys.argv[1:] or list(installed())
    servers = 3 * len(names) + 2
    print(f"serving {', '.join(names)}: {servers} servers in one process")
    figures = measure(names, ONE_PROCESS_LIMITS)
    print(*figures, sep="\n")
    print(f"the same with one process per server (--separate): {servers + 1} processes")
    separate = measure([*names, "--separate"], Limits())
    print(*separate, sep="\n")
    sys.exit(not all(figure.within_limit for figure in (*figures, *separate)))


def measure(arguments: list[str], limits: Limits) -> list[Figure]:
    """Measure several starts, and the idle resource use after the last start.

    The lowest start-up times count, because other processes on this machine can only add to them.
    """
    starts = []
    for number in range(STARTS):
        starts.append(start(arguments))
        if number < STARTS - 1:
            stop(starts[-1])
    last = starts[-1]
    pids = processes(last.process.pid)
    memory, before = sum(map(memory_mb, pids)), sum(map(cpu, pids))
    time.sleep(IDLE)
    idle = sum(map(cpu, pids)) - before
    check_servers(str(last.ready["head"]) + "/server_instances")
    return [
        Figure("start to ready: CPU", min(server.cpu for server in starts), "s", limits.cpu),
        Figure("start to ready: wall time", min(server.seconds for server in starts), "s"),
        Figure("memory when ready (PSS)", memory, "MB", limits.memory),
        Figure(f"CPU while idle, per second over {IDLE:g} s", 1e3 * idle / IDLE, "ms", limits.idle),
        Figure("stop: wall time", stop(last), "s", limits.stop),
    ]


def start(arguments: list[str]) -> Served:
    """Start `gymsdk serve` and wait for its ready message."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "gymsdk", "serve", *arguments, "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    return Served(process, ready, time.perf_counter() - started, sum(map(cpu, processes(process.pid))))


def stop(server: Served) -> float:
    """Stop the server; return the seconds until it exits."""
    started = time.perf_counter()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    assert server.process.stdout is not None
    server.process.stdout.close()
    return time.perf_counter() - started


def check_servers(url: str) -> None:
    """Check that the head reaches every server."""
    with urllib.request.urlopen(url) as answer:
        assert {instance["status"] for instance in json.load(answer)} == {"success"}


def cpu(pid: int) -> float:
    """Return the CPU time, user and system, that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def processes(pid: int) -> list[int]:
    """Return the process id and those of its children."""
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def memory_mb(pid: int) -> float:
    """Return the proportional set size of a process in megabytes (10^6 bytes)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    (line,) = (entry for entry in lines if entry.startswith("Pss:"))
    return int(line.split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    main()
