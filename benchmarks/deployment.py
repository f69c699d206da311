"""What a topology costs: all servers in one process, and a process for each: start, memory, idling, a rollout's CPU.

usage: deployment.py [NAME] [--rollouts N] [--concurrency C]

The scripted oracle plays, so that all CPU is the servers' own. Memory is the proportional share (PSS): pages that
processes share are counted once. Of some starts and loads the least counts, for whatever else runs here only adds.
"""

from __future__ import annotations

import argparse
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
"""Seconds that the servers are watched while nobody asks anything."""

TOPOLOGIES = {"one process": [], "--separate": ["--separate"]}


def main() -> None:
    """Print every figure of every topology."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", nargs="?", default="tool_call")
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=16)
    asked = parser.parse_args()
    for title, options in TOPOLOGIES.items():
        print(f"{title}: {asked.name}, {asked.rollouts} rollouts, {asked.concurrency} at once")
        for what, value in figures(asked.name, options, asked.rollouts, asked.concurrency):
            print(f"  {what:<44} {value}")


def figures(name: str, options: list[str], rollouts: int, concurrency: int) -> Iterator[tuple[str, str]]:
    """Yield what there is to tell of one topology."""
    seconds = []
    for _ in range(STARTS - 1):
        with served(name, options) as (_, begun):
            seconds.append(begun)
    with served(name, options) as (told, begun):
        yield "start to ready: wall clock", f"{min([*seconds, begun]):.2f} s"
        time.sleep(1.0)
        pids = tree(int(told["pid"]))
        yield "processes", str(len(pids))
        yield "memory when ready (PSS), all and each", f"{sum(map(shared, pids)):.0f} MB, {shared(pids[-1]):.0f} MB"
        before = sum(map(cpu, pids))
        time.sleep(IDLE)
        yield f"CPU while idle, per second over {IDLE:g} s", f"{1e3 * (sum(map(cpu, pids)) - before) / IDLE:.1f} ms"
        yield from loaded(name, str(told["head"]), rollouts, concurrency)
        pids = tree(int(told["pid"]))
        yield "memory after that, with workers", f"{sum(map(shared, pids)):.0f} MB, {len(pids)} processes"


def loaded(name: str, head: str, rollouts: int, concurrency: int) -> Iterator[tuple[str, str]]:
    """Yield what a load comes to; the first of three warms up what there is."""
    words = [
        "bench",
        name,
        "--head",
        head,
        "--rollouts",
        str(rollouts),
        "--concurrency",
        ",".join([str(concurrency)] * 3),
    ]
    command = [sys.executable, "-m", "gymsdk", *words, "--model", "scripted/oracle", "--json"]
    found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    loads: list[dict[str, Any]] = json.loads(found.stdout)["loads"]
    least = min(loads, key=servers)
    yield "rollouts a second, at most", f"{max(each['rate'] for each in loads):.0f}"
    yield "CPU of the servers a rollout", f"{servers(least):.2f} ms"
    for process, spent in least["cpu"].items():
        yield f"  {process}", f"{spent:.2f} ms"
    yield "HTTP requests a rollout", f"{sum(least['requests'].values()):.1f}"
    yield "latency, half and 99 of 100", f"{least['latency']['p50']:.0f} ms, {least['latency']['p99']:.0f} ms"
    yield "rewards unlike the recording's, failures", f"{least['wrong']}, {sum(least['failures'].values())}"


def servers(load: dict[str, Any]) -> float:
    """Give the milliseconds of CPU a rollout takes, of all but who asks for it."""
    spent_by: dict[str, float] = load["cpu"]
    return sum(spent for process, spent in spent_by.items() if process != "load generator")


@contextmanager
def served(name: str, options: list[str]) -> Iterator[tuple[dict[str, Any], float]]:
    """Serve, and give the line that says where, and the seconds it took."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "gymsdk", "serve", name, "--port", "0", "--json", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline()), time.perf_counter() - began
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


def tree(pid: int) -> list[int]:
    """Give a process and all that it, and they, have started."""
    children = [each.read_text().split() for each in Path(f"/proc/{pid}/task").glob("*/children")]
    return [pid, *(each for some in children for child in some for each in tree(int(child)))]


def shared(pid: int) -> float:
    """Give the megabytes (10^6 bytes) a process has in memory, its part of what it shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    [line] = (each for each in lines if each.startswith("Pss:"))
    return int(line.split()[1]) * 1024 / 1e6


def cpu(pid: int) -> float:
    """Give the seconds of CPU, user's and system's, that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


if __name__ == "__main__":
    main()
