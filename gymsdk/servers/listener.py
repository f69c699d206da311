"""A listener: an app on a socket of its own, beside others on one event loop."""

from __future__ import annotations

import asyncio
import errno
import random
import socket
import ssl
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import h11
import uvicorn
from fastapi import Response
from h11 import LocalProtocolError
from uvicorn.protocols.http.h11_impl import H11Protocol

from gymsdk.convert.api import ApiError
from gymsdk.deadlines import CANCEL_GRACE_SECONDS
from gymsdk.descriptors import ListeningSocket, install_exhaustion_handler
from gymsdk.errors import UsageError
from gymsdk.http import tls as trust
from gymsdk.http.client import NOT_STARTED_HEADER
from gymsdk.jsonl import dump_json
from gymsdk.servers import middleware, routing
from gymsdk.servers.app import BODY_BUDGET_KEY, BODY_LIMIT_KEY, json_response
from gymsdk.servers.auth import NO_SECURITY, AuthMiddleware, Security
from gymsdk.servers.limits import Pacer
from gymsdk.servers.middleware import STOPPED_ERROR, HostCheck, PrefixMiddleware, build_error_body
from gymsdk.servers.routing import App, Receive, Scope, Send

FIRST_REQUEST_SECONDS = 120.0
"""Seconds in which a request must have begun: all of its headers, since the connection or the request before.

A client that opens thousands of connections at once sends its first request long after it has connected.
"""

UNREAD_BODY_SECONDS = 30.0
"""Seconds in which the rest of a request must have come that has been answered by then."""

MAX_HELD_BYTES = 64 * 1024
"""Bytes of a request that waits for its start beyond which no more is read from its connection."""

MAX_RETRY_AFTER_SECONDS = 60
"""Seconds that a refused client is asked to wait at most."""

STOPPING_RETRY_AFTER_SECONDS = 5
"""Seconds after which a client may come back whom a server refused because it stops."""

TOO_MANY_CONNECTIONS_MESSAGE = "this server has all the connections it may have; close some, or try again"
STOPPING_MESSAGE = "the server is being stopped; send the request again"


