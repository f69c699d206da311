"""Configured limits of one server: headers, bodies and connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest

from gymsdk import Environment
from gymsdk.config.model import Limits
from gymsdk.servers import connection
from gymsdk.servers.auth import Security

from .secured import SecuredServers, serve_secured

LIMITS = Limits(body=4096, header=4096, headers=20, connections=3)


@pytest.fixture
async def servers(counter: Callable[..., Environment]) -> AsyncIterator[SecuredServers]:
    async with serve_secured(counter(), Security(limits=LIMITS)) as running:
        yield running


def request(*lines: str, path: str = "/verify", verb: str = "POST") -> bytes:
    return "\r\n".join([f"{verb} {path} HTTP/1.1", "host: 127.0.0.1", *lines, "", ""]).encode()


async def connect(servers: SecuredServers) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = servers.urls["counter"].removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def send(servers: SecuredServers, sent: bytes) -> bytes:
    reader, writer = await connect(servers)
    writer.write(sent)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (request("connection: close", verb="GET", path="/"), b"200"),
        (request("connection: close", *(f"x-{n}: a" for n in range(30)), verb="GET", path="/"), b"431"),
        (request("connection: close", "x-long: " + "a" * 5000, verb="GET", path="/"), b"431"),
        (request("connection: close", "content-length: 4097") + b"{" + b" " * 4096, b"413"),
        (request("connection: close", "transfer-encoding: chunked") + b"1388\r\n" + b" " * 5000, b"413"),
    ],
)
async def test_requests_beyond_the_limits_are_rejected(servers: SecuredServers, sent: bytes, status: bytes) -> None:
    assert (await send(servers, sent)).split(b" ", 2)[1] == status


async def test_endless_headers_are_not_stored(servers: SecuredServers) -> None:
    reader, writer = await connect(servers)
    async with asyncio.timeout(10):
        for piece in (b"GET / HTTP/1.1\r\nx-long: ", *[b"a" * 1000] * 5):
            writer.write(piece)
            await asyncio.sleep(0.01)
        assert (await reader.read()).split(b" ", 2)[1] == b"400"
    writer.close()


async def test_a_connection_beyond_the_limit_is_rejected_and_others_continue(servers: SecuredServers) -> None:
    connections = [await connect(servers) for _ in range(3)]
    for _, writer in connections:
        writer.write(request(verb="GET", path="/"))
    assert [(await reader.readline()).split(b" ")[1] for reader, _ in connections] == [b"200"] * 3
    answer = await send(servers, request(verb="GET", path="/"))
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"limit of connections" in answer
    connections[0][1].close()
    await connections[0][1].wait_closed()
    async with asyncio.timeout(10):
        while b"503" in await send(servers, request("connection: close", verb="GET", path="/")):  # noqa: ASYNC110  # the server has no event for a closed connection
            await asyncio.sleep(0)
    for _, writer in connections[1:]:
        writer.close()


async def test_the_rest_of_an_answered_request_is_not_waited_for_forever(
    servers: SecuredServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "UNREAD_BODY_SECONDS", 0.1)
    reader, writer = await connect(servers)
    writer.write(request("content-length: 4000", path="/nowhere/at/all") + b"{")
    async with asyncio.timeout(30):
        response = asyncio.ensure_future(reader.read())
        while not response.done():
            # The client keeps sending, one byte at a time.
            writer.write(b" ")
            await asyncio.wait({response}, timeout=0.02)
        # A connection that is closed before its last byte was read is reset.
        with suppress(ConnectionResetError):
            assert b"404" in await response
    writer.close()
