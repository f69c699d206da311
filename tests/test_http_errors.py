"""Describe why a server gave no response: real sockets, and error messages of real servers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gymsdk.errors import Failed
from gymsdk.http import client, errors

ONCE = client.Retry(times=0)


async def failure(url: str) -> str:
    with pytest.raises(Failed) as caught:
        await client.get(url, retry=ONCE, timeout=5)
    assert (caught.value.kind, caught.value.retryable) == ("model_unreachable", True)
    return str(caught.value)


@asynccontextmanager
async def serve_bytes(words: bytes) -> AsyncIterator[str]:
    """Start a server that sends fixed bytes to each client; yield its address."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(16)
        writer.write(words)
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_refused_connection_is_described_without_the_library_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        host = f"127.0.0.1:{closed.getsockname()[1]}"
    assert await failure(f"http://{host}/v1") == f"cannot reach {host}: nothing listens there; is the server running?"


async def test_an_unresolvable_host_name_is_described() -> None:
    assert (await failure("http://nowhere.invalid:1/v1")).endswith("the host name cannot be resolved; check the name")


async def test_a_plain_http_server_asked_with_tls_is_described() -> None:
    async with serve_bytes(b"HTTP/1.1 400 Bad Request\r\n\r\n") as host:
        message = await failure(f"https://{host}/v1")
    assert message.startswith(f"cannot reach {host}: the TLS handshake failed (")
    assert message.endswith("write http:// if the server does not use TLS")


@pytest.mark.parametrize(
    ("text", "message", "param"),
    [
        ('{"error": {"message": "No such key.", "param": "top_k", "code": null}}', "No such key", "top_k"),
        ('{"object": "error", "message": "too hot", "param": null}', "too hot", None),
        ('{"error": "model not loaded"}', "model not loaded", None),
        ('{"detail": "Not Found"}', "Not Found", None),
        ('{"detail": [{"loc": ["body", "n"], "msg": "must be 1"}]}', "body.n: must be 1", None),
        ("404: Not Found", "Not Found", None),
        ('{"odd": 1}', '{"odd": 1}', None),
        ("[1]", "[1]", None),
        ("", "", None),
    ],
)
def test_an_error_response_is_described_with_the_server_message(text: str, message: str, param: str | None) -> None:
    assert errors.parse_refusal(text) == (message, param)
