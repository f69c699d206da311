"""POST requests without TLS, on the event loop of the commands: connections are reused, and responses are bounded."""

from __future__ import annotations

import asyncio
import functools
import gzip
import itertools
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest
from multidict import CIMultiDict

from gymsdk.concurrency import run_event_loop
from gymsdk.errors import Failed
from gymsdk.http import client, connections
from gymsdk.http.client import NO_RETRY, HttpResponse

HOSTS = "127.0.0.2", "127.0.0.1"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class Server:
    """A server that answers each request with the next of *answers*, or the last."""

    def __init__(self, answers: list[bytes]) -> None:
        self.answers = answers
        self.requests: list[bytes] = []
        self.connections = 0
        self.open = 0
        self.is_unused = asyncio.Event()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
                writer.write(answer.removesuffix(b"CLOSE"))
                if answer.endswith(b"CLOSE"):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            if not self.open:
                self.is_unused.set()
            writer.close()


@asynccontextmanager
async def _serve(*answers: bytes) -> AsyncIterator[Server]:
    state = Server(list(answers))
    server = await asyncio.start_server(state.serve, "127.0.0.1", 0)
    state.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/responses"
    try:
        yield state
    finally:
        server.close()
        await client.aclose()


def on_event_loop(check: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run the decorated test on the event loop of the commands."""

    @functools.wraps(check)
    def run(*arguments: Any, **options: Any) -> None:
        run_event_loop(asyncio.wait_for(check(*arguments, **options), 30))

    return run


async def _post(server: Server, **options: Any) -> HttpResponse:
    return await client.post(server.url, {"a": 1}, retry=NO_RETRY, **options)


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (OK, b"{}"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"{}"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[1\r\n2\r\n,2\r\n1\r\n]\r\n0\r\n\r\n", b"[1,2]"),
        (b"HTTP/1.1 200 OK\r\n\r\n[1,2,3]CLOSE", b"[1,2,3]"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%s"
            % (len(gzip.compress(b"[1]", mtime=0)), gzip.compress(b"[1]", mtime=0)),
            b"[1]",
        ),
    ],
)
@on_event_loop
async def test_a_response_is_read_however_its_body_is_delimited(answer: bytes, body: bytes) -> None:
    async with _serve(answer) as server:
        assert (await _post(server)).body == body


@on_event_loop
async def test_few_requests_continue_in_one_pass_of_the_event_loop() -> None:
    loop = asyncio.get_running_loop()
    responses, ended = connections.ResponseQueue(), 0

    def count(_: object) -> None:
        nonlocal ended
        ended += 1

    waiters: list[asyncio.Future[connections.RawResponse]] = [loop.create_future() for _ in range(100)]
    for waiter in waiters:
        waiter.add_done_callback(count)
        responses.add(waiter, connections.RawResponse(200, CIMultiDict(), []))
    per_pass: list[int] = []
    while ended < len(waiters):
        before = ended
        await asyncio.sleep(0)
        per_pass.append(ended - before)
    assert max(per_pass) == connections.MAX_RESPONSES_PER_PASS


@on_event_loop
async def test_few_idle_connections_close_in_one_pass_of_the_event_loop() -> None:
    async with _serve(OK) as server, connections.ConnectionPool(0.0, 10.0) as pool:
        target = connections.parse_target(server.url)
        assert target is not None
        opened = [await pool.connect(target) for _ in range(40)]
        for connection in opened:
            pool.release(target, connection)
        before = [len(opened)]
        while open_ones := sum(connection.is_open for connection in opened):
            before.append(open_ones)
            await asyncio.sleep(0)
        closed = [first - second for first, second in itertools.pairwise([*before, 0])]
        assert max(closed) == connections.MAX_CLOSES_PER_PASS


@on_event_loop
async def test_a_request_has_the_headers_of_the_caller_and_the_trace() -> None:
    async with _serve(OK) as server:
        await _post(server, headers={"X-One": "ä"})
        [request] = server.requests
        lines = request.decode().split("\r\n")
        assert lines[0] == "POST /v1/responses HTTP/1.1"
        assert {"X-One: ä", "Content-Type: application/json", "Accept-Encoding: gzip, deflate"} <= set(lines)
        assert lines[-1] == '{"a":1}'


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"X-One": "a\r\nX-Two: b"}, "line breaks"),
        ({"Transfer-Encoding ": "chunked"}, "must not be empty or contain spaces"),
        ({"": "x"}, "empty"),
    ],
)
@on_event_loop
async def test_an_invalid_header_is_not_sent(headers: dict[str, str], message: str) -> None:
    async with _serve(OK) as server:
        with pytest.raises(Failed, match=message):
            await _post(server, headers=headers)
        # aiohttp sends this one.
        with pytest.raises(Failed, match=message):
            await client.get(server.url, headers=headers, retry=client.DEFAULT_RETRY)
        assert not server.requests


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"CLOSE", "closed before the response began"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}CLOSE", "closed in the middle of the response"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nCLOSE", "closed in the middle"),
        (b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 2**20, "the response is not HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"X-Many: 1\r\n" * 20_000 + b"\r\n", "the response is not HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "the response is not HTTP"),
    ],
)
@on_event_loop
async def test_a_broken_response_fails_the_request_and_its_connection(answer: bytes, message: str) -> None:
    async with _serve(answer, OK) as server:
        with pytest.raises(Failed, match=message):
            await _post(server)
        assert (await _post(server)).json() == {}
        assert server.connections == 2


@on_event_loop
async def test_a_response_beyond_the_limit_closes_its_connection() -> None:
    large = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n" + b"1" * 5000
    async with _serve(large, large.replace(b"200 OK", b"400 No") + b"x" * (2 * 2**20), OK) as server:
        with pytest.raises(Failed) as caught:
            await _post(server, max_answer_bytes=1000)
        assert caught.value.kind == "model_answer_too_large"
        # The beginning of an error response is kept.
        response = await _post(server)
        assert (response.status, len(response.body)) == (400, client.MAX_ERROR_BODY_BYTES)
        assert (await _post(server)).json() == {}
        assert server.connections == 3


@on_event_loop
async def test_data_that_nothing_asked_for_is_never_taken_for_a_response() -> None:
    async with _serve(OK + OK.replace(b"{}", b"[]"), OK) as server:
        assert (await _post(server)).json() == {}
        await asyncio.sleep(0.1)
        assert (await _post(server)).json() == {}
        assert server.connections == 2


@on_event_loop
async def test_connections_are_reused_and_all_idle_ones_can_be_closed() -> None:
    async with _serve(OK) as server:
        for _ in range(5):
            assert (await _post(server)).json() == {}
        assert server.connections == 1
        await asyncio.gather(*(_post(server) for _ in range(20)))
        assert server.connections == 20
        await client.close_idle_connections()
        await server.is_unused.wait()
        assert (await _post(server)).json() == {}
        assert server.connections == 21


def test_a_host_name_is_resolved_once_for_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = []

    def resolve(host: str, *arguments: Any, **options: Any) -> Any:
        resolved.append(host)
        return getaddrinfo(host, *arguments, **options)

    async def check() -> None:
        async with _serve(OK) as server:
            server.url = server.url.replace("127.0.0.1", "localhost")
            monkeypatch.setattr(socket, "getaddrinfo", resolve)
            await asyncio.gather(*(_post(server) for _ in range(10)))
            assert len(server.requests) == 10
            assert b"Host: localhost:" in server.requests[0]
        assert resolved.count("localhost") == 1

    getaddrinfo = socket.getaddrinfo
    # uvloop resolves names by itself.
    asyncio.run(asyncio.wait_for(check(), 30))


@on_event_loop
async def test_the_next_address_of_a_host_is_tried_if_one_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _serve(OK) as server:
        port = int(server.url.partition("127.0.0.1:")[2].partition("/")[0])
        with socket.create_server(("127.0.0.2", port), backlog=0) as silent, ExitStack() as others:
            for _ in range(2):
                # The queue of the server is full afterwards, so the system ignores further connections.
                waiting = others.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(silent.getsockname())
            addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in HOSTS]

            async def look_up(_: connections.ConnectionPool, key: object) -> list[connections.AddressInfo]:
                return addresses

            monkeypatch.setattr(connections.ConnectionPool, "_look_up", look_up)
            server.url = server.url.replace("127.0.0.1", "model.test")
            assert (await _post(server, timeout=5)).json() == {}
            assert b"Host: model.test:" in server.requests[0]


@on_event_loop
async def test_a_connection_with_an_unsent_request_is_not_used_again() -> None:
    """The server answers before it has read the body, and does not read the rest."""
    connections: list[asyncio.StreamWriter] = []

    async def answer_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(OK)
            await asyncio.sleep(60 if len(connections) == 1 else 0)

    server = await asyncio.start_server(answer_early, "127.0.0.1", 0, limit=2**12)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with server:
        large = await client.post(url, {"text": "x" * 60_000_000}, timeout=30, retry=client.NO_RETRY)
        small = await client.post(url, {}, timeout=30, retry=client.NO_RETRY)
        assert (large.status, small.status, len(connections)) == (200, 200, 2)
        for writer in connections:
            writer.transport.abort()
    await client.aclose()


@pytest.mark.parametrize(
    "url",
    ["https://host/v1", "http://user:word@host/v1", "http://host:99999/v1", "http://host/v1\r\nX-One: 1"]
    + [f"http://host/{path}" for path in ("v1?key=1", "a/../v1", "a b", "a%2fb")]
    + ["http://höst/v1"],
)
def test_unusual_urls_are_left_to_aiohttp(url: str) -> None:
    assert connections.parse_target(url) is None


def test_the_target_of_a_url_is_its_host_port_and_path() -> None:
    target = connections.parse_target("http://[::1]:8000/v1.5/chat/completions")
    assert target is not None
    assert (target.host, target.port) == ("::1", 8000)
    assert target.start.startswith(b"POST /v1.5/chat/completions HTTP/1.1\r\nHost: [::1]:8000\r\n")
    default = connections.parse_target("http://Host")
    assert default is not None
    assert (default.port, default.start[:27]) == (80, b"POST / HTTP/1.1\r\nHost: host")
