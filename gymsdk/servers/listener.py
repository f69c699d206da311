"""Serves an app on a listening socket with uvicorn, beside other servers on the same event loop."""

from __future__ import annotations

import asyncio
import errno
import random
import socket
import ssl
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import uvicorn
from fastapi import Response

from gymsdk.concurrency import CANCEL_GRACE_SECONDS
from gymsdk.config.model import Limits
from gymsdk.convert.api import ApiError
from gymsdk.errors import UsageError
from gymsdk.http import client
from gymsdk.http.pages import allowed_hosts
from gymsdk.http.tls import get_reachable_host, trust_own_certificate
from gymsdk.servers.auth import NO_SECURITY, AuthMiddleware, Security
from gymsdk.servers.connection import Connection, Pacer
from gymsdk.servers.middleware import (
    STOPPED_ERROR,
    HostCheck,
    PrefixMiddleware,
    build_error_body,
    json_response,
)
from gymsdk.servers.request_state import (
    STATE_KEY,
    App,
    Receive,
    RequestState,
    Scope,
    Send,
    ServerState,
    get_state,
    record_rejection,
)
from gymsdk.sockets import SOCKET_BACKLOG, Acceptor

KEEP_ALIVE_SECONDS = 30
"""Seconds that an idle connection stays open."""

INVALID_PATH_ERROR = ApiError(400, "the request target must be a path that begins with a slash")
"""Rejects requests whose target is not a path, such as those meant for a forward proxy."""

HEADERS_TOO_LARGE_ERROR = ApiError(431, "the request has too many headers, or too long ones")

_APP_FAILED = "the app failed at startup; see the log for the reason"
"""Why a server did not start: its lifespan raised an error."""

PROBE_SECONDS = 2.0
"""Seconds that a connection to a server's advertised address may take."""

TICK_SECONDS = 1.0
"""Seconds between updates of the `Date` header."""


def bind_socket(host: str, port: int = 0, *, what: str = "a server") -> socket.socket:
    """Create a listening socket.

    Args:
        host: The address or host name.
        port: The port; 0 for any free port.
        what: The server, for the error message.

    Raises:
        UsageError: The address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # `create_server` sets SO_REUSEADDR, so connections of a killed process do not block its port.
        listener = socket.create_server((host, port), family=family, backlog=SOCKET_BACKLOG)
    except OSError as error:
        raise UsageError(f"{what} cannot listen: {_format_bind_error(host, port, error)}") from None
    # Accepted sockets inherit the option. Without it, a response in two writes takes 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def bind_socket_in_range(
    host: str, low: int, high: int, *, but: Collection[int] = (), what: str = "a server"
) -> socket.socket:
    """Create a listening socket on a random free port from `low` to `high`.

    Args:
        host: The address or host name.
        low: The first port.
        high: The last port.
        but: Ports to leave out.
        what: The server, for the error message.

    Raises:
        UsageError: No port is free.
    """
    ports = [port for port in range(low, high + 1) if port not in but]
    for port in random.sample(ports, len(ports)):
        try:
            return bind_socket(host, port, what=what)
        except UsageError:
            continue
    raise UsageError(f"{what} cannot listen: no port of {host} from {low} to {high} is free; widen the range")


def is_local_host(host: str) -> bool:
    """Return whether `host` is an address of this machine, so that a server can listen there."""
    try:
        bind_socket(host).close()
    except (UsageError, UnicodeError):
        return False
    return True


def check_advertised(what: str, advertised: str | None, host: str, port: int) -> None:
    """Check that clients reach a server at its advertised host, if that is an address of this machine.

    Args:
        what: The server, for the error message.
        advertised: The host in the addresses for clients, if the server listens at another.
        host: The host on which the server listens.
        port: Its port.

    Raises:
        UsageError: Nothing listens at the advertised host.
    """
    # Of another address, such as that of a router that forwards the port, this machine can tell nothing.
    if advertised is None or advertised == host or not is_local_host(advertised):
        return
    try:
        # The socket takes connections as soon as it is bound.
        socket.create_connection((get_reachable_host(advertised), port), PROBE_SECONDS).close()
    except OSError:
        raise UsageError(
            f"{what} listens at {host}, but clients are told {advertised}, where nothing listens on port {port}; set"
            f" default_host or the server's host (--host) to {advertised}, or leave out advertise_host"
            " (--advertise-host)"
        ) from None


def socket_port(at: socket.socket) -> int:
    """Return the port of a listening socket."""
    port: int = at.getsockname()[1]
    return port


def socket_host(at: socket.socket, configured: str) -> str:
    """Return a listening socket's host: the configured name if it resolves to the address, else the address."""
    address: str = at.getsockname()[0]
    if address == configured or not configured:
        return configured
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(configured, None)}
    except OSError:
        return address
    return configured if address in addresses else address


