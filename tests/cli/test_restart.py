"""`gymsdk restart` of a server with instances on several nodes: they restart one after another."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from gymsdk.cluster.reports import Service
from gymsdk.deploy.node import NodeClient
from gymsdk.http import client
from gymsdk.servers import head
from tests.servers.nodes import fetch_nodes, run_node, serve_app, serve_head


@pytest.fixture(autouse=True)
async def close_client() -> AsyncIterator[None]:
    yield
    await client.aclose()


@dataclass
class SupervisedServer:
    """A supervised server at *port*, registered at the head at *head_url*; each restart gets the next process id."""

    head_url: str
    name: str
    port: int
    instances_at_restart: list[int] = field(default_factory=list)
    pid: int = 7

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            self.stack = stack
            await self._register()
            node = NodeClient(
                self.head_url, restart=self._restart, restarts=lambda: {"lamp": self.pid}, supervisor=self.name
            )
            await stack.enter_async_context(run_node(node))
            yield

    async def _register(self) -> None:
        lamp = Service(name="lamp", kind="resources_servers", implementation="lamp", port=self.port, pid=self.pid)
        self.node = NodeClient(self.head_url, [lamp], supervisor=self.name)
        await self.stack.enter_async_context(run_node(self.node))

    def _restart(self, _: str) -> None:
        self.pid += 1
        self.replacement = asyncio.ensure_future(self._replace())

    async def _replace(self) -> None:
        self.instances_at_restart.append(len((await fetch_nodes(self.head_url))["instances"]))
        await self.node.leave()
        await self._register()


@pytest.mark.slow
async def test_instances_with_equal_process_ids_restart_one_by_one() -> None:
    async with (
        serve_head() as head_url,
        serve_app(head.create_app((), host="127.0.0.1", port=0)) as port,
        AsyncExitStack() as stack,
    ):
        supervised = [SupervisedServer(head_url, name, port) for name in ("s", "t")]
        for server in supervised:
            await stack.enter_async_context(server.run())
        command = [sys.executable, "-m", "gymsdk", "restart", "lamp", "--head", head_url]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=os.environ)
        output, _ = await process.communicate()
        pids = [instance["pid"] for instance in (await fetch_nodes(head_url))["instances"]]
    assert (process.returncode, b"lamp restarted; " in output) == (0, True)
    assert (pids, [server.instances_at_restart for server in supervised]) == ([8, 8], [[2], [2]])
