"""Compare the resource use of all servers in one process, of two workers, and of one process per server.

usage: deployment.py [NAME...] [--rollouts N] [--concurrency C]

The script measures start-up time, memory, idle CPU time, and CPU time per rollout. The scripted oracle is the policy,
so all CPU time is that of the servers. Memory is the proportional set size (PSS), which counts shared pages once. The
lowest measurement of several starts and loads counts, because other processes on this machine can only add to it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")
STARTS = 3
IDLE = 10.0
"""Seconds of the measurement without requests."""

NAMES = ("math", "tool_call")
TOPOLOGIES = {"one process": [], "--workers 2": ["--workers", "2"], "--separate": ["--separate"]}


def main() -> None:
    """Print all measurements of each topology."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=16)
    arguments = parser.parse_args()
    for name, (title, options) in itertools.product(arguments.names, TOPOLOGIES.items()):
        print(f"{title}: {name}, {arguments.rollouts} rollouts, {arguments.concurrency} concurrent")
        for label, value in measure(name, options, arguments.rollouts, arguments.concurrency):
            print(f"  {label:<48} {value}")


def measure(name: str, options: list[str], rollouts: int, concurrency: int) -> Iterator[tuple[str, str]]:
    """Yield a label and a value for each measurement of one topology."""
    seconds = []
    for _ in range(STARTS - 1):
        with served(name, options) as (_, elapsed):
            seconds.append(elapsed)
    with served(name, options) as (ready, elapsed):
        yield "start to ready: wall clock", f"{min([*seconds, elapsed]):.2f} s"
        time.sleep(1.0)
        pids = tree(int(ready["pid"]))
        yield "processes", str(len(pids))
        yield (
            "memory when ready (PSS), total and last process",
            f"{sum(map(memory_mb, pids)):.0f} MB, {memory_mb(pids[-1]):.0f} MB",
        )
        before = sum(map(cpu, pids))
        time.sleep(IDLE)
        yield f"CPU while idle, per second over {IDLE:g} s", f"{1e3 * (sum(map(cpu, pids)) - before) / IDLE:.1f} ms"
        yield from measure_load(name, str(ready["head"]), rollouts, concurrency)
        pids = tree(int(ready["pid"]))
        yield "memory after the load, with workers", f"{sum(map(memory_mb, pids)):.0f} MB, {len(pids)} processes"


def measure_load(name: str, head: str, rollouts: int, concurrency: int) -> Iterator[tuple[str, str]]:
    """Yield the measurements of a load; the first of three loads warms up the servers."""
    arguments = [
        "bench",
        name,
        "--head",
        head,
        "--rollouts",
        str(rollouts),
        "--concurrency",
        ",".join([str(concurrency)] * 3),
    ]
    command = [sys.executable, "-m", "gymsdk", *arguments, "--model", "scripted/oracle", "--json"]
    completed = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    loads: list[dict[str, Any]] = json.loads(completed.stdout)["loads"]
    cheapest = min(loads, key=servers_cpu)
    yield "rollouts per second, highest of the loads", f"{max(load['rate'] for load in loads):.0f}"
    yield "CPU of the servers per rollout", f"{servers_cpu(cheapest):.2f} ms"
    for process, milliseconds in cheapest["cpu"].items():
        yield f"  {process}", f"{milliseconds:.2f} ms"
    yield "HTTP requests per rollout", f"{sum(cheapest['requests'].values()):.1f}"
    yield "latency, p50 and p99", f"{cheapest['latency']['p50']:.0f} ms, {cheapest['latency']['p99']:.0f} ms"
    yield (
        "rewards that differ from the recording, failures",
        f"{cheapest['wrong']}, {sum(cheapest['failures'].values())}",
    )


def servers_cpu(load: dict[str, Any]) -> float:
    """Return the CPU time per rollout of all processes except the load generator, in milliseconds."""
    cpu_by_process: dict[str, float] = load["cpu"]
    return sum(milliseconds for process, milliseconds in cpu_by_process.items() if process != "load generator")


@contextmanager
def served(name: str, options: list[str]) -> Iterator[tuple[dict[str, Any], float]]:
    """Run `gymsdk serve`; yield its ready message and the seconds until the message."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "gymsdk", "serve", name, "--port", "0", "--json", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline()), time.perf_counter() - started
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


def tree(pid: int) -> list[int]:
    """Return the process id and those of all descendants."""
    children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [pid, *(descendant for some in children for child in some for descendant in tree(int(child)))]


def memory_mb(pid: int) -> float:
    """Return the proportional set size of a process in megabytes (10^6 bytes)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    [line] = (entry for entry in lines if entry.startswith("Pss:"))
    return int(line.split()[1]) * 1024 / 1e6


def cpu(pid: int) -> float:
    """Return the CPU time, user and system, that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


if __name__ == "__main__":
    main()
