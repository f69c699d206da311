"""Measure how servers behave under more concurrent /run requests than they can play at once.

usage: overload.py [NAME] [--in-flight N,...] [--topology one,separate] [--checkout LABEL=DIR ...]

For each number of requests in flight, a client process sends that many requests at once to the agent server. The
client honors Retry-After on 429 and 503, with jitter, and gives up after --patience seconds. Meanwhile, another process
asks every server for /livez ten times a second, each time on a new connection. The scripted oracle is the policy, so
all CPU is the servers' own.

With --checkout, the servers run from each of the named source trees in turn, which compares two versions in one run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

TICKS = os.sysconf("SC_CLK_TCK")
TOPOLOGIES: dict[str, list[str]] = {"one": [], "separate": ["--separate"]}
INTERVAL = 0.1
"""Seconds between two health requests to the same server."""

SLOWEST_HEALTH = 1.0
"""Seconds that a health request may take."""

OVERLOADED = frozenset({429, 503})


@dataclass
class Result:
    """What came of one load."""

    scored: int = 0
    refusals: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    cpu: float = 0.0
    health: list[float] = field(default_factory=list)


def main() -> None:
    """Print one table per topology; exit with 1 if the last checkout loses a rollout or answers /livez late."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="math")
    parser.add_argument("--in-flight", default="64,1024,4096,8192")
    parser.add_argument("--topology", default="one,separate")
    parser.add_argument("--checkout", action="append", default=[], metavar="LABEL=DIR")
    parser.add_argument("--patience", type=float, default=240.0)
    parser.add_argument("--warm-up", type=int, default=256, help="Rollouts at 16 in flight before the first load.")
    parser.add_argument("--least", type=int, default=1024, help="Rollouts of a load with fewer in flight.")
    parser.add_argument("--probe", nargs="*", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.probe:
        probe(asked.probe)
        return
    raise_file_limit()
    checkouts = dict(each.split("=", 1) for each in asked.checkout) or {"here": ""}
    loads = [int(each) for each in asked.in_flight.split(",")]
    failed = False
    for topology in asked.topology.split(","):
        found: dict[str, dict[int, Result]] = {label: {} for label in checkouts}
        for load in loads:
            for label, folder in checkouts.items():
                with served(asked.name, TOPOLOGIES[topology], folder) as told:
                    found[label][load] = measured(asked, told, load)
                show(topology, label, load, found[label][load])
        compare(loads, found)
        last = [*found.values()][-1].values()
        failed |= any(each.lost or max(each.health, default=0.0) > SLOWEST_HEALTH for each in last)
    sys.exit(int(failed))


def measured(asked: argparse.Namespace, told: dict[str, Any], load: int) -> Result:
    """Run one load against running servers."""
    rows = list(tasks(asked.name))
    servers = {name: each["url"] for name, each in told["servers"].items()}
    agent = servers[f"{asked.name}_simple_agent"]
    asyncio.run(run(agent, rows, asked.warm_up, 16, asked.patience))
    pids = tree(int(told["pid"]))
    before = sum(map(cpu, pids))
    with probed([told["head"], *servers.values()]) as health:
        result = asyncio.run(run(agent, rows, max(load, asked.least), load, asked.patience))
    result.cpu = sum(map(cpu, pids)) - before
    result.health = health
    return result


async def run(url: str, rows: Sequence[bytes], number: int, in_flight: int, patience: float) -> Result:
    """Send *number* rows, *in_flight* at once, each until it is answered with a rollout or *patience* is over."""
    result, remaining, began = Result(), iter(range(number)), time.perf_counter()
    until = began + patience
    # No bound on connections: all requests are really in flight.
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def client() -> None:
            for each in remaining:
                await one(session, url, rows[each % len(rows)], until, result)

        await asyncio.gather(*(client() for _ in range(in_flight)))
    result.seconds = time.perf_counter() - began
    return result


async def one(session: aiohttp.ClientSession, url: str, row: bytes, until: float, result: Result) -> None:
    """Send one row until it is answered with a rollout, refused for good, or out of time."""
    while True:
        why, pause = await sent(session, url, row)
        if why == "scored":
            result.scored += 1
            return
        if pause is None or time.perf_counter() + pause > until:
            result.lost[why] += 1
            return
        result.refusals += 1
        await asyncio.sleep(pause * random.uniform(1.0, 1.5))


async def sent(session: aiohttp.ClientSession, url: str, row: bytes) -> tuple[str, float | None]:
    """Send a row once; give what came of it, and after how many seconds to send it again, if ever."""
    try:
        async with session.post(url + "/run", data=row, headers={"content-type": "application/json"}) as answer:
            body = await answer.read()
            if answer.status in OVERLOADED and "Retry-After" in answer.headers:
                return str(json.loads(body).get("kind", answer.status)), float(answer.headers["Retry-After"])
            if answer.status != 200 or "reward" not in json.loads(body):
                return f"{answer.status}", None
            return "scored", None
    except (aiohttp.ClientError, OSError) as error:
        return type(error).__name__, None


def probe(urls: Sequence[str]) -> None:
    """Ask each of *urls* for /livez until standard input is closed; print the seconds of each answer."""
    over = threading.Event()
    threads = [threading.Thread(target=asked_repeatedly, args=(each, over)) for each in urls]
    for each in threads:
        each.start()
    sys.stdin.read()
    over.set()
    for each in threads:
        each.join()


def asked_repeatedly(url: str, over: threading.Event) -> None:
    """Ask one server for /livez every `INTERVAL` seconds."""
    at = urlsplit(url)
    request = f"GET /livez HTTP/1.1\r\nhost: {at.netloc}\r\nconnection: close\r\n\r\n".encode()
    while not over.is_set():
        began = time.perf_counter()
        try:
            with socket.create_connection((at.hostname, at.port), timeout=60) as connection:
                connection.sendall(request)
                ok = connection.recv(4096).startswith(b"HTTP/1.1 200")
        except OSError:
            ok = False
        took = time.perf_counter() - began if ok else float("inf")
        sys.stdout.write(f"{took}\n")
        over.wait(max(0.0, INTERVAL - took))


@contextmanager
def probed(urls: Sequence[str]) -> Iterator[list[float]]:
    """Ask *urls* for /livez in another process for as long as the context is open; the list is filled at its end."""
    command = [sys.executable, __file__, "--probe", *urls]
    found: list[float] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield found
        told, _ = process.communicate()
        found += map(float, told.split())


@contextmanager
def served(name: str, options: list[str], folder: str) -> Iterator[dict[str, Any]]:
    """Run `gymsdk serve` from the source tree *folder*, or the installed one; give what it prints when ready."""
    command = [sys.executable, "-m", "gymsdk", "serve", name, "--port", "0", "--json", *options]
    environ = {**os.environ, **({"PYTHONPATH": folder} if folder else {})}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ
    ) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def tasks(name: str) -> Iterator[bytes]:
    """Yield rows of an environment."""
    command = [sys.executable, "-m", "gymsdk", "tasks", name, "--limit", "200"]
    yield from subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()


