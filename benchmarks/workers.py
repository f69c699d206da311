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
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

TICKS = os.sysconf("SC_CLK_TCK")

MAX_RATIO = 1.15
"""The CPU time per rollout of two workers, compared with one worker and with one process."""

ROWS = 200

SETUPS = {"one process": [], "--workers 1": ["--workers", "1"], "--workers 2": ["--workers", "2"]}

COUNTER = """
from typing import Literal
from gymsdk import Message, Reset, State, Task, Verdict, hookimpl

class Start(Task):
    count: int = 0

class Count(State):
    count: int = 0

class Counted(Verdict):
    final: int = 0

async def add(count: int, state: State) -> dict[str, int]:
    "Add to the number."
    state.count += count
    return {"count": state.count}

@hookimpl
def tools():
    return [add]

@hookimpl
def tasks(split: Literal["train"], seed):
    yield Start.ask("count")

@hookimpl
async def reset(task: Start):
    return Reset(state=Count(count=task.count))

@hookimpl
async def verify(state: Count):
    return Counted(reward=1.0, final=state.count)

@hookimpl
def solve(task: Start):
    return Message(content="done")
"""


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
        return f"{self.name:<64} {self.value:8.4g} {self.unit}{bound}{'' if self.within_limit else '  EXCEEDED'}"


def main() -> None:
    """Print all measurements."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=1000)
    arguments = parser.parse_args()
    exceeded = False
    figures = [
        *measure_loads(arguments.rollouts, arguments.concurrency, arguments.rounds),
        *measure_sessions(arguments.sessions),
    ]
    for figure in figures:
        print(figure, flush=True)
        exceeded |= not figure.within_limit
    sys.exit(exceeded)


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
        servers = {name: stack.enter_context(served(["tool_call", *options])) for name, options in SETUPS.items()}
        for ready in servers.values():
            asyncio.run(send_rows(agent_url(ready), rows, 200, concurrency))
        for load, options in loads.items():
            results: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
            for _ in range(rounds):
                for name, ready in servers.items():
                    results[name].append(measure_load(ready, rows, rollouts, concurrency, options))
            lowest = {name: min(each for each, _ in found) for name, found in results.items()}
            for name, found in results.items():
                yield Figure(f"{load}, {name}: CPU per rollout", 1e3 * lowest[name], "ms")
                yield Figure(f"{load}, {name}: rate", max(rate for _, rate in found), "rollouts/s")
            for name in ("one process", "--workers 1"):
                ratio = lowest["--workers 2"] / lowest[name]
                yield Figure(f"{load}, --workers 2 compared with {name}: CPU per rollout", ratio, "x", MAX_RATIO)


def measure_load(
    ready: dict[str, Any], rows: list[dict[str, Any]], rollouts: int, concurrency: int, options: dict[str, Any]
) -> tuple[float, float]:
    """Return the CPU time per rollout in seconds, and the rollouts per second."""
    pids = tree(int(ready["pid"]))
    before, started = sum(map(cpu, pids)), time.perf_counter()
    wrong = asyncio.run(send_rows(agent_url(ready), rows, rollouts, concurrency, **options))
    assert not wrong, f"{wrong} of {rollouts} rollouts have no reward of 1"
    seconds = time.perf_counter() - started
    return (sum(map(cpu, pids)) - before) / rollouts, rollouts / seconds


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
    with tempfile.TemporaryDirectory() as folder:
        install_counter(Path(folder))
        with served(["counting", "--workers", "2"], site=folder) as ready:
            started = time.perf_counter()
            wrong = asyncio.run(play_sessions(ready["servers"]["counting"]["url"], count))
            seconds = time.perf_counter() - started
    yield Figure(f"{count} sessions that reconnect for each request: wrong", wrong, "", 0)
    yield Figure(f"{count} sessions that reconnect for each request: requests", 6 * count / seconds, "per second")


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


def install_counter(site: Path) -> None:
    """Install the environment `counting` in the folder *site*."""
    about = site / "env_counting-1.0.dist-info"
    about.mkdir()
    (site / "env_counting.py").write_text(COUNTER)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: env_counting\nVersion: 1.0\nSummary: Counts.\n")
    (about / "entry_points.txt").write_text("[gymsdk.environments]\ncounting = env_counting\n")


@contextmanager
def served(arguments: list[str], *, site: str = "") -> Iterator[dict[str, Any]]:
    """Run `gymsdk serve`, and yield its ready message."""
    command = [sys.executable, "-m", "gymsdk", "serve", *arguments, "--port", "0", "--json"]
    path = os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def draw_rows() -> list[dict[str, Any]]:
    """Return rows of the environment."""
    command = [sys.executable, "-m", "gymsdk", "tasks", "tool_call", "--limit", str(ROWS), "--split", "train"]
    lines = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()
    return [{key: value for key, value in json.loads(line).items() if not key.startswith("_ng_")} for line in lines]


def agent_url(ready: dict[str, Any]) -> str:
    """Return the URL of the agent."""
    return str(ready["servers"]["tool_call_simple_agent"]["url"])


def tree(pid: int) -> list[int]:
    """Return the process id and those of all its descendants."""
    children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [pid, *(each for child in children for each in tree(child))]


def cpu(pid: int) -> float:
    """Return the CPU time, user and system, that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


if __name__ == "__main__":
    main()
