"""Post many requests concurrently with little CPU time: an HTTP/1.1 client on raw asyncio protocols.

A request costs the client about 25 µs, so that the server is what a benchmark measures.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import orjson
import uvloop

from .rows import Row

CONNECTS_AT_ONCE = 256
"""Connections that a load opens concurrently before it sends its first request."""


@dataclass
class Outcome:
    """What the responses to a load contained.

    Attributes:
        answered: The number of responses with a reward.
        wrong: The number of rewards that differ from the known reward of the row.
        failed: The number of requests without a reward, by status or error.
        seconds: The wall time.
        latencies: The wall time of each answered request in seconds.
    """

    answered: int = 0
    wrong: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """The number of requests."""
        return self.answered + self.failed.total()


class Connection(asyncio.Protocol):
    """One connection that sends one request at a time."""

    __slots__ = ("body_end", "buffer", "is_lost", "response", "transport")

    def __init__(self) -> None:
        self.buffer = bytearray()
        self.body_end = -1
        self.is_lost = False
        self.response: asyncio.Future[tuple[bytes, bytes]] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # of a TCP connection
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        if self.response and not self.response.done():
            self.response.set_exception(exc or ConnectionError("closed"))

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if self.body_end < 0:
            head_end = self.buffer.find(b"\r\n\r\n")
            if head_end < 0:
                return
            length = self.buffer[:head_end].lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            if not length:
                raise ConnectionError("a response without a content-length")
            self.body_end = head_end + 4 + int(length)
        if len(self.buffer) < self.body_end:
            return
        head, _, body = bytes(self.buffer[: self.body_end]).partition(b"\r\n\r\n")
        del self.buffer[: self.body_end]
        self.body_end = -1
        if self.response and not self.response.done():
            self.response.set_result((head, body))

    async def send(self, method: bytes, path: bytes, body: bytes = b"", headers: bytes = b"") -> tuple[bytes, bytes]:
        """Send a request and return the head and the body of the response.

        Raises:
            ConnectionError: The connection was closed before the complete response arrived.
        """
        if self.is_lost:
            raise ConnectionError("closed")
        self.response = asyncio.get_running_loop().create_future()
        head = b"%s %s HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%s\r\n"
        self.transport.write(head % (method, path, len(body), headers) + body)
        return await self.response


async def connect(url: str) -> Connection:
    """Open a connection to the server at *url*."""
    address = urlsplit(url)
    _, connection = await asyncio.get_running_loop().create_connection(Connection, address.hostname, address.port)
    return connection


def post_rows(url: str, rows: Iterable[Row], in_flight: int) -> Outcome:
    """Post each row to `/run` of the agent at *url*, *in_flight* at a time, and compare the rewards."""
    return uvloop.run(_post_rows(url, rows, in_flight))


async def _post_rows(url: str, rows: Iterable[Row], in_flight: int) -> Outcome:
    outcome, remaining = Outcome(), iter(rows)
    connections: list[Connection] = []
    while len(connections) < in_flight:
        count = min(CONNECTS_AT_ONCE, in_flight - len(connections))
        connections += await asyncio.gather(*(connect(url) for _ in range(count)))

    async def post_remaining(connection: Connection) -> None:
        for row in remaining:
            if connection.is_lost:
                connection = await connect(url)
            await _post_row(connection, row, outcome)
        connection.transport.close()

    started = time.perf_counter()
    await asyncio.gather(*map(post_remaining, connections))
    outcome.seconds = time.perf_counter() - started
    return outcome


async def _post_row(connection: Connection, row: Row, outcome: Outcome) -> None:
    started = time.perf_counter()
    try:
        head, body = await connection.send(b"POST", b"/run", row.body)
    except OSError as error:
        outcome.failed[type(error).__name__] += 1
        return
    status = head[9:12].decode()
    reward = orjson.loads(body).get("reward") if status == "200" else None
    if reward is None:
        outcome.failed[status] += 1
        return
    outcome.answered += 1
    outcome.wrong += reward != row.reward
    outcome.latencies.append(time.perf_counter() - started)


def fetch(url: str, body: bytes | None = None) -> bytes:
    """Return the body of the response to a GET request, or to a POST request if there is a *body*.

    Raises:
        RuntimeError: The status is not 200.
    """
    return uvloop.run(_fetch(url, body))


async def _fetch(url: str, body: bytes | None) -> bytes:
    connection = await connect(url)
    try:
        path = urlsplit(url).path.encode()
        head, answer = await connection.send(b"GET" if body is None else b"POST", path, body or b"")
    finally:
        connection.transport.close()
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"{url} answered {head[9:12].decode()}: {answer[:500].decode()}")
    return answer
