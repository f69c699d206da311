"""Measure how servers behave under more concurrent /run requests than they can play at once.

usage: overload.py [NAME] [--in-flight N,...] [--topology one,separate] [--checkout LABEL=DIR ...]

For each number of requests in flight, a client process sends that many requests at once to the agent server. The
client honors Retry-After on 429 and 503, with jitter, and gives up after --patience seconds. Meanwhile, another process
requests /livez from every server ten times a second, each time on a new connection. The scripted oracle is the policy,
so all measured CPU time is that of the servers.

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
    """The outcome of one load."""

    scored: int = 0
    refusals: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    cpu: float = 0.0
    health: list[float] = field(default_factory=list)


def main() -> None:
    """Print one table per topology; exit with status 1 if the last checkout loses a rollout or answers /livez late."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="math")
    parser.add_argument("--in-flight", default="64,1024,4096,8192")
    parser.add_argument("--topology", default="one,separate")
    parser.add_argument("--checkout", action="append", default=[], metavar="LABEL=DIR")
    parser.add_argument("--patience", type=float, default=240.0)
    parser.add_argument("--warm-up", type=int, default=256, help="Rollouts at 16 in flight before the first load.")
    parser.add_argument("--least", type=int, default=1024, help="Rollouts of a load with fewer in flight.")
    parser.add_argument("--probe", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.probe:
        probe(arguments.probe)
        return
    raise_file_limit()
    checkouts = dict(each.split("=", 1) for each in arguments.checkout) or {"here": ""}
    loads = [int(each) for each in arguments.in_flight.split(",")]
    failed = False
    for topology in arguments.topology.split(","):
        results: dict[str, dict[int, Result]] = {label: {} for label in checkouts}
        for load in loads:
            for label, folder in checkouts.items():
                with served(arguments.name, TOPOLOGIES[topology], folder) as ready:
                    results[label][load] = measure(arguments, ready, load)
                show(topology, label, load, results[label][load])
        compare(loads, results)
        last = [*results.values()][-1].values()
        failed |= any(each.lost or max(each.health, default=0.0) > SLOWEST_HEALTH for each in last)
    sys.exit(int(failed))


def measure(arguments: argparse.Namespace, ready: dict[str, Any], load: int) -> Result:
    """Run one load against running servers."""
    rows = list(tasks(arguments.name))
    servers = {name: each["url"] for name, each in ready["servers"].items()}
    agent = servers[f"{arguments.name}_simple_agent"]
    asyncio.run(run(agent, rows, arguments.warm_up, 16, arguments.patience))
    pids = tree(int(ready["pid"]))
    before = sum(map(cpu, pids))
    with probed([ready["head"], *servers.values()]) as health:
        result = asyncio.run(run(agent, rows, max(load, arguments.least), load, arguments.patience))
    result.cpu = sum(map(cpu, pids)) - before
    result.health = health
    return result


async def run(url: str, rows: Sequence[bytes], number: int, in_flight: int, patience: float) -> Result:
    """Send *number* rows, *in_flight* concurrently, and retry each row for at most *patience* seconds."""
    result, remaining, started = Result(), iter(range(number)), time.perf_counter()
    until = started + patience
    # Without a limit on connections, all requests are in flight at the same time.
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def client() -> None:
            for each in remaining:
                await send_until_scored(session, url, rows[each % len(rows)], until, result)

        await asyncio.gather(*(client() for _ in range(in_flight)))
    result.seconds = time.perf_counter() - started
    return result


async def send_until_scored(session: aiohttp.ClientSession, url: str, row: bytes, until: float, result: Result) -> None:
    """Send one row and retry until the server returns a rollout, rejects the row permanently, or the time is over."""
    while True:
        why, pause = await send_once(session, url, row)
        if why == "scored":
            result.scored += 1
            return
        if pause is None or time.perf_counter() + pause > until:
            result.lost[why] += 1
            return
        result.refusals += 1
        await asyncio.sleep(pause * random.uniform(1.0, 1.5))


async def send_once(session: aiohttp.ClientSession, url: str, row: bytes) -> tuple[str, float | None]:
    """Send a row once; return the outcome, and the seconds to wait before a retry or None if a retry cannot help."""
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
    """Request /livez from each of *urls* until standard input closes; print the latency of each response in seconds."""
    stopped = threading.Event()
    threads = [threading.Thread(target=probe_repeatedly, args=(each, stopped)) for each in urls]
    for each in threads:
        each.start()
    sys.stdin.read()
    stopped.set()
    for each in threads:
        each.join()


def probe_repeatedly(url: str, stopped: threading.Event) -> None:
    """Request /livez from one server every `INTERVAL` seconds."""
    at = urlsplit(url)
    request = f"GET /livez HTTP/1.1\r\nhost: {at.netloc}\r\nconnection: close\r\n\r\n".encode()
    while not stopped.is_set():
        started = time.perf_counter()
        try:
            with socket.create_connection((at.hostname, at.port), timeout=60) as connection:
                connection.sendall(request)
                ok = connection.recv(4096).startswith(b"HTTP/1.1 200")
        except OSError:
            ok = False
        took = time.perf_counter() - started if ok else float("inf")
        sys.stdout.write(f"{took}\n")
        stopped.wait(max(0.0, INTERVAL - took))


@contextmanager
def probed(urls: Sequence[str]) -> Iterator[list[float]]:
    """Ask *urls* for /livez in another process for as long as the context is open; the list is filled at its end."""
    command = [sys.executable, __file__, "--probe", *urls]
    results: list[float] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield results
        ready, _ = process.communicate()
        results += map(float, ready.split())


@contextmanager
def served(name: str, options: list[str], folder: str) -> Iterator[dict[str, Any]]:
    """Run `gymsdk serve` from the source tree *folder*, or the installed package; yield its ready message."""
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
    """Yield task rows of an environment."""
    command = [sys.executable, "-m", "gymsdk", "tasks", name, "--limit", "200"]
    yield from subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()


def show(topology: str, label: str, load: int, result: Result) -> None:
    """Print one line of measurements."""
    rollouts = result.scored + result.lost.total()
    print(
        f"{topology:<9} {label:<8} in flight {load:>5}: scored {result.scored:>5}, lost {result.lost.total():>5},"
        f" 503 {result.refusals:>5}, {result.seconds:>6.1f} s,"
        f" CPU {1e3 * result.cpu / max(1, rollouts):>6.2f} ms per rollout, {health(result)}",
        *([f"lost: {dict(result.lost)}"] if result.lost else []),
        flush=True,
    )


def health(result: Result) -> str:
    """Return the latency quantiles of the health requests as text."""
    took = sorted(result.health)
    if len(took) < 2:
        return "too few /livez requests for quantiles"
    late = statistics.quantiles(took, n=100)[-1] if took[-1] < float("inf") else took[int(len(took) * 0.99) - 1]
    return f"/livez p50 {1e3 * took[len(took) // 2]:.0f}, p99 {1e3 * late:.0f}, max {1e3 * took[-1]:.0f} ms"


def compare(loads: Sequence[int], results: dict[str, dict[int, Result]]) -> None:
    """Print the CPU time of the last checkout relative to the first, per load."""
    first, *_, last = [*results.values(), *results.values()]
    if first is last:
        return
    ratios = (f"{load}: {last[load].cpu / first[load].cpu:.2f}" for load in loads if first[load].cpu)
    labels = list(results)
    print(f"CPU, {labels[-1]} relative to {labels[0]}, by requests in flight: {', '.join(ratios)}\n", flush=True)


def tree(pid: int) -> list[int]:
    """Return the process id and those of all descendants."""
    children = [each.read_text().split() for each in Path(f"/proc/{pid}/task").glob("*/children")]
    return [pid, *(each for some in children for child in some for each in tree(int(child)))]


def cpu(pid: int) -> float:
    """Return the CPU time, user and system, that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def raise_file_limit() -> None:
    """Raise this process's soft limit on open files to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main()
