"""Connections to HTTP servers without TLS, for the POST requests of which a run has many at once.

aiohttp sends all other requests. For a short request and response, it takes 216 µs of CPU time, and this module, which
parses with httptools and keeps connections open in the same way, 49 µs (`benchmarks/edge.py client`).
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from ipaddress import ip_address
from itertools import chain, islice, takewhile
from typing import Any, Self, TypeAlias

import aiohttp
import httptools
from aiohappyeyeballs import start_connection
from aiohttp.http import SERVER_SOFTWARE
from multidict import CIMultiDict

from gymsdk.http.compression import ACCEPT_ENCODING, TooLarge

MAX_HEADER_BYTES = 128 * 1024
"""The maximum size of the header fields of a response."""

MAX_IDLE_CONNECTIONS = 65536
"""The number of idle connections that are kept."""

MAX_CLOSES_PER_PASS = 4
"""The number of idle connections that are closed in one pass of the event loop."""

SWEEP_SECONDS = 1.0
"""Seconds between two searches for connections that have been idle for too long."""

RESOLUTION_SECONDS = 10.0
"""Seconds for which the addresses of a host name are remembered."""

NEXT_ADDRESS_SECONDS = 0.25
"""Seconds after which the next address of a host name is tried beside the ones before; RFC 8305 recommends 250 ms."""

MAX_RESPONSES_PER_PASS = 32
"""How many requests continue in one pass of the event loop.

If thousands of responses have arrived while the process waited for a CPU, their requests would stop the loop together.
"""

_URL_PATTERN = re.compile(
    r"http://(?P<host>[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>\d{1,5}))?(?P<path>/[A-Za-z0-9/_~:@!$&'()*+,;=-]*"
    r"(?:\.[A-Za-z0-9/_~:@!$&'()*+,;=-]+)*)?"
)
"""URLs that are sent as they are: without credentials, a query, escapes or segments of dots."""

AddressInfo: TypeAlias = tuple[int, int, int, str, tuple[Any, ...]]
"""An address as `getaddrinfo` returns it: the family, the kind, the protocol, a canonical name, and the address."""

_INVALID_HEADER = re.compile(r"[\0\r\n]")
_INVALID_NAME = re.compile(r"[^!#$%&'*+.^_`|~0-9A-Za-z-]")
"""Characters that the name of a header field must not have (RFC 9110, section 5.6.2)."""

_FIRST_FINAL_STATUS = 200
_FIRST_ERROR_STATUS = 400
_DEFAULT_PORT = 80
_MAX_PORT = 65535


class InvalidResponse(aiohttp.ClientError):
    """A server's response is not HTTP."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a URL leads.

    Attributes:
        host: The host name or IP address.
        port: The port.
        start: The request line and the header fields that are the same for every request to the URL.
    """

    host: str
    port: int
    start: bytes


@lru_cache(maxsize=1024)
def parse_target(url: str) -> Target | None:
    """Return where *url* leads; `None` if aiohttp must send the request."""
    match = _URL_PATTERN.fullmatch(url)
    if match is None or int(match["port"] or 0) > _MAX_PORT:
        return None
    port = int(match["port"] or _DEFAULT_PORT)
    authority = match["host"].lower() + ("" if port == _DEFAULT_PORT else f":{port}")
    start = (
        f"POST {match['path'] or '/'} HTTP/1.1\r\nHost: {authority}\r\nAccept: */*\r\n"
        f"Accept-Encoding: {ACCEPT_ENCODING}\r\nUser-Agent: {SERVER_SOFTWARE}\r\n"
    )
    return Target(match["host"].strip("[]"), port, start.encode())


RESERVED_HEADERS = frozenset(
    {"host", "accept", "accept-encoding", "user-agent", "content-length", "transfer-encoding", "connection", "expect"}
)
"""Header fields that this module sets itself; aiohttp sends requests that have their own."""


def check_headers(headers: Mapping[str, str]) -> None:
    """Raise `ValueError` if a header field contains a line break, or its name another invalid character."""
    if _INVALID_HEADER.search("".join(chain(headers, headers.values()))):
        raise ValueError("a header field must not contain line breaks or null characters")
    if "" in headers or _INVALID_NAME.search("".join(headers)):
        raise ValueError("the name of a header field must not be empty or contain spaces, colons or other separators")


def encode_headers(headers: Mapping[str, str]) -> bytes | None:
    """Return header fields, which `check_headers` accepts, as bytes; `None` if aiohttp must send the request."""
    if not RESERVED_HEADERS.isdisjoint(map(str.lower, headers)):
        return None
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()]).encode()


MAX_CHUNK_FRAMING_BYTES = 64
"""The bytes around each chunk of a body, such as its size, that do not count against the limit of the header."""


@dataclass(slots=True)
class RawResponse:
    """A response before decompression; *is_truncated* says that the rest of the body was not read."""

    status: int
    headers: CIMultiDict[str]
    chunks: list[bytes]
    is_truncated: bool = False


class ResponseQueue:
    """Passes responses on to the requests that wait for them, `MAX_RESPONSES_PER_PASS` in a pass of the event loop."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.Future[RawResponse], RawResponse]] = deque()
        self._is_scheduled = False

    def __len__(self) -> int:
        """Return the number of responses that wait."""
        return len(self._waiting)

    def add(self, waiter: asyncio.Future[RawResponse], response: RawResponse) -> None:
        """Set *response* as the result of *waiter* in one of the next passes."""
        self._waiting.append((waiter, response))
        if not self._is_scheduled:
            self._is_scheduled = True
            waiter.get_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        for _ in range(min(len(self._waiting), MAX_RESPONSES_PER_PASS)):
            waiter, response = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(response)
        self._is_scheduled = bool(self._waiting)
        if self._is_scheduled:
            self._waiting[0][0].get_loop().call_soon(self._deliver)


