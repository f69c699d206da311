"""The running servers that a benchmark measures: those of a head, or servers that the benchmark starts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from gymsdk.bench.processes import MemoryMeasure, choose_memory_measure, is_running, measure_process
from gymsdk.bench.readings import LOCAL_HOSTS
from gymsdk.cluster.reports import Instance
from gymsdk.cluster.status import fetch_nodes
from gymsdk.errors import Failed, GymsdkError, UsageError
from gymsdk.interpreter import build_module_command
from gymsdk.rollouts.remote import HeadServers, fetch_servers

READY_SECONDS = 120.0
"""Seconds a child process may take until it is ready."""

STOP_SECONDS = 20.0
"""Seconds a child process may take to stop."""


SERVERS, POLICY, LOAD = "servers", "policy endpoint", "load generator"
"""Labels of the processes: the servers, the model endpoint, and the benchmark itself."""


@dataclass(frozen=True, slots=True)
class StartCost:
    """The cost of starting the servers: seconds until all answer, seconds of CPU, and megabytes of memory."""

    seconds: float
    cpu: float
    memory: float


@dataclass(frozen=True)
class Stage:
    """Running servers with their head.

    Attributes:
        served: The client of the servers.
        model: The model that plays.
        pids: The processes on this machine, by label.
        metered: The URLs of the servers that have `/metrics`.
        start: The cost of starting the servers, if the benchmark started them.
    """

    served: HeadServers
    model: str
    pids: Mapping[str, int]
    metered: tuple[str, ...]
    start: StartCost | None = None

    @cached_property
    def memory_measure(self) -> MemoryMeasure:
        """How the memory of all processes is measured."""
        return choose_memory_measure(self.pids.values())


@asynccontextmanager
async def start_servers(
    names: Sequence[str], *, model: str, endpoint: ChildProcess | None = None, site: Path | None = None
) -> AsyncIterator[Stage]:
    """Start the servers of environments and stop them with the context.

    Args:
        names: The environments and their settings, as words of the command.
        model: The model that plays.
        endpoint: The model's endpoint, or `None` if the servers play the model themselves.
        site: A folder of further installed packages for the servers.
    """
    model_options = ["--base-url", endpoint.ready_message["url"], "--api", "chat"] if endpoint else []
    words = ["serve", *names, "--port", "0", "--json", "--model", model, *model_options]
    began = time.perf_counter()
    async with start_child(words, site=site) as servers:
        seconds = time.perf_counter() - began
        # Before the first request, which imports further modules.
        used = measure_process(servers.pid, choose_memory_measure([servers.pid]))
        pids = {SERVERS: servers.pid} | ({POLICY: endpoint.pid} if endpoint else {})
        urls = [server["url"] for server in servers.ready_message["servers"].values()]
        metered = [*urls, *([endpoint.ready_message["url"].removesuffix("/v1")] if endpoint else [])]
        start = StartCost(seconds, used.cpu, used.memory + used.children_memory)
        yield Stage(await fetch_servers(servers.ready_message["head"]), model, pids, tuple(metered), start)


async def join_servers(head: str) -> Stage:
    """Return the running servers of *head*. Raises `UsageError` if it is not a head."""
    servers = await fetch_servers(head)
    model = str((await servers.client.config()).get("policy_model_name", ""))
    return Stage(servers, model, await _find_pids(servers), tuple((await servers.client.servers()).values()))


async def _find_pids(servers: HeadServers) -> dict[str, int]:
    """Return the processes of a head's servers by label, without processes of other machines."""
    try:
        nodes = await fetch_nodes(servers.client.head, servers.client.headers)
    except Failed as error:
        if error.retryable:
            raise
        # This head does not list its servers, so they are measured without their CPU time and memory.
        return {}
    return label_processes(instance for instance in nodes.instances if _is_local(instance))


def label_processes(instances: Iterable[Instance]) -> dict[str, int]:
    """Return the processes that run *instances*, by label.

    A single process is labelled as the servers. Of several, each has the name under which its supervisor knows it, as
    `worker-1`, or else the name of one of its servers. A name that several processes have is followed by the process
    ID.
    """
    names: dict[int, str] = {}
    # Shorter names first: worker-2 precedes worker-10, and servers without a supervisor keep their order.
    for instance in sorted(instances, key=lambda instance: (len(instance.process), instance.process)):
        names.setdefault(instance.pid, instance.process or instance.name)
    if len(names) == 1:
        return {SERVERS: next(iter(names))}
    counts = Counter(names.values())
    return {name if counts[name] == 1 else f"{name} (process {pid})": pid for pid, name in names.items()}


def _is_local(instance: Instance) -> bool:
    return urlsplit(instance.url).hostname in LOCAL_HOSTS and instance.pid > 0 and is_running(instance.pid)


@dataclass(frozen=True, slots=True)
class ChildProcess:
    """A child process of the benchmark, and the JSON line that it printed when it was ready."""

    pid: int
    ready_message: Mapping[str, Any]


@asynccontextmanager
async def start_policy(recording: Path) -> AsyncIterator[ChildProcess]:
    """Start an endpoint that replays *recording*."""
    async with start_child(["policy", f"scripted/replay:{recording}"]) as running:
        yield running


@asynccontextmanager
async def start_child(words: Sequence[str], *, site: Path | None = None) -> AsyncIterator[ChildProcess]:
    """Start a child process and yield it once it is ready. It ends with the context, or with this process.

    Args:
        words: The arguments of the child.
        site: A folder of further installed packages for the child.

    Raises:
        UsageError: The child rejected its arguments.
        GymsdkError: The child ended, or did not become ready in time.
    """
    process = await asyncio.create_subprocess_exec(
        *build_module_command("gymsdk.bench.child", *words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=None if site is None else {**os.environ, "PYTHONPATH": _add_to_path(site)},
        # Ctrl-C must reach the benchmark only, which stops its children in order.
        start_new_session=True,
    )
    try:
        ready_message, stderr_task = await _read_ready_line(process)
        try:
            yield ChildProcess(process.pid, ready_message)
        finally:
            stderr_task.cancel()
            await asyncio.wait({stderr_task})
    finally:
        await _stop_process(process)


def _add_to_path(site: Path) -> str:
    return os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))


async def _read_ready_line(process: asyncio.subprocess.Process) -> tuple[Mapping[str, Any], asyncio.Task[None]]:
    """Read the JSON line of a ready child, and start a task that forwards its standard error from then on."""
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(READY_SECONDS):
            line = await process.stdout.readline()
    except TimeoutError:
        raise GymsdkError(
            f"the servers were not ready within {READY_SECONDS:g} s; try again when the machine is less busy"
        ) from None
    if not line:
        message = (await process.stderr.read()).decode(errors="replace").strip().removeprefix("Error: ")
        # The command line exits with 2 for wrong input.
        kind = UsageError if await process.wait() == 2 else GymsdkError  # noqa: PLR2004
        raise kind(message or "the servers exited without a message")
    return orjson.loads(line), asyncio.ensure_future(_forward_stderr(process.stderr))


async def _forward_stderr(stderr: asyncio.StreamReader) -> None:
    """Forward the standard error of a child. An unread pipe would block the child."""
    while chunk := await stderr.read(65536):
        sys.stderr.write(chunk.decode(errors="replace"))


async def _stop_process(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    # The child ends with its standard input.
    process.stdin.close()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.communicate()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
