"""The supervisor passes each connection to a worker, and none is lost with a worker that has ended."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from gymsdk.config.model import WorkerConfig
from gymsdk.deploy.distributor import READY, STATE, STOPPING, ConnectionDistributor, WorkerChannel, receive_connections
from gymsdk.deploy.runner import BackgroundTask


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as at:
        yield at


@pytest.fixture
def channels() -> Iterator[list[WorkerChannel]]:
    opened = [WorkerChannel.open(f"worker-{number}") for number in (1, 2)]
    yield opened
    for connection in opened:
        connection.close()


class Worker:
    """A worker in this process that writes its name to each connection, and then closes the connection."""

    def __init__(self, channel: WorkerChannel) -> None:
        self.name = channel.name
        config = WorkerConfig(number=1, count=2, channel=channel.theirs.fileno(), shared_file=0, ports={"math": 1})
        self._work = receive_connections(config, {"math": self._answer})
        self._task: BackgroundTask | None = None

    async def start(self) -> None:
        self._task = BackgroundTask(self.name, self._work)
        await self._task.wait_until_up(5)

    async def stop(self) -> None:
        if self._task is not None:
            await self._task.stop(5)

    def _answer(self, connection: socket.socket) -> None:
        connection.send(self.name.encode())
        connection.close()


@asynccontextmanager
async def distributing(
    listener: socket.socket, channels: list[WorkerChannel], pids: dict[str, int]
) -> AsyncIterator[ConnectionDistributor]:
    distributor = ConnectionDistributor({"math": listener}, channels, pids.get)
    distributor.start()
    yield distributor
    distributor.stop()


async def ask(listener: socket.socket) -> str:
    """Return the name of the worker that answers a new connection."""
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        async with asyncio.timeout(10):
            return (await reader.read()).decode()
    finally:
        writer.close()


async def test_idle_workers_receive_connections_in_turn(listener: socket.socket, channels: list[WorkerChannel]) -> None:
    workers = [Worker(channel) for channel in channels]
    async with distributing(listener, channels, {channel.name: os.getpid() for channel in channels}):
        for worker in workers:
            await worker.start()
        names = [await ask(listener) for _ in range(6)]
        for worker in workers:
            await worker.stop()
    assert sorted(names[:2]) == ["worker-1", "worker-2"]
    assert names == names[:2] * 3


async def test_connections_wait_until_a_worker_is_ready(listener: socket.socket, channels: list[WorkerChannel]) -> None:
    worker = Worker(channels[1])
    async with distributing(listener, channels, {channel.name: os.getpid() for channel in channels}):
        waiting = [asyncio.ensure_future(ask(listener)) for _ in range(5)]
        await asyncio.sleep(0.05)
        assert not any(request.done() for request in waiting)
        await worker.start()
        assert await asyncio.gather(*waiting) == ["worker-2"] * 5
        await worker.stop()


async def test_a_busy_worker_receives_nothing_while_another_is_idle(
    listener: socket.socket, channels: list[WorkerChannel]
) -> None:
    busy, idle = channels
    worker = Worker(idle)
    async with distributing(listener, channels, {channel.name: os.getpid() for channel in channels}):
        # The first worker says that it is ready, and then does not receive.
        _say_ready(busy)
        await worker.start()
        asking = [asyncio.ensure_future(ask(listener)) for _ in range(2)]
        while not busy.count_unreceived_bytes():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
        assert [await ask(listener) for _ in range(6)] == ["worker-2"] * 6
        await worker.stop()
        for request in asking:
            request.cancel()
        await asyncio.wait(asking)


@pytest.mark.parametrize("ends", ["ended", "stopping"])
async def test_connections_that_an_ended_or_stopping_worker_did_not_receive_go_to_another(
    listener: socket.socket, channels: list[WorkerChannel], ends: str
) -> None:
    first, other = channels
    pids = {channel.name: os.getpid() for channel in channels}
    worker = Worker(other)
    async with distributing(listener, channels, pids) as distributor:
        _say_ready(first)
        waiting = [asyncio.ensure_future(ask(listener)) for _ in range(5)]
        while not first.count_unreceived_bytes():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
        if ends == "ended":
            del pids[first.name]
            distributor.reclaim()
            await worker.start()
        else:
            await worker.start()
            first.theirs.send(STATE.pack(STOPPING, os.getpid()))
        assert await asyncio.gather(*waiting) == ["worker-2"] * 5
        await worker.stop()


def _say_ready(channel: WorkerChannel) -> None:
    channel.theirs.send(STATE.pack(READY, os.getpid()))
