"""The client of a whole deployment: servers by name, through a head."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
import pytest
from aiohttp import web

from gymsdk import Failed, ServerClient, Task, responses
from gymsdk.client import UnknownServer
from gymsdk.deploy.node import NodeClient
from gymsdk.http import client as http
from gymsdk.http.client import Retry
from gymsdk.servers import resources

from .app_helpers import serve_app, serve_handler
from .nodes import metric, run_node, serve_head, wait_until
from .registrations import LAMP

ROW = Task.ask("add", initial_count=3, expected_count=3).row()
RESPONSE = responses.build_response([responses.build_message("done")], model="m")
QUICK = Retry(times=1, first=0.001)


@asynccontextmanager
async def head(text: str | list[str], nodes: int = 404) -> AsyncIterator[str]:
    """Serve a head with the configuration *text*, or several in turn, and a status for `/nodes`; yield its URL."""

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/nodes":
            return web.json_response({"detail": "ask again"}, status=nodes)
        return web.Response(text=text if isinstance(text, str) else text[-1], content_type="application/json")

    async with serve_handler(answer) as url:
        yield url


def config(url: str, *, host: str | None = None) -> str:
    own_host, port = url.removeprefix("http://").split(":")
    return f"""
head_server: {{host: 127.0.0.1, port: 11000}}
policy_model_name: null
my_resources:
  resources_servers:
    counter: {{entrypoint: app.py, host: {host or own_host}, port: {port}}}
my_agent:
  responses_api_agents:
    simple_agent: {{entrypoint: app.py, host: {own_host}, port: 9}}
"""


@pytest.mark.parametrize("host", [None, "0.0.0.0"])  # the hosts that a server may announce
@pytest.mark.parametrize("quoted", [True, False])
async def test_a_server_is_called_by_its_name_and_cookies_identify_a_session(counter, host, quoted):
    async with serve_app(resources.create_app(counter())) as url:
        text = config(url, host=host)
        async with head(orjson.dumps(text).decode() if quoted else text) as address:
            # A server of another program calls another one by its name.
            client, body = ServerClient.load_from_global_config(address), ROW | {"response": RESPONSE}
            judged = await client.post(server_name="my_resources", url_path="/verify", json=body)
            assert (await client.get("my_resources", "/reverify_mode")).json() == "stateless"
            seeded = await client.post("my_resources", "/seed_session", json=ROW)
            called = await client.post("my_resources", "/spell", json={}, cookies=seeded.cookies)
    assert (judged.json()["reward"], called.text) == (1.5, "it is 3")


async def test_a_failed_judge_is_asked_again_by_its_server_only(counter):
    async with serve_app(resources.create_app(counter(judge="down"))) as url, head(config(url)) as address:
        client = ServerClient(address, retry=QUICK)
        answer = await client.post("my_resources", "/verify", json=ROW | {"response": RESPONSE})
        metrics_text = (await http.get(f"{url}/metrics", retry=http.NO_RETRY)).text
    assert answer.status == 503
    assert metric(metrics_text, "requests_total", route="/verify", status="503") == 1


async def test_an_unknown_name_is_an_error_with_the_nearest_name_and_without_credentials():
    async with head(config("http://127.0.0.1:9")) as address:
        with pytest.raises(UnknownServer, match="did you mean 'my_resources'"):
            await ServerClient(address).post("my_resource", "/verify", json={})
        with pytest.raises(UnknownServer) as caught:
            await ServerClient(address.replace("http://", "http://me:hush@")).url("strange")
        assert "hush" not in str(caught.value)
        # A server that is unreachable and has not moved is reported.
        with pytest.raises(Failed, match=r"cannot reach 127\.0\.0\.1:9"):
            await ServerClient(address, retry=Retry(times=0)).post("my_resources", "/verify", json={})


async def test_a_head_that_has_just_started_gets_time_to_learn_of_a_server():
    async with serve_head(lease=600) as address:
        lookup = asyncio.ensure_future(ServerClient(address).url("lamp"))
        # By then the head has answered twice that it knows no such server.
        await wait_until(lambda: was_requested(address, 3))
        assert not lookup.done()
        async with run_node(NodeClient(address, [LAMP])):
            assert await lookup == "http://127.0.0.1:9"


async def was_requested(address: str, times: int) -> bool:
    """Return whether the head's configuration was requested that often."""
    metrics_text = (await http.get(f"{address}/metrics", retry=http.DEFAULT_RETRY)).text
    return (metric(metrics_text, "requests_total", route="/global_config_dict_yaml", status="200") or 0) >= times


async def test_a_head_that_does_not_report_whether_it_is_settled_proves_no_server_unknown():
    for status in (503, 500, 403):
        async with head(config("http://127.0.0.1:9"), nodes=status) as address:
            client = ServerClient(address, retry=QUICK)
            with pytest.raises(Failed, match=f"answered {status}") as caught:
                await client.url("lamp")
            assert not isinstance(caught.value, UnknownServer)
            assert await client.url("my_resources") == "http://127.0.0.1:9"


async def test_a_name_unknown_to_a_settled_head_is_reported_as_unknown():
    async with serve_head(lease=0.5) as address:
        with pytest.raises(UnknownServer, match="knows no server 'lamp'"):
            await ServerClient(address).url("lamp")


async def test_a_server_that_is_not_a_head_and_an_unreachable_head_are_reported():
    for text in ('"[1]"', "{torn: [", "null", "3"):
        async with head(text) as address:
            with pytest.raises(Failed, match="check that it is a head server"):
                await ServerClient(address).get("my_resources", "/")
    with pytest.raises(Failed, match="is the server running"):
        await ServerClient("http://127.0.0.1:9", seconds=5, retry=QUICK).get("my_resources", "/")
    # The default head is NeMo Gym's.
    assert ServerClient().head == "http://127.0.0.1:11000"


async def test_a_server_that_has_moved_is_looked_up_again(counter):
    made, texts = counter(), [config("http://127.0.0.1:9")]
    async with serve_app(resources.create_app(made)) as url, head(texts) as address:
        client = ServerClient(address, retry=Retry(times=0))
        assert await client.url("my_resources") == "http://127.0.0.1:9"
        texts.append(config(url))
        seeded = await client.post("my_resources", "/seed_session", json=ROW)
    assert seeded.ok


def test_without_tls_the_token_stays_on_this_machine_if_the_head_uses_tls():
    token = "a-token-that-is-long-enough"
    for head_url, server, sent in (
        ("https://head.test:11000", "https://server.test:1", True),
        ("https://head.test:11000", "http://server.test:1", False),
        ("http://head.test", "http://server.test:1", True),
        ("https://localhost:1", "http://127.0.0.1:2", True),
        ("https://127.0.0.1:1", "http://[::1]:2", True),
        ("https://localhost:1", "http://10.0.0.5:2", False),
        ("https://head.test", "http://127.0.0.1:2", False),
        ("https://head.test", "http://[broken:2", False),
        ("https://localhost:1", "http://localhost.test:2", False),
    ):
        client = ServerClient(head_url, token=token)
        assert [*client.build_headers_for(server)] == ["authorization"] * sent, (head_url, server)
        assert client.withholds_token(server) is not sent
        assert not ServerClient(head_url, token="").withholds_token(server)
