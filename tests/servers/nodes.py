"""Several nodes on one machine: heads and servers on loopback addresses, a load balancer before them, processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx

from gymsdk import Environment
from gymsdk.deploy.background_task import BackgroundTask
from gymsdk.deploy.node import Node, compute_loads
from gymsdk.http import client
from gymsdk.observability.metrics import ServerMetrics, parse_samples
from gymsdk.servers import head, resources
from gymsdk.servers.forwarding import Peers
from gymsdk.servers.instances import InstanceDirectory, nodes_fetcher
from gymsdk.servers.listener import Listener, bind_socket
from gymsdk.servers.registry import NodeRegistry
from gymsdk.servers.reports import LEASE_SECONDS
from gymsdk.servers.routing import App
from gymsdk.servers.service import Service

LOOK = 0.05
SCRIPT = """
import asyncio, sys
from gymsdk import load
from tests.servers.nodes import Instance

async def main(name, head_url, lease):
    async with Instance(load(name), head_url, lease=float(lease)).there() as one:
        print(one.url, flush=True)
        await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


@asynccontextmanager
async def listening(app: App, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[int]:
    """The port at which *app* is served on *host*."""
    at = bind_socket(host, port)
    strand = BackgroundTask("a server", Listener(app, at, grace=0.1, host=host).run)
    await strand.wait_until_up(20)
    try:
        yield at.getsockname()[1]
    finally:
        await strand.stop(5)


@asynccontextmanager
async def heading(
    *services: Service, host: str = "127.0.0.1", port: int = 0, lease: float = LEASE_SECONDS
) -> AsyncIterator[str]:
    """The address of a head."""
    app = head.create_app(services, host=host, port=port, registry=NodeRegistry(services, lease=lease))
    async with listening(app, host, port) as at:
        yield f"http://{host}:{at}"


@asynccontextmanager
async def noded(node: Node) -> AsyncIterator[Node]:
    """A node that is known for as long as it runs."""
    strand = BackgroundTask(node.description, node.run)
    await strand.wait_until_up(10)
    try:
        yield node
    finally:
        await strand.stop(5)


@dataclass
class Instance:
    """A resources server of *environment*, known to the head; `cut` ends it without a word, as a lost machine ends."""

    environment: Environment
    head_url: str
    host: str = "127.0.0.1"
    lease: float = LEASE_SECONDS
    options: dict[str, Any] = field(default_factory=dict)
    url: str = ""
    id: str = ""
    node: Node = field(init=False)
    figures: ServerMetrics = field(default_factory=lambda: ServerMetrics("one"))
    server: AsyncExitStack = field(default_factory=AsyncExitStack)

    @asynccontextmanager
    async def there(self) -> AsyncIterator[Instance]:
        name = self.environment.name
        service = Service(name=name, kind="resources_servers", implementation=name, host=self.host)
        self.id = service.id
        url = partial(
            InstanceDirectory(nodes_fetcher(self.head_url), max_age=LOOK).find_url, name=name, kind="resources_servers"
        )
        peers = Peers(self.id, url)
        app = resources.create_app(self.environment, metrics=self.figures, peers=peers, **self.options)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.server)
            port = await self.server.enter_async_context(listening(app, self.host))
            placed = service.model_copy(update={"port": port})
            self.url = placed.url
            self.node = Node(self.head_url, [placed], lambda: compute_loads({name: self.figures}), lease=self.lease)
            await stack.enter_async_context(noded(self.node))
            yield self

    async def cut(self) -> None:
        """Stop answering without leaving the head."""
        await self.server.aclose()

    @property
    def sessions(self) -> int:
        return self.figures.sum_gauges("sessions_open")


def metric(text: str, name: str, **labels: str) -> float | None:
    """The sum of the samples of a metric that have these labels, or `None` if there are none."""
    found = [value for each, of, value in parse_samples(text) if each == name and labels.items() <= of.items()]
    return sum(found) if found else None


@asynccontextmanager
async def balancing(urls: Sequence[str]) -> AsyncIterator[str]:
    """The address of a balancer that gives each connection to the next of *urls* that takes it."""
    turn = itertools.cycle(urls)

    async def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in urls:
            place = httpx.URL(next(turn))
            try:
                there = await asyncio.open_connection(place.host, place.port)
            except OSError:
                continue
            with contextlib.suppress(ConnectionError):
                await asyncio.gather(_copied(reader, there[1]), _copied(there[0], writer))
            break
        writer.close()

    async with await asyncio.start_server(taken, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


@asynccontextmanager
async def process(name: str, head_url: str, *, lease: float) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A separate process that serves the environment *name*, and its URL."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SCRIPT, name, head_url, str(lease), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert started.stdout is not None
        yield started, (await started.stdout.readline()).decode().strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(started.pid, signal.SIGKILL)
        await started.communicate()


async def told(head_url: str) -> dict[str, Any]:
    """Return the head's snapshot of its nodes."""
    answer: dict[str, Any] = (await client.get(f"{head_url}/nodes")).json()
    return answer


async def until(true: Callable[[], Any], seconds: float = 15.0) -> None:
    """Wait until something is *true*."""
    async with asyncio.timeout(seconds):
        while not (await found if asyncio.iscoroutine(found := true()) else found):  # noqa: ASYNC110  # of anything
            await asyncio.sleep(0.02)


def free(host: str = "127.0.0.1") -> int:
    """A port without a listener."""
    with socket.create_server((host, 0)) as one:
        port: int = one.getsockname()[1]
        return port
