"""A runner of servers and its background tasks: an error of one server names that server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI

from gymsdk import GymsdkError, UsageError
from gymsdk.cluster.reports import HEALTH_SECONDS, Load, Service
from gymsdk.config.model import Times
from gymsdk.deploy.child import HEAD_SERVER
from gymsdk.deploy.node import LoopMonitor
from gymsdk.deploy.runner import BackgroundTask, HeadConnection, ServerRunner, ServerSpec
from gymsdk.edge.app import create_app as bare
from gymsdk.http import client
from gymsdk.observability.metrics import ServerMetrics

from .nodes import fetch_nodes, serve_head

LAMP = Service(name="lamp", kind="resources_servers", implementation="lamp")


def build_lamp(**options) -> FastAPI:
    return bare("lamp", "A lamp.", metrics=ServerMetrics("lamp"), **options)


def build_runner(app: FastAPI | None = None, build_app: Any = None, **options: Any) -> ServerRunner:
    part = ServerSpec(LAMP, build_app or (lambda _: app or build_lamp()))
    limits = {"contexts": {}, "extra_config": {}, "times": Times(grace=0.1)}
    return ServerRunner([part], host="127.0.0.1", port=0, **limits, **options)


@asynccontextmanager
async def run(runner: ServerRunner) -> AsyncIterator[asyncio.Task[None]]:
    """Run *runner* and wait until it is up; stop it at the end."""
    running = asyncio.ensure_future(runner.run())
    try:
        await runner.wait_until_up(running)
        yield running
    finally:
        running.cancel()
        await asyncio.wait({running})
        await client.aclose()


async def test_an_app_that_fails_at_startup_or_is_not_ready_is_named():
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        raise RuntimeError("no oil")
        yield

    with pytest.raises(GymsdkError, match="the server 'lamp' ended unexpectedly: the app failed at startup"):
        async with run(build_runner(build_lamp(lifespan=lifespan))):
            pass
    with pytest.raises(GymsdkError, match=r"the server 'lamp' at http://127\.0\.0\.1:\d+ does not answer"):
        async with run(build_runner(build_lamp(ready=lambda: False))):
            pass


@pytest.mark.slow
async def test_a_server_that_is_slow_to_start_is_waited_for():
    # This takes longer than the head waits for a server that was up before.
    runner = build_runner(build_lamp(ready=lambda: time.sleep(HEALTH_SECONDS + 0.2) is None))
    async with run(runner):
        assert runner.head_url


async def test_its_servers_are_registered_once_it_is_up_and_an_app_receives_the_address_of_the_head():
    received = {}

    def build_app(urls):
        received.update(urls)
        return build_lamp()

    runner = build_runner(build_app=build_app)
    async with run(runner) as running:
        assert [(service.name, service.port > 0) for service in runner.services] == [("lamp", True)]
        assert received == {HEAD_SERVER: runner.head_url, "lamp": runner.services[0].url}
    assert running.cancelled()


async def test_a_joining_runner_is_registered_under_its_advertised_host():
    options = {"advertise": "lamp.example", "loads": lambda: {"lamp": Load(sessions=3)}, "expected": ["lamp", "bulb"]}
    async with serve_head() as head_url:
        runner = build_runner(connection=HeadConnection(head_url, **options))
        async with run(runner):
            nodes = await fetch_nodes(head_url)
            [known] = nodes["instances"]
        after = await fetch_nodes(head_url)
        await client.aclose()
    assert nodes["expected"] == ["lamp", "bulb"]
    assert known["url"] == f"http://lamp.example:{runner.services[0].port}"
    assert known["load"]["sessions"] == 3
    assert (runner.head_url, after["instances"], after["lost"]) == (head_url, [], [])


async def test_a_runner_that_cannot_join_reports_it_and_leaves_nothing_running():
    async with serve_head(LAMP.model_copy(update={"implementation": "candle"})) as head_url:
        runner = build_runner(connection=HeadConnection(head_url))
        running = asyncio.ensure_future(runner.run())
        with pytest.raises(GymsdkError, match="refuses this node: 'lamp' is resources_servers/candle"):
            await runner.wait_until_up(running)
        await client.aclose()
    assert running.done()


async def _run_until_stopped(up: asyncio.Event, over: asyncio.Event) -> None:
    up.set()
    await over.wait()


async def test_a_task_runs_until_it_is_stopped_and_one_that_ends_by_itself_is_reported():
    background_task = BackgroundTask("a pump", _run_until_stopped)
    await background_task.wait_until_up(5)
    assert not background_task.task.done()
    await background_task.stop(5)
    assert background_task.task.done()

    async def work(up: asyncio.Event, over: asyncio.Event) -> None:
        up.set()

    background_task = BackgroundTask("a pump", work)
    await background_task.task
    assert str(background_task.describe_failure()) == "a pump ended unexpectedly"


async def test_a_task_that_fails_at_startup_reports_why_once(caplog):
    async def fail(up: asyncio.Event, over: asyncio.Event) -> None:
        raise RuntimeError("no water")

    async def refuse(up: asyncio.Event, over: asyncio.Event) -> None:
        raise UsageError("open the tap")

    with pytest.raises(GymsdkError, match="a pump ended unexpectedly: no water"):
        await BackgroundTask("a pump", fail).wait_until_up(5)
    background_task, other = BackgroundTask("a pump", refuse), BackgroundTask("another", refuse)
    with pytest.raises(UsageError, match=r"^open the tap$"):
        await background_task.wait_until_up(5)
    await background_task.stop(5)
    await other.stop(5)
    assert caplog.messages == ["another ended with an error: UsageError('open the tap')"]


@pytest.mark.slow
async def test_a_task_that_does_not_end_is_named_and_abandoned(caplog):
    freed = asyncio.Event()

    async def work(up: asyncio.Event, over: asyncio.Event) -> None:
        up.set()
        while not freed.is_set():
            try:
                await freed.wait()
            except asyncio.CancelledError:
                continue

    background_task = BackgroundTask("a pump", work)
    await background_task.wait_until_up(5)
    await background_task.stop(0.05)
    assert "a pump did not end within 0.05 seconds; it is left behind" in caplog.text
    assert not background_task.task.done()
    freed.set()
    await background_task.task


async def test_a_heartbeat_is_recent_until_the_event_loop_is_blocked():
    pulse = LoopMonitor(limit=0.2)
    background_task = BackgroundTask("the pulse", pulse.run)
    await background_task.wait_until_up(5)
    assert pulse.is_recent()
    time.sleep(0.3)  # noqa: ASYNC251 - it blocks the event loop on purpose
    assert not pulse.is_recent()
    await background_task.stop(5)