class Connection(asyncio.Protocol):
    """One connection, with one request at a time. Data that no request has asked for closes the connection.

    Args:
        responses: Receives the responses.
    """

    def __init__(self, responses: ResponseQueue) -> None:
        self._responses = responses
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[RawResponse] | None = None
        self._parser: Any = None
        self._max_body = self._max_error_body = 0
        self.idle_since = 0.0
        self.is_open = False
        self._begin_message()

    def _begin_message(self) -> None:
        self._headers: CIMultiDict[str] | None = None
        self._has_complete_header = False
        self._header_bytes = self._framing_bytes = self._size = 0
        self._chunks: list[bytes] = []
        self._is_complete = self._is_truncated = False

    async def request(self, head: bytes, body: bytes, max_body: int, max_error_body: int) -> RawResponse:
        """Send a request and return its response.

        Args:
            head: The request line and the header fields, without `Content-Length`.
            body: The body.
            max_body: The maximum size of the body of a response, before decompression.
            max_error_body: The number of bytes that are read of the body of an error response.

        Raises:
            TooLarge: The body is larger than *max_body*.
            aiohttp.ClientError: The response broke off, or is not HTTP.
            OSError: The connection broke.
        """
        assert self._transport is not None, "the connection is open"
        self._max_body, self._max_error_body = max_body, max_error_body
        self._parser = httptools.HttpResponseParser(self)
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            self._transport.writelines((head, b"Content-Length: %d\r\n\r\n" % len(body), body))
            # While the request waits for its response, its bytes would be most of its memory.
            del head, body
            return await self._waiter
        except BaseException:
            self.close()
            raise
        finally:
            # The parser refers to this connection: without this line, each request would leave a reference cycle.
            self._waiter = self._parser = None
            self._begin_message()

    def close(self) -> None:
        """Close the connection now."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # streams have this type
        """Receive the transport of the new connection."""
        self._transport = transport
        self.is_open = True
        # A call may wait for minutes without a byte: only these probes find that the other machine is gone.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def connection_lost(self, error: Exception | None) -> None:
        """End the current request, if any: its body may end with the connection."""
        self.is_open = False
        if self._waiter is None or self._is_complete:
            return
        if error is not None:
            self._fail(error)
        elif not self._has_complete_header:
            self._fail(aiohttp.ServerDisconnectedError())
        elif self._has_length():
            self._fail(aiohttp.ClientPayloadError())
        else:
            self._finish()

    def data_received(self, data: bytes) -> None:
        """Parse the next part of a response."""
        if self._parser is None or self._waiter is None or self._waiter.done():
            self.close()
            return
        self._framing_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except TooLarge as error:
            self._fail(error)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            cause = error.__context__
            self._fail(cause if isinstance(cause, (TooLarge, InvalidResponse)) else InvalidResponse(str(error)))
        else:
            # One piece of data may hold the end of the header and the begin of the body.
            if not self._is_complete and self._framing_bytes > MAX_HEADER_BYTES + len(data):
                self._fail(InvalidResponse("its header is too large"))

    # The callbacks of the parser

    def on_message_begin(self) -> None:
        """Close the connection if a second response follows the one that a request has asked for."""
        if self._is_complete:
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Receive a header field; a field after the body is ignored."""
        if self._is_complete or self._has_complete_header:
            return
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise InvalidResponse("its header is too large")
        if self._headers is None:
            self._headers = CIMultiDict()
        # A value may have any bytes, and a byte that is not UTF-8 must not fail the call.
        self._headers.add(name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape"))

    def on_headers_complete(self) -> None:
        """Note that the header is complete, even if it has no fields."""
        self._has_complete_header = True
        if self._headers is None:
            self._headers = CIMultiDict()

    def on_body(self, data: bytes) -> None:
        """Receive a part of the body; an error response is complete when enough of it has arrived."""
        if self._is_complete:
            return
        self._chunks.append(data)
        self._size += len(data)
        self._framing_bytes -= len(data) + MAX_CHUNK_FRAMING_BYTES
        if self._parser.get_status_code() >= _FIRST_ERROR_STATUS:
            if self._size > self._max_error_body:
                self._is_truncated = True
                self._finish()
        elif self._size > self._max_body:
            raise TooLarge

    def on_message_complete(self) -> None:
        """Finish the request, unless the response only announces another one (1xx)."""
        if self._is_complete:
            return
        if self._parser.get_status_code() < _FIRST_FINAL_STATUS:
            self._begin_message()
        else:
            self._finish()

    def _has_length(self) -> bool:
        headers: Mapping[str, str] = self._headers or {}
        return "Content-Length" in headers or "Transfer-Encoding" in headers

    def _finish(self) -> None:
        self._is_complete = True
        if self._waiter is None or self._waiter.done():
            return
        headers: CIMultiDict[str] = CIMultiDict() if self._headers is None else self._headers
        status: int = self._parser.get_status_code()
        self._responses.add(self._waiter, RawResponse(status, headers, self._chunks, self._is_truncated))
        is_unsent = self._transport is not None and self._transport.get_write_buffer_size() > 0
        # The next request would wait behind the rest of this one, which the server has not read.
        if self._is_truncated or is_unsent or not self._parser.should_keep_alive():
            self.close()

    def _fail(self, error: BaseException) -> None:
        if self._waiter is not None and not self._is_complete and not self._waiter.done():
            self._waiter.set_exception(error)
        self.close()


class ConnectionPool:
    """The connections of one event loop. An idle one is reused; the one that was used last comes first.

    Args:
        idle_seconds: Seconds after which an idle connection is closed.
        connect_seconds: Seconds in which a connection must be open.
    """

    def __init__(self, idle_seconds: float, connect_seconds: float) -> None:
        self._idle_seconds = idle_seconds
        self._connect_seconds = connect_seconds
        self._idle: dict[tuple[str, int], list[Connection]] = {}
        self._addresses: dict[tuple[str, int], tuple[float, list[AddressInfo]]] = {}
        self._lookups: dict[tuple[str, int], asyncio.Task[list[AddressInfo]]] = {}
        self._sweep: asyncio.Handle | None = None
        self._responses = ResponseQueue()
        self._create_connection = partial(Connection, self._responses)

    @property
    def has_waiting_responses(self) -> bool:
        """Whether responses have arrived with which their requests have not continued yet."""
        return len(self._responses) > 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        await self.close_idle()

    async def close_idle(self) -> None:
        """Close the connections that are idle now, a few per pass of the event loop."""
        now = time.monotonic()
        # Transports close in the next pass of the event loop.
        while self._close_some(now):  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0)

    async def connect(self, target: Target) -> Connection:
        """Return an idle connection to *target*, or a new one; raises `OSError` if none can be opened."""
        idle = self._idle.get((target.host, target.port))
        while idle:
            connection = idle.pop()
            if connection.is_open and time.monotonic() - connection.idle_since < self._idle_seconds:
                return connection
            connection.close()
        async with asyncio.timeout(self._connect_seconds):
            return await self._open(target)

    def release(self, target: Target, connection: Connection) -> None:
        """Keep *connection* for the next request, if it is still open."""
        if not connection.is_open:
            return
        connection.idle_since = time.monotonic()
        idle = self._idle.setdefault((target.host, target.port), [])
        if len(idle) >= MAX_IDLE_CONNECTIONS:
            connection.close()
            return
        idle.append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._close_idle)

    def _close_idle(self) -> None:
        """Close connections that have been idle for too long, and come back while there are others."""
        loop, closed = asyncio.get_running_loop(), self._close_some(time.monotonic() - self._idle_seconds)
        if not self._idle:
            self._sweep = None
        elif closed:
            self._sweep = loop.call_soon(self._close_idle)
        else:
            self._sweep = loop.call_later(SWEEP_SECONDS, self._close_idle)

    def _close_some(self, oldest: float) -> int:
        """Close connections that have been idle since *oldest* or longer, and return their number.

        If all of ten thousand connections were closed in one pass of the event loop, it would take most of a second.
        """
        closed = 0
        for key, connections in list(self._idle.items()):
            # The connections are in the order in which they became idle.
            candidates = islice(connections, MAX_CLOSES_PER_PASS - closed)
            expired = list(takewhile(lambda connection: connection.idle_since <= oldest, candidates))
            for connection in expired:
                connection.close()
            closed += len(expired)
            del connections[: len(expired)]
            if not connections:
                del self._idle[key]
        return closed

    async def _open(self, target: Target) -> Connection:
        """Open a connection to an address of *target*.

        The next address is tried as soon as one fails, or does not answer within `NEXT_ADDRESS_SECONDS` (RFC 8305).
        """
        loop = asyncio.get_running_loop()
        addresses = await self._resolve(target)
        if len(addresses) > 1:
            chosen = await start_connection(addresses, happy_eyeballs_delay=NEXT_ADDRESS_SECONDS, loop=loop)
            _, connection = await loop.create_connection(self._create_connection, sock=chosen)
        else:
            host = str(addresses[0][4][0]) if addresses else target.host
            _, connection = await loop.create_connection(self._create_connection, host, target.port)
        return connection

    async def _resolve(self, target: Target) -> list[AddressInfo]:
        """Return the addresses of a host name; none if *target* has an address instead."""
        try:
            ip_address(target.host)
        except ValueError:
            pass
        else:
            return []
        key = target.host, target.port
        until, addresses = self._addresses.get(key, (0.0, []))
        if time.monotonic() < until:
            return addresses
        lookup = self._lookups.get(key)
        if lookup is None:
            lookup = self._lookups[key] = asyncio.ensure_future(self._look_up(key))
            lookup.add_done_callback(lambda _: self._lookups.pop(key))
        # The other requests go on if this one is cancelled.
        return await asyncio.shield(lookup)

    async def _look_up(self, key: tuple[str, int]) -> list[AddressInfo]:
        found = await asyncio.get_running_loop().getaddrinfo(*key, type=socket.SOCK_STREAM)
        now = time.monotonic()
        self._addresses = {host: known for host, known in self._addresses.items() if known[0] > now}
        self._addresses[key] = now + RESOLUTION_SECONDS, list(dict.fromkeys(found))
        return self._addresses[key][1]
