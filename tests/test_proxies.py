"""Requests through the forward proxies of the environment, and loopback without one."""

from __future__ import annotations

import asyncio
import logging
import ssl
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import pytest
from aiohttp import web
from servers.test_tls import OPENSSL, issue_certificate

from gymsdk.cluster.reports import check_status
from gymsdk.errors import Failed
from gymsdk.http import client
from gymsdk.http.client import NO_RETRY
from gymsdk.http.proxies import find_proxy
from gymsdk.models.registry import model

VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
ENGINE = "http://engine.internal:8000/v1"


@pytest.fixture(autouse=True)
def _without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


class ForwardProxy:
    """A forward proxy that connects to one port of this machine, whatever host a request names.

    Attributes:
        port: Its port.
        lines: The first lines of the requests that it received.
        passwords: The values of `Proxy-Authorization`.
        refusal: A status line to answer every request with, if any.
    """

    def __init__(self, target: int) -> None:
        self.port = 0
        self.lines: list[str] = []
        self.passwords: list[str] = []
        self.refusal = b""
        self._target = target
        self._handlers: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[ForwardProxy]:
        """Listen on a free port inside the block."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for handler in self._handlers:
                handler.cancel()
            await asyncio.gather(*self._handlers, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._handlers.add(asyncio.ensure_future(self._handle(reader, writer)))

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            first, *fields = head.decode().split("\r\n")
            self.lines.append(first)
            self.passwords += [line.partition(" ")[2] for line in fields if line.lower().startswith("proxy-auth")]
            if self.refusal:
                writer.write(self.refusal + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            else:
                await self._forward(first, head, reader, writer)

    async def _forward(
        self, first: str, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        upstream, to_upstream = await asyncio.open_connection("127.0.0.1", self._target)
        # Each request has a connection of its own, so that its first line is seen.
        head = head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
        if first.startswith("CONNECT"):
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            method, url, version = first.split(" ")
            path = "/" + url.partition("://")[2].partition("/")[2]
            to_upstream.write(head.replace(first.encode(), f"{method} {path} {version}".encode(), 1))
        pumps = [asyncio.ensure_future(pump(reader, to_upstream)), asyncio.ensure_future(pump(upstream, writer))]
        with closing(to_upstream):
            try:
                await asyncio.wait(pumps, return_when="FIRST_COMPLETED")
            finally:
                for task in pumps:
                    task.cancel()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)


@asynccontextmanager
async def run_engine(context: ssl.SSLContext | None = None) -> AsyncIterator[tuple[int, list[str]]]:
    """Run an engine, and yield its port and the requests that it received."""
    seen: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(f"{request.method} {request.path} {request.host}")
        await request.read()
        message = {"role": "assistant", "content": "hello"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return web.json_response({**answer, "usage": usage})

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    try:
        yield runner.addresses[0][1], seen
    finally:
        await runner.cleanup()


@asynccontextmanager
async def run_proxied_engine() -> AsyncIterator[tuple[ForwardProxy, list[str]]]:
    async with run_engine() as (port, seen), ForwardProxy(port).run() as proxy:
        yield proxy, seen


async def test_each_request_goes_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_proxied_engine() as (proxy, seen):
        monkeypatch.setenv("HTTP_PROXY", f"http://me:h%40sh@127.0.0.1:{proxy.port}")
        answers = [
            await client.post(f"{ENGINE}/chat/completions", {}, retry=NO_RETRY),
            await client.get(f"{ENGINE}/models", retry=NO_RETRY),
            await client.send("PUT", f"{ENGINE}/x", {}, retry=NO_RETRY),
            await client.send("DELETE", f"{ENGINE}/x", retry=NO_RETRY),
        ]
        assert await check_status("engine.internal", 8000) == "success"
        await client.aclose()
    assert [answer.status for answer in answers] == [200] * 4
    methods = ["POST /v1/chat/completions", "GET /v1/models", "PUT /v1/x", "DELETE /v1/x", "GET /"]
    assert seen == [f"{method} engine.internal:8000" for method in methods]
    assert proxy.lines[0] == "POST http://engine.internal:8000/v1/chat/completions HTTP/1.1"
    assert set(proxy.passwords) == {"Basic " + b64encode(b"me:h@sh").decode()}


@pytest.mark.parametrize("name", ["vllm/m", "endpoint/m", "openai/m"])
async def test_models_are_called_through_the_proxy(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    async with run_proxied_engine() as (proxy, seen):
        monkeypatch.setenv("http_proxy", f"127.0.0.1:{proxy.port}")
        policy = model(name, base_url=ENGINE, api_key="k", api="chat")
        response = await policy.respond({"input": "hi"})
        await client.aclose()
    assert [item["content"][0]["text"] for item in response["output"]] == ["hello"]
    assert "POST /v1/chat/completions engine.internal:8000" in seen
    assert proxy.lines


@pytest.mark.parametrize("name", ["vllm/m", "endpoint/m", "openai/m"])
@pytest.mark.parametrize("variable", ["HTTP_PROXY", "ALL_PROXY"])
async def test_loopback_is_reached_without_the_proxy(monkeypatch: pytest.MonkeyPatch, name: str, variable: str) -> None:
    async with run_engine() as (port, seen), ForwardProxy(port).run() as proxy:
        monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy.port}")
        for host in ("127.0.0.1", "localhost"):
            url = f"http://{host}:{port}/v1"
            await model(name, base_url=url, api_key="k", api="chat").respond({"input": "hi"})
            await client.get(f"{url}/models", retry=client.DEFAULT_RETRY)
        await client.aclose()
    assert len(seen) >= 4
    assert proxy.lines == []


@pytest.mark.skipif(OPENSSL is None, reason="no openssl here that could make a certificate")
async def test_tls_goes_through_a_tunnel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tls = issue_certificate(tmp_path, "DNS:engine.internal")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls.certificate, tls.key)
    monkeypatch.setenv("GYMSDK_CA_FILE", str(tls.certificate))
    async with run_engine(context) as (port, seen), ForwardProxy(port).run() as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
        answer = await client.post("https://engine.internal/v1/x", {}, retry=NO_RETRY)
        proxy.refusal = b"HTTP/1.1 407 Proxy Authentication Required"
        with pytest.raises(Failed) as caught:
            await client.post("https://other.internal/v1/x", {}, retry=NO_RETRY)
        await client.aclose()
    assert answer.status == 200
    assert seen == ["POST /v1/x engine.internal"]
    assert proxy.lines[0] == "CONNECT engine.internal:443 HTTP/1.1"
    assert "the proxy answered 407" in str(caught.value)
    assert (caught.value.kind, caught.value.retryable) == ("model_unreachable", False)


async def test_an_unreachable_proxy_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://me:hush@127.0.0.1:9")
    with pytest.raises(Failed) as caught:
        await client.post(f"{ENGINE}/x", {}, retry=NO_RETRY)
    await client.aclose()
    expected = "cannot reach engine.internal:8000 (through the proxy 127.0.0.1:9 of HTTP_PROXY): nothing listens there"
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("exceptions", "url", "is_direct"),
    [(hosts, "http://a.example", False) for hosts in ("", "ample", "a.example:8000")]
    + [(hosts, "http://a.example", True) for hosts in ("*", "example", ".example", "*.example", "a.example:80")]
    + [(hosts, "http://a.example", True) for hosts in ("b.example,a.example", "b.example a.example")]
    + [
        ("a.example", "http://A.Example./v1", True),
        ("10.0.0.0/8", "http://10.1.2.3:8000", True),
        ("10.0.0.0/8", "http://11.1.2.3:8000", False),
        ("10.1.2.3:8000", "http://10.1.2.3", False),
        ("fd00::/8", "http://[fd00::1]:8000", True),
        ("[fd00::1]:8000", "http://[fd00::1]:8000", True),
        ("not/a/network", "http://10.1.2.3", False),
    ],
)
def test_no_proxy_names_hosts_domains_addresses_and_networks(
    monkeypatch: pytest.MonkeyPatch, exceptions: str, url: str, is_direct: bool
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", exceptions)
    assert (find_proxy(url) is None) == is_direct


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST", "localhost.", "a.localhost", "127.0.0.1", "127.1", "2130706433", "[::1]", "0.0.0.0"],
)
def test_no_name_of_loopback_has_a_proxy(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://proxy:3128")
    assert find_proxy(f"http://{host}:8000/v1") is None
    assert find_proxy(f"https://{host}/v1") is None


def test_the_variable_in_lower_case_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://upper:1")
    monkeypatch.setenv("http_proxy", "lower:1")
    monkeypatch.setenv("ALL_PROXY", "http://all:1")
    assert [getattr(find_proxy(url), "url", None) for url in ("http://a", "https://a")] == [
        "http://lower:1",
        "http://all:1",
    ]
    monkeypatch.setenv("http_proxy", "")
    assert find_proxy("http://a") is None


def test_the_header_of_a_cgi_request_is_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://attacker:1")
    monkeypatch.setenv("REQUEST_METHOD", "POST")
    assert find_proxy("http://a") is None


@pytest.mark.parametrize("address", ["socks5://me:hush@s:1", "ftp://s:1", "http://:1", "http://s:x"])
def test_an_unusable_proxy_is_ignored_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, address: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", address)
    with caplog.at_level(logging.WARNING):
        assert [find_proxy(f"http://a{number}") for number in range(3)] == [None] * 3
    [record] = caplog.records
    assert "ALL_PROXY is ignored" in record.getMessage()
    assert "hush" not in record.getMessage()