def show(topology: str, label: str, load: int, result: Result) -> None:
    """Print one line of figures."""
    rollouts = result.scored + result.lost.total()
    print(
        f"{topology:<9} {label:<8} in flight {load:>5}: scored {result.scored:>5}, lost {result.lost.total():>5},"
        f" 503 {result.refusals:>5}, {result.seconds:>6.1f} s,"
        f" CPU {1e3 * result.cpu / max(1, rollouts):>6.2f} ms a rollout, {health(result)}",
        *([f"lost: {dict(result.lost)}"] if result.lost else []),
        flush=True,
    )


def health(result: Result) -> str:
    """Give the quantiles of the health requests."""
    took = sorted(result.health)
    if len(took) < 2:
        return "/livez was not asked often enough"
    late = statistics.quantiles(took, n=100)[-1] if took[-1] < float("inf") else took[int(len(took) * 0.99) - 1]
    return f"/livez p50 {1e3 * took[len(took) // 2]:.0f}, p99 {1e3 * late:.0f}, max {1e3 * took[-1]:.0f} ms"


def compare(loads: Sequence[int], found: dict[str, dict[int, Result]]) -> None:
    """Print the CPU of the last checkout relative to the first, by load."""
    first, *_, last = [*found.values(), *found.values()]
    if first is last:
        return
    ratios = (f"{load}: {last[load].cpu / first[load].cpu:.2f}" for load in loads if first[load].cpu)
    labels = list(found)
    print(f"CPU, {labels[-1]} relative to {labels[0]}, by requests in flight: {', '.join(ratios)}\n", flush=True)


def tree(pid: int) -> list[int]:
    """Give a process and all its descendants."""
    children = [each.read_text().split() for each in Path(f"/proc/{pid}/task").glob("*/children")]
    return [pid, *(each for some in children for child in some for each in tree(int(child)))]


def cpu(pid: int) -> float:
    """Give the seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def raise_file_limit() -> None:
    """Raise this process's soft limit on open files to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main()
