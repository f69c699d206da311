"""Compare `gymsdk serve --workers 2` with one worker and with one process, and check 1,000 sessions that reconnect.

usage: workers.py [--rollouts N] [--concurrency C] [--rounds R] [--sessions S]

The script sends rows of `tool_call` to `/run`, on connections that stay open, with rollout ids, and on a new connection
for each row. The scripted oracle is the policy, so all CPU time is that of the servers, the supervisor included. The
deployments run at the same time and take turns, and the lowest CPU time of several rounds counts, because other
processes on this machine can only add to it. On a machine with two cores, the client and the servers compete for them,
so the rate does not show what two workers can do; the CPU time per rollout does.

Each session adds to a number at the server, and every request uses a new connection. The exit status is 1 if a limit
is exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from yardstick.figures import Figure, format_table
from yardstick.processes import Server, get_agent_url, run_server

MAX_RATIO = 1.15
"""The CPU time per rollout of two workers, compared with one worker and with one process."""

ENVIRONMENT = "tool_call"
ROWS = 200

SETUPS = {"one process": [], "--workers 1": ["--workers", "1"], "--workers 2": ["--workers", "2"]}

COUNTING = Path(__file__).parent / "counting"
"""A folder with the installed environment `counting`."""


def main() -> None:
    """Print all measurements."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=1000)
    arguments = parser.parse_args()
    figures = [
        *measure_loads(arguments.rollouts, arguments.concurrency, arguments.rounds),
        *measure_sessions(arguments.sessions),
    ]
    print(format_table(figures))
    sys.exit(not all(figure.is_within_limit for figure in figures))


def measure_loads(rollouts: int, concurrency: int, rounds: int) -> Iterator[Figure]:
    """Yield the CPU time per rollout and the rate of each deployment, for each kind of load."""
    rows = draw_rows()
    ids = itertools.count()
    loads: dict[str, dict[str, Any]] = {
        "connections that stay open": {},
        "with rollout ids": {"ids": ids},
        "a new connection for each row": {"force_close": True},
    }
    with ExitStack() as stack:
        servers = {name: stack.enter_context(serve(ENVIRONMENT, *options)) for name, options in SETUPS.items()}
        for server in servers.values():
            asyncio.run(send_rows(get_agent_url(server, ENVIRONMENT), rows, 200, concurrency))
        for load, options in loads.items():
            results: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
            for _ in range(rounds):
                for name, server in servers.items():
                    results[name].append(measure_load(server, rows, rollouts, concurrency, options))
            lowest = {name: min(cpu for cpu, _ in found) for name, found in results.items()}
            for name, found in results.items():
                yield Figure(load, f"{name}: CPU per rollout", 1e3 * lowest[name], "ms")
                yield Figure(load, f"{name}: rate", max(rate for _, rate in found), "rollouts/s")
            for name in ("one process", "--workers 1"):
                yield Figure(
                    load,
                    f"CPU per rollout with --workers 2, compared with {name}",
                    1e3 * lowest["--workers 2"],
                    "ms",
                    floor=1e3 * lowest[name],
                    limit=MAX_RATIO,
                )


def measure_load(
    server: Server, rows: list[dict[str, Any]], rollouts: int, concurrency: int, options: dict[str, Any]
) -> tuple[float, float]:
    """Return the CPU time per rollout in seconds, and the rollouts per second."""
    before, started = server.tree.read_cpu(), time.perf_counter()
    url = get_agent_url(server, ENVIRONMENT)
    wrong = asyncio.run(send_rows(url, rows, rollouts, concurrency, **options))
    assert not wrong, f"{wrong} of {rollouts} rollouts have no reward of 1"
    seconds = time.perf_counter() - started
    return (server.tree.read_cpu() - before) / rollouts, rollouts / seconds


async def send_rows(
    url: str,
    rows: list[dict[str, Any]],
    count: int,
    concurrency: int,
    *,
    ids: Iterator[int] | None = None,
    force_close: bool = False,
) -> int:
    """Send *count* rows to an agent, and return how many have no reward of 1."""
    numbers = iter(range(count))
    wrong = 0

    async def work(session: aiohttp.ClientSession) -> None:
        nonlocal wrong
        for number in numbers:
            body = rows[number % len(rows)]
            if ids is not None:
                body = {**body, "_ng_rollout_id": f"r{next(ids)}"}
            async with session.post(f"{url}/run", json=body) as answer:
                wrong += (await answer.json()).get("reward") != 1.0

    connector = aiohttp.TCPConnector(limit=0, force_close=force_close)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(work(session) for _ in range(concurrency)))
    return wrong


def measure_sessions(count: int) -> Iterator[Figure]:
    """Yield how many of *count* sessions, whose requests all use new connections, have a wrong result."""
    with serve("counting", "--workers", "2", site=str(COUNTING)) as server:
        started = time.perf_counter()
        wrong = asyncio.run(play_sessions(server.ready["servers"]["counting"]["url"], count))
        seconds = time.perf_counter() - started
    row = f"{count} sessions that reconnect for each request"
    yield Figure(row, "wrong", wrong, limit=0)
    yield Figure(row, "requests", 6 * count / seconds, "per second")


async def play_sessions(url: str, count: int) -> int:
    """Play *count* sessions, up to 128 at a time, and return how many have a wrong result."""
    slots = asyncio.Semaphore(128)

    async def play(number: int) -> bool:
        async with (
            slots,
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True), cookie_jar=aiohttp.CookieJar(unsafe=True)
            ) as session,
        ):

            async def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
                async with session.post(url + path, json=body) as answer:
                    answer.raise_for_status()
                    content: dict[str, Any] = json.loads(await answer.read())
                    return content

            row = {"responses_create_params": {"input": "count"}, "count": number}
            await post("/seed_session", row)
            counts = [(await post("/add", {"count": 1}))["count"] for _ in range(3)]
            output = []
            for call in ("c1", "c2", "c3"):
                output += [
                    {"type": "function_call", "name": "add", "arguments": '{"count": 1}', "call_id": call},
                    {"type": "function_call_output", "call_id": call, "output": "{}"},
                ]
            output.append({"type": "message", "role": "assistant", "content": "done"})
            verdict = await post("/verify", {**row, "response": {"output": output}})
            await post("/close_session", {})
            return [*counts, verdict["final"]] == [number + 1, number + 2, number + 3, number + 3]

    return count - sum(await asyncio.gather(*(play(number) for number in range(count))))


@contextmanager
def serve(*arguments: str, site: str = "") -> Iterator[Server]:
    """Run `gymsdk serve`, with *site* as a further folder of installed packages."""
    path = os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "gymsdk", "serve", *arguments, "--port", "0", "--json"]
    with run_server(command, environ={"PYTHONPATH": path}) as server:
        yield server


def draw_rows() -> list[dict[str, Any]]:
    """Return rows of the environment."""
    command = [sys.executable, "-m", "gymsdk", "tasks", ENVIRONMENT, "--limit", str(ROWS), "--split", "train"]
    lines = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()
    return [{key: value for key, value in json.loads(line).items() if not key.startswith("_ng_")} for line in lines]


if __name__ == "__main__":
    main()
