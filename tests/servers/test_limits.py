"""Configured limits of one server: headers, bodies and connections."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from gymsdk.config.model import Limits
from gymsdk.edge import listener
from gymsdk.edge.auth import Security
from gymsdk.edge.limits import MAX_QUOTA, MAX_QUOTA_BEHIND, Pacer

from .secured import SecuredServers, serve_secured

LIMITS = Limits(body=4096, header=4096, headers=20, connections=3)


@pytest.fixture
async def servers(counter):
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


async def test_requests_beyond_the_limits_are_rejected(servers):
    def get(*lines):
        return request("connection: close", *lines, verb="GET", path="/")

    chunked = request("connection: close", "transfer-encoding: chunked")
    small = b"".join(b"1\r\n%c\r\n" % byte for byte in b"{" + b" " * 3000 + b"}") + b"0\r\n\r\n"
    for sent, status in (
        (get(), b"200"),
        (get(*(f"x-{number}: a" for number in range(30))), b"431"),
        (get("x-long: " + "a" * 5000), b"431"),
        (request("connection: close", "content-length: 4097") + b"{" + b" " * 4096, b"413"),
        (chunked + b"1388\r\n" + b" " * 5000, b"413"),
        (chunked + b"1388\r\n" + b" " * 5000 + b"\r\n0\r\n\r\n", b"413"),
        (chunked + small, b"422"),
    ):
        assert (await send(servers, sent)).split(b" ", 2)[1] == status
    # A field after the body does not imitate a header.
    answer = await send(servers, chunked + b"2\r\n{}\r\n0\r\nx-request-id: trailer\r\n\r\n")
    assert (b"x-request-id: " in answer, b"x-request-id: trailer" in answer) == (True, False)


async def test_an_endless_field_after_a_body_closes_the_connection(servers):
    reader, writer = await connect(servers)
    writer.write(request("transfer-encoding: chunked") + b"2\r\n{}\r\n0\r\nx-trailer: ")
    sent = 0
    with suppress(ConnectionError):
        async with asyncio.timeout(20):
            while not reader.at_eof() and sent < 64 * 2**20:
                writer.write(b"a" * 65_536)
                sent += 65_536
                await writer.drain()
                await asyncio.sleep(0)
    writer.close()
    assert sent < 16 * 2**20


async def test_endless_headers_are_not_stored(servers):
    reader, writer = await connect(servers)
    async with asyncio.timeout(10):
        for piece in (b"GET / HTTP/1.1\r\nx-long: ", *[b"a" * 1000] * 5):
            writer.write(piece)
            await asyncio.sleep(0.01)
        assert (await reader.read()).split(b" ", 2)[1] == b"400"
    writer.close()


async def test_a_connection_beyond_the_limit_is_rejected_and_others_continue(servers):
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


async def test_the_rest_of_an_answered_request_is_not_waited_for_forever(servers, monkeypatch):
    monkeypatch.setattr(listener, "UNREAD_BODY_SECONDS", 0.1)
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


async def test_few_requests_start_while_started_ones_wait_for_their_turn():
    is_behind, started = True, 0

    def start() -> None:
        nonlocal started
        started += 1

    pacer = Pacer(target=60.0, is_behind=lambda: is_behind)
    while pacer.may_start():
        pass
    for number in range(200):
        pacer.enqueue(number, start)
    await asyncio.sleep(0)
    assert started == MAX_QUOTA_BEHIND
    is_behind = False
    while len(pacer):
        before = started
        await asyncio.sleep(0)
        assert started - before <= MAX_QUOTA
    assert started == 200
