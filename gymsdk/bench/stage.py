"""A stage: running servers that a bench asks, those of a head or some of its own, and the processes they are."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gymsdk import http
from gymsdk.bench import processes
from gymsdk.errors import GymsdkError, UsageError
from gymsdk.rollouts.served import Served, served

READY = 120.0
"""Seconds a child may take until it is ready."""

ENDING = 20.0
"""Seconds a child may take to end."""

SERVERS, POLICY, LOAD = "servers", "policy endpoint", "load generator"
"""What processes are called: the servers, the model they ask, and the bench itself."""


@dataclass(frozen=True, slots=True)
class Start:
    """What the start of the servers took: seconds until all answered, seconds of CPU, megabytes they then had."""

    seconds: float
    cpu: float
    memory: float


@dataclass(frozen=True, slots=True)
class Stage:
    """Servers by way of their head, the *model* they play with, their processes by name, what has `/metrics`.

    Processes of other machines are not among those.
    """

    served: Served
    model: str
    pids: Mapping[str, int]
    metered: tuple[str, ...]
    start: Start | None = None


@asynccontextmanager
async def started(names: Sequence[str], *, model: str, endpoint: Child | None = None) -> AsyncIterator[Stage]:
    """Give the servers of the environments *names* (and settings, as words of the command), played by *model*.

    It is asked at the *endpoint*, where there is one. They end with the context.
    """
    reached = ["--base-url", endpoint.ready_message["url"], "--api", "chat"] if endpoint else []
    words = ["serve", *names, "--port", "0", "--json", "--model", model, *reached]
    began = time.perf_counter()
    async with child(words) as servers:
        seconds, used = time.perf_counter() - began, processes.used(servers.pid)
        pids = {SERVERS: servers.pid} | ({POLICY: endpoint.pid} if endpoint else {})
        urls = [each["url"] for each in servers.ready_message["servers"].values()]
        metered = [*urls, *([endpoint.ready_message["url"].removesuffix("/v1")] if endpoint else [])]
        start = Start(seconds, used.cpu, used.memory + used.workers_memory)
        yield Stage(await served(servers.ready_message["head"]), model, pids, tuple(metered), start)


async def joined(head: str) -> Stage:
    """Give the servers that run by the *head* at a URL; raises `UsageError` where it is none."""
    known = await served(head)
    model = str((await known.client.config()).get("policy_model_name", ""))
    return Stage(known, model, await _pids(known), tuple((await known.client.servers()).values()))


async def _pids(known: Served) -> dict[str, int]:
    """Give the processes of a head's servers, one name for each; none where they are another machine's."""
    client = known.client
    url = f"{client.head}/server_instances"
    answer = await http.get(url, headers=client.build_headers_for(url), timeout=30.0)
    told = answer.json() if answer.ok else []
    found = {each["pid"]: str(each.get("process_name")) for each in told if _is_here(each)}
    return {SERVERS: next(iter(found))} if len(found) == 1 else {name: pid for pid, name in found.items()}


def _is_here(told: object) -> bool:
    if not isinstance(told, dict) or told.get("host") not in {"127.0.0.1", "localhost", "::1"}:
        return False
    return isinstance(told.get("pid"), int) and processes.is_here(told["pid"])


@dataclass(frozen=True, slots=True)
class Child:
    """A process of the bench's own and what it *told* once it was ready."""

    pid: int
    ready_message: Mapping[str, Any]


@asynccontextmanager
async def policy(recording: Path) -> AsyncIterator[Child]:
    """Give the endpoint of a policy that plays what is recorded."""
    async with child(["policy", f"scripted/replay:{recording}"]) as running:
        yield running


@asynccontextmanager
async def child(words: Sequence[str]) -> AsyncIterator[Child]:
    """Give a child, once it has told its line of JSON; it ends with the context, or with this process.

    Raises `UsageError`, or `GymsdkError`, with its words where it ends before it is ready.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gymsdk.bench.child", *words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # Ctrl-C is for the bench alone, which ends its children in order.
        start_new_session=True,
    )
    try:
        told, complaints = await _told(process)
        try:
            yield Child(process.pid, told)
        finally:
            complaints.cancel()
            await asyncio.wait({complaints})
    finally:
        await _ended(process)


async def _told(process: asyncio.subprocess.Process) -> tuple[Mapping[str, Any], asyncio.Task[None]]:
    """Give the line of a child that is ready, and the task that reads what it complains of from then on."""
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(READY):
            line = await process.stdout.readline()
    except TimeoutError:
        raise GymsdkError(f"the servers were not ready within {READY:g} s; try again on a quieter machine") from None
    if not line:
        said = (await process.stderr.read()).decode(errors="replace").strip().removeprefix("Error: ")
        raise (UsageError if await process.wait() == 2 else GymsdkError)(said or "the servers ended at once")  # noqa: PLR2004  # what the command line gives wrong input
    return orjson.loads(line), asyncio.ensure_future(_shown(process.stderr))


async def _shown(complaints: asyncio.StreamReader) -> None:
    """Pass on what a child says on its standard error: a pipe that nobody reads would stop it."""
    while said := await complaints.read(65536):
        sys.stderr.write(said.decode(errors="replace"))


async def _ended(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    # The child ends with its standard input.
    process.stdin.close()
    try:
        async with asyncio.timeout(ENDING):
            await process.communicate()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