class Connection(H11Protocol):
    """A connection that is closed if no request arrives in time, and whose POST requests *pacer* starts.

    Requests of other methods, which ask for health and figures or report a node, start at once: they are cheap and must
    be answered while POST requests wait. A POST request waits as raw bytes until its turn, or until its client
    disconnects.

    A connection beyond the limit is refused with 503 by itself; uvicorn would refuse every further request instead.
    """

    _idle: asyncio.TimerHandle | None = None
    _rest_of: asyncio.TimerHandle | None = None
    _held: bytearray | None = None

    def __init__(self, *args: Any, pacer: Pacer, **given: Any) -> None:
        super().__init__(*args, **given)
        self._pacer = pacer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Begin to wait for a request."""
        most, self.limit_concurrency = self.limit_concurrency, None
        super().connection_made(transport)
        if most is not None and len(self.connections) > most:
            transport.write(_build_retry_later_response(TOO_MANY_CONNECTIONS_MESSAGE, self._pacer.drain_time()))
            transport.close()
            return
        self._start_idle_timer()

    def on_response_complete(self) -> None:
        """Wait for the rest of a request that nobody read to its end, and not for ever."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and self._rest_of is None:
            self._rest_of = self.loop.call_later(UNREAD_BODY_SECONDS, self._close_idle)

    def data_received(self, data: bytes) -> None:
        """Pass *data* on, or hold it until its request may start."""
        if self._held is not None:
            self._held += data
            if len(self._held) > MAX_HELD_BYTES:
                self.flow.pause_reading()
        elif self.conn.their_state is h11.IDLE and data.startswith(b"POST"):
            # The client has kept its time: from now on the server makes it wait.
            self._start_body_timer()
            self._unset_keepalive_if_required()
            self._held = bytearray(data)
            self._pacer.start(self, self._start)
        else:
            self._receive(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers, and give up the place in the queue."""
        self._held = None
        self._pacer.drop(self)
        self._start_body_timer()
        if self._rest_of is not None:
            self._rest_of.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close an idle connection; refuse a request that waits."""
        if self._held is None:
            super().shutdown()
            return
        self.transport.write(_build_retry_later_response(STOPPING_MESSAGE, STOPPING_RETRY_AFTER_SECONDS))
        self.transport.close()

    def _start(self) -> None:
        """Pass on the request that was held."""
        held, self._held = self._held, None
        if held is not None and not self.transport.is_closing():
            self.flow.resume_reading()
            self._receive(bytes(held))

    def _receive(self, data: bytes) -> None:
        super().data_received(data)
        # What is no request yet does not prolong the wait for one.
        self._start_idle_timer()

    def _start_idle_timer(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._start_body_timer()
        elif self._idle is None:
            self._idle = self.loop.call_later(FIRST_REQUEST_SECONDS, self._give_up)

    def _start_body_timer(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _close_idle(self) -> None:
        self._rest_of = None
        if self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE:
            self.transport.close()

    def _give_up(self) -> None:
        self._idle = None
        if self.conn.their_state is h11.IDLE and self._held is None:
            self.transport.close()


def _build_retry_later_response(detail: str, seconds: float) -> bytes:
    """Return the response that refuses a request which has not been started, to be sent again after some *seconds*."""
    body = dump_json({"detail": detail, "stage": "admission", "kind": "too_many", "retryable": True})
    lines = [
        "HTTP/1.1 503 Service Unavailable",
        "content-type: application/json",
        f"retry-after: {min(MAX_RETRY_AFTER_SECONDS, max(1, round(seconds)))}",
        f"{NOT_STARTED_HEADER}: 1",
        "connection: close",
        f"content-length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


SOCKET_BACKLOG = 4096
"""Connections that may wait to be accepted: a client whom a full queue turns away waits a second."""

MAX_ACCEPTS_PER_PASS = 256
"""Connections that are accepted in one pass of the event loop: asyncio would accept the whole backlog at once."""

KEEP_ALIVE_SECONDS = 30
"""Seconds a connection is kept that nobody asks anything on."""

INVALID_PATH_ERROR = ApiError(
    400, "a request asks for a path, which begins with a slash; write no other address in its place"
)
"""What those are told who ask for something else: for a proxy, for all of the server."""

HEADERS_TOO_LARGE_ERROR = ApiError(431, "the request has too many headers, or too long ones")

_APP_FAILED = "its app failed as it began; the log says why"
"""Why a server did not start whose app raised an error in its lifespan."""

TICK_SECONDS = 1.0
"""Seconds between two looks at the clock for the `Date` of the answers."""


def bind_socket(host: str, port: int = 0, *, what: str = "a server") -> socket.socket:
    """Give a socket for *what* that listens at *host* and *port*, 0 for any that is free; raises `UsageError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # It sets SO_REUSEADDR: the connections of a process that was killed do not keep its port.
        listening = socket.create_server((host, port), family=family, backlog=SOCKET_BACKLOG)
    except OSError as error:
        raise UsageError(f"{what} cannot listen: {_format_bind_error(host, port, error)}") from None
    # What it accepts inherits it, and asyncio does not set it there: without, an answer of two writes takes 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ListeningSocket.from_socket(listening)


def bind_socket_in_range(
    host: str, low: int, high: int, *, but: Collection[int] = (), what: str = "a server"
) -> socket.socket:
    """Give a socket for *what* at a port from *low* to *high* that is free, and none of *but*; raises `UsageError`."""
    ports = [port for port in range(low, high + 1) if port not in but]
    for port in random.sample(ports, len(ports)):
        try:
            return bind_socket(host, port, what=what)
        except UsageError:
            continue
    raise UsageError(f"{what} cannot listen: no port of {host} from {low} to {high} is free; widen the range")


def socket_port(at: socket.socket) -> int:
    """Give the port that *at* listens at."""
    port: int = at.getsockname()[1]
    return port


def socket_host(at: socket.socket, told: str) -> str:
    """Give the host that *at* listens at, as it was *told* where that is the same."""
    bound_at: str = at.getsockname()[0]
    if bound_at == told or not told:
        return told
    try:
        named = {each[4][0] for each in socket.getaddrinfo(told, None)}
    except OSError:
        return bound_at
    return told if bound_at in named else bound_at


def _format_bind_error(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use; stop what listens there, or choose another port"
    if error.errno in {errno.EACCES, errno.EPERM}:
        return f"port {port} of {host} may not be used by this user; choose one above 1023"
    return f"{host} is no address of this machine ({error.strerror or error}); listen on 127.0.0.1"


class Listener:
    """Answers what comes to the socket *at* by *app*; requests under way get *grace* seconds to end when it does.

    *host* is what it was told to listen at, where that is a name, *also* what else it is called; *safety* says who may
    ask, and how much. A proxy shows it at *path*.
    """

    def __init__(
        self,
        app: App,
        at: socket.socket,
        *,
        grace: float,
        host: str | None = None,
        also: Sequence[str] = (),
        safety: Security = NO_SECURITY,
        path: str = "",
    ) -> None:
        self._bound_at: str = at.getsockname()[0]
        allowed = middleware.allowed_hosts(self._bound_at, *([host] if host else []), *also)
        named = app if allowed is None else HostCheck(app, allowed)
        let_in = named if safety.token is None else AuthMiddleware(named, safety.token)
        self._app = PrefixMiddleware(let_in, path) if path else let_in
        self._path = path
        self._at = at
        self._also = [*([host] if host else []), *also]
        self._grace = grace
        self._safety = safety
        self._context = safety.tls.create_ssl_context() if safety.tls else None
        self._answering: set[asyncio.Task[Any]] = set()
        self._ending = False

    async def run(self, up: asyncio.Event, over: asyncio.Event) -> None:
        """Set *up* once it listens, answer until it is *over*, and end with the requests that are under way."""
        install_exhaustion_handler(asyncio.get_running_loop())
        server = _Server(self._build_config(), up, over)
        tls = self._safety.tls
        with trust.trust_own_certificate(self._bound_at, tls.certificate, self._also) if tls else nullcontext():
            await self._run(server, over)

    async def _run(self, server: _Server, over: asyncio.Event) -> None:
        serving = asyncio.ensure_future(server.serve([self._at]))
        try:
            await asyncio.wait({serving, ending := asyncio.ensure_future(over.wait())}, return_when="FIRST_COMPLETED")
            ending.cancel()
            await self._close()
            await serving
        finally:
            serving.cancel()
            self._at.close()

    async def _close(self) -> None:
        self._ending = True
        # A moment for what is answered at once anyway.
        if self._answering:
            await asyncio.wait(set(self._answering), timeout=self._grace)
        late = set(self._answering)
        for each in late:
            each.cancel()
        if late:
            await asyncio.wait(late, timeout=CANCEL_GRACE_SECONDS)

    def _build_config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self._handle_request,
            interface="asgi3",
            lifespan="on",
            http=partial(Connection, pacer=Pacer()),  # type: ignore[arg-type]  # uvicorn calls it like the class
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            # Beyond what `_end` grants: uvicorn's own way to cancel answers 500 and logs a traceback each.
            timeout_graceful_shutdown=round(self._grace + 2 * CANCEL_GRACE_SECONDS) + 1,
            # asyncio accepts as many connections in one pass as it lets wait; `_Server.startup` lets more wait.
            backlog=MAX_ACCEPTS_PER_PASS,
            limit_concurrency=self._safety.limits.connections,
            h11_max_incomplete_event_size=self._safety.limits.header,
            ssl_context_factory=None if self._context is None else self._build_ssl_context,
        )

    def _build_ssl_context(self, _: uvicorn.Config, __: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
        assert self._context is not None, "it is asked where there is one"
        return self._context

    async def _handle_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; one that the end cuts short is told that it may be sent again."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if not scope["raw_path"].startswith(b"/"):
            await self._reject("/", INVALID_PATH_ERROR, scope, receive, send)
            return
        # As it came: what is further inside may take something off it.
        asked = scope["path"].removeprefix(self._path)
        if self._safety.limits.exceeds_header_limits(scope["headers"]):
            await self._reject(asked, HEADERS_TOO_LARGE_ERROR, scope, receive, send)
            return
        scope[BODY_LIMIT_KEY], scope[BODY_BUDGET_KEY] = self._safety.limits.body, self._safety.limits.bodies
        task, begun = asyncio.current_task(), False
        assert task is not None, "an app is called in a task"
        self._answering.add(task)

        async def sending(message: MutableMapping[str, Any]) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except asyncio.CancelledError:
            if begun or not self._ending:
                raise
            await _build_rejection(asked, STOPPED_ERROR, retry_after=5)(scope, receive, send)
        except LocalProtocolError:
            # What followed the request was no HTTP, and has been answered 400 meanwhile: nobody waits for another.
            await _wait_for_disconnect(receive)
        finally:
            self._answering.discard(task)

    async def _reject(self, path: str, trouble: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        routing.record_rejection(scope, trouble.status)
        await _build_rejection(path, trouble)(scope, receive, send)


def _build_rejection(path: str, trouble: ApiError, *, retry_after: int | None = None) -> Response:
    headers = {} if retry_after is None else {"retry-after": str(retry_after)}
    return json_response(build_error_body(path, trouble), status=trouble.status, headers=headers)


async def _wait_for_disconnect(receive: Receive) -> None:
    async with asyncio.timeout(CANCEL_GRACE_SECONDS):
        while (await receive())["type"] != "http.disconnect":
            pass


class _Server(uvicorn.Server):
    """uvicorn's server, told by events instead of signals, which are the whole process's."""

    def __init__(self, config: uvicorn.Config, up: asyncio.Event, over: asyncio.Event) -> None:
        super().__init__(config)
        self._up = up
        self._over = over

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and let more connections wait to be accepted than one pass accepts.

        Raises:
            RuntimeError: The app failed when it started.
        """
        try:
            await super().startup(sockets)
        except SystemExit:
            # In a task, `SystemExit` would end the process.
            raise RuntimeError(_APP_FAILED) from None
        # Older versions of uvicorn raise nothing when the app fails.
        if self.lifespan.should_exit:
            raise RuntimeError(_APP_FAILED)
        for each in sockets or ():
            each.listen(SOCKET_BACKLOG)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield

    async def main_loop(self) -> None:
        """Serve until it is over, looking at the clock once a second: a dozen idle servers cost no CPU."""
        await self.on_tick(0)
        self._up.set()
        while not self._over.is_set():
            try:
                await asyncio.wait_for(self._over.wait(), TICK_SECONDS)
            except TimeoutError:
                await self.on_tick(0)
