"""Measure what the head and a front cost with many replicas.

usage: cluster_capacity.py [--replicas N...] [--seconds S]

The head, its registry and the router are the real ones. The replicas only register and answer health checks. Each of
them registers three servers every 3.3 seconds, and a front asks the head for all instances once a second. The script
prints the CPU time that the head uses per second, the size of its answer, the longest waits for it and a registration,
and the CPU time of a front to choose among the replicas. The exit status is 1 if a replica that registers is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gymsdk.cluster.reports import LEASE_SECONDS, HeadSnapshot, Registration, Service
from gymsdk.cluster.router import Router
from gymsdk.http import client

TICKS = os.sysconf("SC_CLK_TCK")
KINDS = {
    "math": "resources_servers",
    "math_simple_agent": "responses_api_agents",
    "math_environment_server": "environment_servers",
}

RESOURCES = {"resources_server": {"type": "resources_servers", "name": "math"}}
FIELDS = {
    "resources_servers": {},
    "responses_api_agents": RESOURCES,
    "environment_servers": {**RESOURCES, "agent_server": {"type": "responses_api_agents", "name": "math_simple_agent"}},
}

ANSWERER = """
import asyncio
async def answer(reader, writer):
    while (line := await reader.readline()):
        if line == b"\\r\\n":
            writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\ncontent-type: application/json\\r\\n\\r\\n{}")
            await writer.drain()
async def main():
    server = await asyncio.start_server(answer, "0.0.0.0", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


@contextmanager
def run(*command: str) -> Iterator[tuple[int, str]]:
    """Run a process, and yield its id and its first line of output."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.pid, process.stdout.readline()
    finally:
        process.terminate()
        process.wait()


def read_cpu(process: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def keep_registered(head: str, number: int, port: int, count: int, slow: list[float]) -> None:
    """Register the servers of a replica again and again, and note how long it takes."""
    await asyncio.sleep(LEASE_SECONDS / 3 * number / count)
    host = f"127.0.{number // 250 + 1}.{number % 250 + 1}"
    services = [
        Service.model_validate(
            {"name": name, "kind": kind, "implementation": name, "host": host, "port": port, "fields": FIELDS[kind]}
        )
        for name, kind in KINDS.items()
    ]
    body = Registration(services=services).model_dump(mode="json")
    while True:
        began = time.monotonic()
        url = f"{head}/nodes/node-{number}"
        answer = await client.send("PUT", url, body, timeout=LEASE_SECONDS, retry=client.NO_RETRY)
        assert answer.ok, answer.text
        slow.append(time.monotonic() - began)
        await asyncio.sleep(LEASE_SECONDS / 3)


async def measure(count: int, seconds: float) -> bool:
    """Print a row for *count* replicas, and return whether the head kept all of them."""
    with (
        run("-c", ANSWERER) as (_, port),
        run("-m", "gymsdk", "serve", "--role", "head", "--port", "0", "--json") as (process, line),
    ):
        head = json.loads(line)["head"]
        registered: list[float] = []
        replicas = [
            asyncio.create_task(keep_registered(head, number, int(port), count, registered)) for number in range(count)
        ]
        await asyncio.sleep(2 * LEASE_SECONDS)
        registered.clear()
        began, cpu = time.monotonic(), read_cpu(process)
        waits, size, instances = [], 0, 0
        while time.monotonic() - began < seconds:
            asked = time.monotonic()
            answer = await client.get(f"{head}/nodes", timeout=30.0, retry=client.DEFAULT_RETRY)
            waits.append(time.monotonic() - asked)
            size = len(answer.body)
            instances = len(HeadSnapshot.model_validate(answer.json()).instances)
            await asyncio.sleep(max(0.0, 1.0 - waits[-1]))
        used = (read_cpu(process) - cpu) / (time.monotonic() - began)
        for replica in replicas:
            replica.cancel()
        await asyncio.gather(*replicas, return_exceptions=True)
        await client.aclose()
    print(
        f"{count:>8} {used:11.0%} {size / 1024:12.0f} KiB {max(waits) * 1e3:11.0f} ms"
        f" {max(registered, default=0) * 1e3:13.0f} ms {measure_choice(count):14.3f} ms",
        flush=True,
    )
    return instances == 3 * count


def measure_choice(count: int) -> float:
    """Return the milliseconds of CPU time in which a router chooses among *count* replicas."""
    router, loads = Router(), {f"replica-{number}": (0, number % 7) for number in range(count)}
    router.choose(loads)
    began = time.process_time()
    for _ in range(20):
        router.choose(loads)
    return (time.process_time() - began) * 1e3 / 20


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    print("replicas  CPU of head   list of servers   longest wait   registration   choice of front")
    kept = [asyncio.run(measure(count, options.seconds)) for count in options.replicas]
    if not all(kept):
        sys.exit("the head lost a replica that registered")


if __name__ == "__main__":
    main()
