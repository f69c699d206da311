"""A group of servers that are not gymsdk's: an error of one server names that server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI

from gymsdk import GymsdkError
from gymsdk.deploy.runner import HEAD, HeadConnection, ServerRunner, ServerSpec, Times
from gymsdk.http import client
from gymsdk.observability.health import HEALTH_SECONDS
from gymsdk.observability.metrics import ServerMetrics
from gymsdk.servers.app import create_app as bare
from gymsdk.servers.reports import Load
from gymsdk.servers.service import Service

from .nodes import heading, told, until

LAMP = Service(name="lamp", kind="resources_servers", implementation="lamp")


def fleet(app: FastAPI) -> ServerRunner:
    return ServerRunner(
        [ServerSpec(LAMP, lambda _: app)],
        host="127.0.0.1",
        port=0,
        contexts={},
        extra_config={},
        times=Times(grace=0.1),
    )


async def ended(running: asyncio.Task[None]) -> None:
    running.cancel()
    await asyncio.wait({running})


async def test_an_app_that_fails_at_startup_is_named() -> None:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        raise RuntimeError("no oil")
        yield

    made = fleet(bare("lamp", "A lamp.", metrics=ServerMetrics("lamp"), lifespan=lifespan))
    running = asyncio.ensure_future(made.run())
    with pytest.raises(GymsdkError, match="the server 'lamp' ended unexpectedly: the app failed at startup"):
        await made.wait_until_up(running)


async def test_a_listening_server_that_is_not_ready_is_named() -> None:
    made = fleet(bare("lamp", "A lamp.", metrics=ServerMetrics("lamp"), ready=lambda: False))
    running = asyncio.ensure_future(made.run())
    with pytest.raises(GymsdkError, match=r"the server 'lamp' at http://127\.0\.0\.1:\d+ does not answer"):
        await made.wait_until_up(running)


async def test_a_server_that_is_slow_to_start_is_waited_for() -> None:
    # Longer than the head waits for a server that has been up.
    made = fleet(
        bare("lamp", "A lamp.", metrics=ServerMetrics("lamp"), ready=lambda: time.sleep(HEALTH_SECONDS + 0.2) is None)
    )
    running = asyncio.ensure_future(made.run())
    await made.wait_until_up(running)
    assert made.head_url
    await ended(running)


async def test_its_servers_are_registered_once_it_is_up() -> None:
    made = fleet(bare("lamp", "A lamp.", metrics=ServerMetrics("lamp")))
    running = asyncio.ensure_future(made.run())
    await made.wait_until_up(running)
    assert [(each.name, each.port > 0) for each in made.services] == [("lamp", True)]
    await ended(running)
    assert running.cancelled()


def lamp(**options) -> ServerRunner:
    part = ServerSpec(LAMP, lambda _: bare("lamp", "A lamp.", metrics=ServerMetrics("lamp")))
    return ServerRunner(
        [part], host="127.0.0.1", port=0, contexts={}, extra_config={}, times=Times(grace=0.1), **options
    )


async def test_a_joining_fleet_is_registered_under_its_advertised_host() -> None:
    loads = {"lamp": Load(sessions=3)}
    async with heading() as head_url:
        joining = lamp(connection=HeadConnection(head_url, advertise="127.0.0.9", loads=lambda: loads))
        running = asyncio.ensure_future(joining.run())
        await joining.wait_until_up(running)
        (known,) = (await told(head_url))["instances"]
        await ended(running)
        after = await told(head_url)
        await client.aclose()
    assert known["url"] == f"http://127.0.0.9:{joining.services[0].port}"
    assert known["load"]["sessions"] == 3
    assert (joining.head_url, after["instances"], after["lost"]) == (head_url, [], [])


async def test_the_servers_that_a_joining_fleet_needs_are_expected_at_the_head() -> None:
    async with heading() as head_url:
        joining = lamp(connection=HeadConnection(head_url, expected=["lamp", "bulb"]))
        running = asyncio.ensure_future(joining.run())
        await joining.wait_until_up(running)
        known = await told(head_url)
        await ended(running)
        await client.aclose()
    assert known["expected"] == ["lamp", "bulb"]


async def test_a_fleet_that_cannot_join_reports_it_and_leaves_nothing_running() -> None:
    async with heading(LAMP.model_copy(update={"implementation": "candle"})) as head_url:
        joining = lamp(connection=HeadConnection(head_url))
        running = asyncio.ensure_future(joining.run())
        with pytest.raises(GymsdkError, match="refuses this node: 'lamp' is resources_servers/candle"):
            await joining.wait_until_up(running)
        await client.aclose()
    assert running.done()


async def test_a_head_that_was_blocked_waits_for_its_nodes_again() -> None:
    async def settled() -> bool:
        return (await told(made.head_url))["settled"]

    made = lamp(connection=HeadConnection(lease=3.0))
    running = asyncio.ensure_future(made.run())
    await made.wait_until_up(running)
    await until(settled, 60)
    time.sleep(2.0)  # noqa: ASYNC251  # as who holds the loop does
    assert not await settled()
    await ended(running)
    await client.aclose()


async def test_an_app_receives_the_address_of_the_head() -> None:
    seen = {}

    def app(urls):
        seen.update(urls)
        return bare("lamp", "A lamp.", metrics=ServerMetrics("lamp"))

    made = ServerRunner(
        [ServerSpec(LAMP, app)], host="127.0.0.1", port=0, contexts={}, extra_config={}, times=Times(grace=0.1)
    )
    running = asyncio.ensure_future(made.run())
    await made.wait_until_up(running)
    assert seen == {HEAD: made.head_url, "lamp": made.services[0].url}
    await ended(running)
