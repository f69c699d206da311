"""`gymsdk restart` of a server with instances on several nodes: they restart one after another."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from gymsdk.deploy.node import Node
from gymsdk.http import client
from gymsdk.servers import head
from gymsdk.servers.service import Service
from tests.servers.nodes import heading, listening, noded, told


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    yield
    await client.aclose()


@dataclass
class Supervised:
    """A supervised server at *port*, as the head at *head_url* hears of it: each life has the next number."""

    head_url: str
    name: str
    port: int
    seen: list[int] = field(default_factory=list)
    pid: int = 7

    @asynccontextmanager
    async def there(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            self.stack = stack
            await self._begin()
            tells = Node(
                self.head_url, restart=self._restart, restarts=lambda: {"lamp": self.pid}, supervisor=self.name
            )
            await stack.enter_async_context(noded(tells))
            yield

    async def _begin(self) -> None:
        lamp = Service(name="lamp", kind="resources_servers", implementation="lamp", port=self.port, pid=self.pid)
        self.node = Node(self.head_url, [lamp], supervisor=self.name)
        await self.stack.enter_async_context(noded(self.node))

    def _restart(self, _: str) -> None:
        self.pid += 1
        self.again = asyncio.ensure_future(self._another())

    async def _another(self) -> None:
        self.seen.append(len((await told(self.head_url))["instances"]))
        await self.node.leave()
        await self._begin()


async def test_instances_with_equal_process_ids_restart_one_by_one() -> None:
    async with (
        heading() as head_url,
        listening(head.create_app((), host="127.0.0.1", port=0)) as port,
        AsyncExitStack() as stack,
    ):
        several = [Supervised(head_url, name, port) for name in ("s", "t")]
        for each in several:
            await stack.enter_async_context(each.there())
        command = [sys.executable, "-m", "gymsdk", "restart", "lamp", "--head", head_url]
        running = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=os.environ)
        said, _ = await running.communicate()
        there = [each["pid"] for each in (await told(head_url))["instances"]]
    assert (running.returncode, b"lamp restarted; " in said) == (0, True)
    assert (there, [each.seen for each in several]) == ([8, 8], [[2], [2]])
