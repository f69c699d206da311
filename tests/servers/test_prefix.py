"""A path prefix: servers answer behind a reverse proxy, whether it strips the prefix or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from gymsdk import UsageError
from gymsdk.config.model import Deployment
from gymsdk.deploy.process import RunningServers, serve
from gymsdk.edge.addresses import bind_socket, socket_port
from gymsdk.edge.listener import Listener
from gymsdk.edge.request import Receive, Scope, Send, get_state, json_response
from gymsdk.http import client as http


@pytest.fixture
async def running() -> AsyncIterator[RunningServers]:
    async with serve(["tool_call"], deployment=Deployment(root_path="/gym/")) as running:
        yield running
    await http.aclose()


@pytest.mark.parametrize("path", ["/readyz", "/gym/readyz", "/gym"])
async def test_the_head_is_at_the_prefix_itself(running: RunningServers, path: str) -> None:
    async with httpx.AsyncClient() as client:
        assert (await client.get(running.head_url + path)).status_code == 200


@pytest.mark.parametrize("path", ["/readyz", "/gym/tool_call/readyz", "/gym/tool_call/ng-rollout/a/readyz"])
async def test_every_other_server_is_below_the_prefix_by_its_name(running: RunningServers, path: str) -> None:
    async with httpx.AsyncClient() as client:
        assert (await client.get(running.urls["tool_call"] + path)).status_code == 200
        assert (await client.get(f"{running.urls['tool_call']}/gym/tool_calls/readyz")).status_code == 404


async def test_its_api_documentation_finds_its_schema_there(running: RunningServers) -> None:
    async with httpx.AsyncClient() as client:
        page = await client.get(f"{running.urls['tool_call']}/gym/tool_call/docs")
        assert "'/gym/tool_call/openapi.json'" in page.text
        schema = (await client.get(f"{running.urls['tool_call']}/openapi.json")).json()
        assert schema["servers"] == [{"url": "/gym/tool_call"}]


@pytest.mark.parametrize("path", ["", "/gym"])
async def test_a_body_that_has_arrived_is_taken_from_the_connection_at_once(path: str) -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        state = get_state(scope)
        body = state.connection.take_body(state) if state.connection else None
        await json_response({"body": body and body.decode()})(scope, receive, send)

    bound, up, over = bind_socket("127.0.0.1"), asyncio.Event(), asyncio.Event()
    listener = Listener(answer, bound, grace=1, path=path)
    async with asyncio.TaskGroup() as group, httpx.AsyncClient() as client:
        group.create_task(listener.run(up, over))
        await up.wait()
        url = f"http://127.0.0.1:{socket_port(bound)}{path}/verify"
        assert (await client.post(url, content=b"[1]")).json() == {"body": "[1]"}
        over.set()


@pytest.mark.parametrize("given", ["gym", "/a b", "/a/../b", "/a//b", "http://h/gym"])
def test_an_invalid_prefix_is_rejected(given: str) -> None:
    with pytest.raises(UsageError, match="expected the path at which a proxy publishes the servers"):
        Deployment(root_path=given)
