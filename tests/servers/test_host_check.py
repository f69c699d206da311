"""The host check: a server rejects unknown host names and foreign web pages; idle connections are closed."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from gymsdk import Environment, Task
from gymsdk.config.model import Deployment
from gymsdk.deploy.process import RunningServers, serve
from gymsdk.http import client as http
from gymsdk.servers import connection
from gymsdk.servers.middleware import allowed_hosts
from gymsdk.sockets import MAX_OPEN_FILES, raise_open_file_limit

ROW = Task.ask("add", initial_count=3, expected_count=3).row()


@pytest.fixture
async def running(counter: Callable[..., Environment]) -> AsyncIterator[RunningServers]:
    async with serve([counter()], model="scripted/null", deployment=Deployment(mcp=True)) as servers:
        yield servers
    await http.aclose()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:1"}, 200),
        ({"host": "127.0.0.9"}, 200),
        ({"host": "[::1]:80"}, 200),
        ({"host": "LOCALHOST."}, 200),
        ({"host": "evil.test"}, 421),
        ({"host": "127.0.0.1.evil.test:11000"}, 421),
        ({"host": "evil.test", "origin": "http://evil.test"}, 421),
        ({"origin": "http://evil.test"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://[::"}, 403),
        ({"origin": "http://localhost:3000"}, 200),
        ({"origin": "http://localhost:3000", "content-type": "text/plain"}, 403),
        ({"content-type": "text/plain"}, 200),
    ],
)
async def test_a_server_answers_for_its_own_names_and_not_for_foreign_pages(
    running: RunningServers, headers: dict[str, str], status: int
) -> None:
    async with httpx.AsyncClient() as client:
        sent = {"content-type": "application/json"} | headers
        answers = [
            await client.post(f"{running.urls[name]}{path}", json=ROW, headers=sent)
            for name, path in (("counter", "/seed_session"), ("counter_simple_agent", "/run"))
        ]
    assert [answer.status_code for answer in answers] == [status] * 2
    assert status == 200 or all(answer.json()["detail"] for answer in answers)


async def test_a_request_with_two_hosts_is_rejected(running: RunningServers) -> None:
    port = int(running.head_url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nhost: evil.test\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    assert answer.split(b" ", 2)[1] == b"421"


async def test_the_head_checks_hosts_too(running: RunningServers) -> None:
    async with httpx.AsyncClient() as client:
        path = f"{running.head_url}/global_config_dict_yaml"
        assert (await client.get(path, headers={"host": "evil.test"})).status_code == 421


def test_a_server_that_listens_on_all_addresses_accepts_every_name() -> None:
    assert allowed_hosts("0.0.0.0") is None  # the caller asked for all addresses
    assert allowed_hosts("::", "here") is None
    assert {"10.0.0.5", "node5", "localhost"} <= (allowed_hosts("10.0.0.5", "Node5") or set())
    assert allowed_hosts("127.0.0.1") == {"127.0.0.1", "localhost", "localhost.localdomain", "ip6-localhost"}


@pytest.mark.parametrize("sent", [b"", b"POST /verify HTTP/1.1\r\nhost: 127.0.0.1\r\n"])
async def test_a_connection_without_a_request_is_closed(
    running: RunningServers, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connection, "FIRST_REQUEST_SECONDS", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(running.urls["counter"]).port)
    writer.write(sent)
    async with asyncio.timeout(10):
        assert await reader.read() == b""
    writer.close()


async def test_a_slow_request_is_not_closed_as_idle(running: RunningServers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FIRST_REQUEST_SECONDS", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(running.urls["counter"]).port)
    head = b"POST /livez HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{"
    writer.write(head.replace(b"/livez", b"/seed_session"))
    await asyncio.sleep(0.3)
    writer.write(b"}")
    async with asyncio.timeout(10):
        assert (await reader.read()).startswith(b"HTTP/1.1 422")
    writer.close()


def test_a_serving_process_may_open_many_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        expected = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
        assert raise_open_file_limit() == expected
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (expected, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
