"""A runner of servers of another program: an error of one server names that server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI

from gymsdk import GymsdkError
from gymsdk.cluster.reports import HEALTH_SECONDS, Load, Service
from gymsdk.config.model import Times
from gymsdk.deploy.child import HEAD_SERVER
from gymsdk.deploy.runner import HeadConnection, ServerRunner, ServerSpec
from gymsdk.edge.app import create_app as bare
from gymsdk.http import client
from gymsdk.observability.metrics import ServerMetrics

from .nodes import fetch_nodes, serve_head, wait_until

LAMP = Service(name="lamp", kind="resources_servers", implementation="lamp")


def build_runner(build_app: FastAPI) -> ServerRunner:
    return ServerRunner(
        [ServerSpec(LAMP, lambda _: build_app)],
        host="127.0.0.1",
        port=0,
        contexts={},
        extra_config={},
        times=Times(grace=0.1),
    )


async def stop(running: asyncio.Task[None]) -> None:
    running.cancel()
    await asyncio.wait({running})


async def test_an_app_that_fails_at_startup_is_named() -> None:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        raise RuntimeError("no oil")
        yield

    runner = build_runner(bare("lamp", "A lamp.", metrics=ServerMetrics("lamp"), lifespan=lifespan))
    running = asyncio.ensure_future(runner.run())
    with pytest.raises(GymsdkError, match="the server 'lamp' ended unexpectedly: the app failed at startup"):
        await runner.wait_until_up(running)


async def test_a_listening_server_that_is_not_ready_is_named() -> None:
    runner = build_runner(bare("lamp", "A lamp.", metrics=ServerMetrics("lamp"), ready=lambda: False))
    running = asyncio.ensure_future(runner.run())
    with pytest.raises(GymsdkError, match=r"the server 'lamp' at http://127\.0\.0\.1:\d+ does not answer"):
        await runner.wait_until_up(running)


@pytest.mark.slow
async def test_a_server_that_is_slow_to_start_is_waited_for() -> None:
    # This takes longer than the head waits for a server that was up before.
    runner = build_runner(
        bare("lamp", "A lamp.", metrics=ServerMetrics("lamp"), ready=lambda: time.sleep(HEALTH_SECONDS + 0.2) is None)
    )
    running = asyncio.ensure_future(runner.run())
    await runner.wait_until_up(running)
    assert runner.head_url
    await stop(running)


async def test_its_servers_are_registered_once_it_is_up() -> None:
    runner = build_runner(bare("lamp", "A lamp.", metrics=ServerMetrics("lamp")))
    running = asyncio.ensure_future(runner.run())
    await runner.wait_until_up(running)
    assert [(each.name, each.port > 0) for each in runner.services] == [("lamp", True)]
    await stop(running)
    assert running.cancelled()


def build_lamp_runner(**options) -> ServerRunner:
    part = ServerSpec(LAMP, lambda _: bare("lamp", "A lamp.", metrics=ServerMetrics("lamp")))
    return ServerRunner(
        [part], host="127.0.0.1", port=0, contexts={}, extra_config={}, times=Times(grace=0.1), **options
    )


async def test_a_joining_runner_is_registered_under_its_advertised_host() -> None:
    loads = {"lamp": Load(sessions=3)}
    async with serve_head() as head_url:
        runner = build_lamp_runner(connection=HeadConnection(head_url, advertise="lamp.example", loads=lambda: loads))
        running = asyncio.ensure_future(runner.run())
        await runner.wait_until_up(running)
        (known,) = (await fetch_nodes(head_url))["instances"]
        await stop(running)
        after = await fetch_nodes(head_url)
        await client.aclose()
    assert known["url"] == f"http://lamp.example:{runner.services[0].port}"
    assert known["load"]["sessions"] == 3
    assert (runner.head_url, after["instances"], after["lost"]) == (head_url, [], [])


async def test_the_servers_that_a_joining_runner_needs_are_expected_at_the_head() -> None:
    async with serve_head() as head_url:
        runner = build_lamp_runner(connection=HeadConnection(head_url, expected=["lamp", "bulb"]))
        running = asyncio.ensure_future(runner.run())
        await runner.wait_until_up(running)
        known = await fetch_nodes(head_url)
        await stop(running)
        await client.aclose()
    assert known["expected"] == ["lamp", "bulb"]


async def test_a_runner_that_cannot_join_reports_it_and_leaves_nothing_running() -> None:
    async with serve_head(LAMP.model_copy(update={"implementation": "candle"})) as head_url:
        runner = build_lamp_runner(connection=HeadConnection(head_url))
        running = asyncio.ensure_future(runner.run())
        with pytest.raises(GymsdkError, match="refuses this node: 'lamp' is resources_servers/candle"):
            await runner.wait_until_up(running)
        await client.aclose()
    assert running.done()


@pytest.mark.slow
async def test_a_head_that_was_blocked_waits_for_its_nodes_again() -> None:
    async def is_settled() -> bool:
        return (await fetch_nodes(runner.head_url))["settled"]

    runner = build_lamp_runner(connection=HeadConnection(lease=3.0))
    running = asyncio.ensure_future(runner.run())
    await runner.wait_until_up(running)
    await wait_until(is_settled, 60)
    time.sleep(2.0)  # noqa: ASYNC251  # blocks the loop on purpose
    assert not await is_settled()
    await stop(running)
    await client.aclose()


async def test_an_app_receives_the_address_of_the_head() -> None:
    received = {}

    def build_app(urls):
        received.update(urls)
        return bare("lamp", "A lamp.", metrics=ServerMetrics("lamp"))

    runner = ServerRunner(
        [ServerSpec(LAMP, build_app)], host="127.0.0.1", port=0, contexts={}, extra_config={}, times=Times(grace=0.1)
    )
    running = asyncio.ensure_future(runner.run())
    await runner.wait_until_up(running)
    assert received == {HEAD_SERVER: runner.head_url, "lamp": runner.services[0].url}
    await stop(running)