def _format_bind_error(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use; stop the process that listens there, or choose another port"
    if error.errno in {errno.EACCES, errno.EPERM}:
        return f"this user may not use port {port} of {host}; choose a port above 1023"
    return f"{host} is not an address of this machine ({error.strerror or error}); listen on 127.0.0.1"


class Listener:
    """Serves an app on a socket.

    Args:
        app: The app.
        sock: The listening socket.
        grace: Seconds that running requests get to finish when the server stops.
        host: The configured host name.
        extra_hosts: Further host names of the server.
        security: Token, TLS and limits.
        path: The path prefix at which a proxy publishes the server.
    """

    def __init__(
        self,
        app: App,
        sock: socket.socket,
        *,
        grace: float,
        host: str | None = None,
        extra_hosts: Sequence[str] = (),
        security: Security = NO_SECURITY,
        path: str = "",
    ) -> None:
        self._address: str = sock.getsockname()[0]
        allowed = allowed_hosts(self._address, *([host] if host else []), *extra_hosts)
        authenticated = app if security.token is None else AuthMiddleware(app, security.token)
        # Before the token is checked: a page of another site gets the same answer whether it knows the token or not.
        checked = HostCheck(authenticated, allowed)
        self._app = PrefixMiddleware(checked, path) if path else checked
        self._path = path
        self._sock = sock
        self._hosts = [*([host] if host else []), *extra_hosts]
        self._grace = grace
        self._security = security
        self._context = security.tls.create_ssl_context() if security.tls else None
        self._running: set[asyncio.Task[Any]] = set()
        self._is_stopping = False
        self._pacer = Pacer(is_behind=client.has_waiting_responses)
        self._state = ServerState(security.limits, get_admission_seconds=lambda: self._pacer.waited)
        self._server: _Server | None = None

    async def run(self, up: asyncio.Event, over: asyncio.Event) -> None:
        """Set `up` when the server accepts requests, serve until `over` is set, then finish the running requests."""
        server = self._server = _Server(self._build_config(), up, over)
        tls = self._security.tls
        with trust_own_certificate(self._address, tls.certificate, self._hosts) if tls else nullcontext():
            await self._run(server, over)

    def adopt(self, connection: socket.socket) -> None:
        """Serve a connection that another process has accepted."""
        assert self._server is not None, "the listener runs"
        self._server.adopt(connection)

    async def _run(self, server: _Server, over: asyncio.Event) -> None:
        serving = asyncio.ensure_future(server.serve([self._sock]))
        try:
            await asyncio.wait({serving, stopping := asyncio.ensure_future(over.wait())}, return_when="FIRST_COMPLETED")
            stopping.cancel()
            await self._close()
            await serving
        finally:
            serving.cancel()
            self._sock.close()

    async def _close(self) -> None:
        self._is_stopping = True
        # Most requests finish within the grace period.
        if self._running:
            await asyncio.wait(set(self._running), timeout=self._grace)
        unfinished = set(self._running)
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished, timeout=CANCEL_GRACE_SECONDS)

    def _build_config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self._handle_request,
            interface="asgi3",
            lifespan="on",
            http=partial(  # type: ignore[arg-type]  # uvicorn calls it like the class
                Connection, pacer=self._pacer, server=self._state
            ),
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            # Longer than `_close` waits: uvicorn would answer 500 and log a traceback for each request.
            timeout_graceful_shutdown=round(self._grace + 2 * CANCEL_GRACE_SECONDS) + 1,
            limit_concurrency=self._security.limits.connections,
            ssl_context_factory=None if self._context is None else self._build_ssl_context,
        )

    def _build_ssl_context(self, _: uvicorn.Config, __: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
        assert self._context is not None, "only used with TLS"
        return self._context

    async def _handle_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; if the stop interrupts it, tell the client that it can send the request again."""
        if scope["type"] != "http":
            scope[STATE_KEY] = RequestState(self._state)
            await self._app(scope, receive, send)
            return
        state = get_state(scope)
        if not state.is_target_valid:
            await self._reject("/", INVALID_PATH_ERROR, scope, receive, send)
            return
        # Read the path now: middleware may strip prefixes from it.
        path = scope["path"].removeprefix(self._path)
        if _exceeds_header_limits(self._security.limits, scope["headers"]):
            await self._reject(path, HEADERS_TOO_LARGE_ERROR, scope, receive, send)
            return
        task, has_started = asyncio.current_task(), False
        assert task is not None, "an app is called in a task"
        self._running.add(task)

        async def send_tracked(message: MutableMapping[str, Any]) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, send_tracked)
        except asyncio.CancelledError:
            if not self._is_stopping:
                raise
            if has_started:
                # The client must not take the part that it has received for the whole response.
                assert state.connection is not None, "uvicorn calls the listener for its connections"
                state.connection.break_off()
            else:
                await _build_rejection(path, STOPPED_ERROR, retry_after=5)(scope, receive, send)
        finally:
            self._running.discard(task)

    async def _reject(self, path: str, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        record_rejection(scope, error.status)
        await _build_rejection(path, error)(scope, receive, send)


def _exceeds_header_limits(limits: Limits, headers: Sequence[tuple[bytes, bytes]]) -> bool:
    # The connection only bounds headers that arrive in several pieces.
    return len(headers) > limits.headers or sum(map(len, chain.from_iterable(headers))) > limits.header


def _build_rejection(path: str, error: ApiError, *, retry_after: int | None = None) -> Response:
    headers = {} if retry_after is None else {"retry-after": str(retry_after)}
    return json_response(build_error_body(path, error), status=error.status, headers=headers)


class _Server(uvicorn.Server):
    """uvicorn's server, controlled by events: signals belong to the whole process."""

    def __init__(self, config: uvicorn.Config, up: asyncio.Event, over: asyncio.Event) -> None:
        super().__init__(config)
        self._up = up
        self._over = over
        self._acceptors: list[Acceptor] = []

    def adopt(self, connection: socket.socket) -> None:
        """Serve a connection that another process has accepted."""
        self._acceptors[0].adopt(connection)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the app, and accept connections on the sockets.

        Raises:
            RuntimeError: The app failed when it started.
        """
        try:
            await super().startup([])
        except SystemExit:
            # In a task, `SystemExit` would end the process.
            raise RuntimeError(_APP_FAILED) from None
        # Older versions of uvicorn raise nothing when the app fails.
        if self.lifespan.should_exit:
            raise RuntimeError(_APP_FAILED)
        self._acceptors = [Acceptor(each, self._create_connection, self.config.ssl) for each in sockets or ()]
        for acceptor in self._acceptors:
            acceptor.open()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no further connection, finish the running requests, and stop the app."""
        for acceptor in self._acceptors:
            acceptor.close()
        await super().shutdown(sockets)

    def _create_connection(self) -> asyncio.Protocol:
        protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]  # bound by `partial`
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signal handlers unchanged."""
        yield

    async def main_loop(self) -> None:
        """Serve until stopped; one tick per second instead of ten keeps idle servers off the CPU."""
        await self.on_tick(0)
        self._up.set()
        while not self._over.is_set():
            try:
                await asyncio.wait_for(self._over.wait(), TICK_SECONDS)
            except TimeoutError:
                await self.on_tick(0)
