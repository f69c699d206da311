"""A path prefix: servers answer behind a reverse proxy, whether it strips the prefix or not."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from gymsdk import UsageError
from gymsdk.config.model import Deployment
from gymsdk.deploy.process import serve
from gymsdk.edge.addresses import bind_socket, socket_port
from gymsdk.edge.listener import Listener
from gymsdk.edge.request import Receive, Scope, Send, get_state, json_response
from gymsdk.http import client as http


@pytest.fixture
async def running():
    async with serve(["tool_call"], deployment=Deployment(root_path="/gym/")) as running:
        yield running
    await http.aclose()


async def test_the_head_is_at_the_prefix_and_every_other_server_below_it_by_its_name(running):
    url = running.urls["tool_call"]
    async with httpx.AsyncClient() as client:
        for path in ("/readyz", "/gym/readyz", "/gym"):
            assert (await client.get(running.head_url + path)).status_code == 200, path
        for path in ("/readyz", "/gym/tool_call/readyz", "/gym/tool_call/ng-rollout/a/readyz"):
            assert (await client.get(url + path)).status_code == 200, path
        assert (await client.get(f"{url}/gym/tool_calls/readyz")).status_code == 404
        page = await client.get(f"{url}/gym/tool_call/docs")
        assert "'/gym/tool_call/openapi.json'" in page.text
        assert (await client.get(f"{url}/openapi.json")).json()["servers"] == [{"url": "/gym/tool_call"}]


@pytest.mark.parametrize("path", ["", "/gym"])
async def test_a_body_that_has_arrived_is_taken_from_the_connection_at_once(path):
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
def test_an_invalid_prefix_is_rejected(given):
    with pytest.raises(UsageError, match="expected the path at which a proxy publishes the servers"):
        Deployment(root_path=given)
