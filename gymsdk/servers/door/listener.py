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

import uvicorn
from fastapi import Response
from h11 import LocalProtocolError

from gymsdk import trust
from gymsdk.bounds import GRACE
from gymsdk.convert.faces.face import Trouble
from gymsdk.descriptors import ListeningSocket, warn_of_exhaustion
from gymsdk.errors import UsageError
from gymsdk.servers.app import LIMIT, TOGETHER, answer
from gymsdk.servers.door import doorstep, guard
from gymsdk.servers.door.auth import Auth
from gymsdk.servers.door.connection import Connection
from gymsdk.servers.door.guard import Guard
from gymsdk.servers.door.pacing import Pacer
from gymsdk.servers.door.prefix import Prefixed
from gymsdk.servers.door.refusals import STOPPED, refusal
from gymsdk.servers.door.routing import App, Receive, Scope, Send
from gymsdk.servers.door.safety import OPEN, Safety

BACKLOG = 4096
"""Connections that may wait to be accepted: a client whom a full queue turns away waits a second."""

ACCEPTED = 256
"""Connections that are accepted in one pass of the event loop: asyncio would accept the whole backlog at once."""

KEEP_ALIVE = 30
"""Seconds a connection is kept that nobody asks anything on."""

NO_PATH = Trouble(400, "a request asks for a path, which begins with a slash; write no other address in its place")
"""What those are told who ask for something else: for a proxy, for all of the server."""

TOO_MUCH = Trouble(431, "the request has too many headers, or too long ones")

_APP_FAILED = "its app failed as it began; the log says why"
"""Why a server did not start whose app raised an error in its lifespan."""

TICK = 1.0
"""Seconds between two looks at the clock for the `Date` of the answers."""


def bound(host: str, port: int = 0, *, what: str = "a server") -> socket.socket:
    """Give a socket for *what* that listens at *host* and *port*, 0 for any that is free; raises `UsageError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # It sets SO_REUSEADDR: the connections of a process that was killed do not keep its port.
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UsageError(f"{what} cannot listen: {_unbound(host, port, error)}") from None
    # What it accepts inherits it, and asyncio does not set it there: without, an answer of two writes takes 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ListeningSocket.from_socket(listening)


def bound_within(host: str, low: int, high: int, *, but: Collection[int] = (), what: str = "a server") -> socket.socket:
    """Give a socket for *what* at a port from *low* to *high* that is free, and none of *but*; raises `UsageError`."""
    ports = [port for port in range(low, high + 1) if port not in but]
    for port in random.sample(ports, len(ports)):
        try:
            return bound(host, port, what=what)
        except UsageError:
            continue
    raise UsageError(f"{what} cannot listen: no port of {host} from {low} to {high} is free; widen the range")


def port_of(at: socket.socket) -> int:
    """Give the port that *at* listens at."""
    port: int = at.getsockname()[1]
    return port


def host_of(at: socket.socket, told: str) -> str:
    """Give the host that *at* listens at, as it was *told* where that is the same."""
    bound_at: str = at.getsockname()[0]
    if bound_at == told or not told:
        return told
    try:
        named = {each[4][0] for each in socket.getaddrinfo(told, None)}
    except OSError:
        return bound_at
    return told if bound_at in named else bound_at


def _unbound(host: str, port: int, error: OSError) -> str:
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
        safety: Safety = OPEN,
        path: str = "",
    ) -> None:
        self._bound_at: str = at.getsockname()[0]
        allowed = guard.names(self._bound_at, *([host] if host else []), *also)
        named = app if allowed is None else Guard(app, allowed)
        let_in = named if safety.token is None else Auth(named, safety.token)
        self._app = Prefixed(let_in, path) if path else let_in
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
        warn_of_exhaustion(asyncio.get_running_loop())
        server = _Server(self._build_config(), up, over)
        tls = self._safety.tls
        with trust.answering(self._bound_at, tls.certificate, self._also) if tls else nullcontext():
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
            await asyncio.wait(late, timeout=GRACE)

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
            timeout_keep_alive=KEEP_ALIVE,
            # Beyond what `_end` grants: uvicorn's own way to cancel answers 500 and logs a traceback each.
            timeout_graceful_shutdown=round(self._grace + 2 * GRACE) + 1,
            # asyncio accepts as many connections in one pass as it lets wait; `_Server.startup` lets more wait.
            backlog=ACCEPTED,
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
            await self._reject("/", NO_PATH, scope, receive, send)
            return
        # As it came: what is further inside may take something off it.
        asked = scope["path"].removeprefix(self._path)
        if self._safety.limits.exceeds_header_limits(scope["headers"]):
            await self._reject(asked, TOO_MUCH, scope, receive, send)
            return
        scope[LIMIT], scope[TOGETHER] = self._safety.limits.body, self._safety.limits.bodies
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
            await _told(asked, STOPPED, retry_after=5)(scope, receive, send)
        except LocalProtocolError:
            # What followed the request was no HTTP, and has been answered 400 meanwhile: nobody waits for another.
            await _left(receive)
        finally:
            self._answering.discard(task)

    async def _reject(self, path: str, trouble: Trouble, scope: Scope, receive: Receive, send: Send) -> None:
        doorstep.refused(scope, trouble.status)
        await _told(path, trouble)(scope, receive, send)


def _told(path: str, trouble: Trouble, *, retry_after: int | None = None) -> Response:
    headers = {} if retry_after is None else {"retry-after": str(retry_after)}
    return answer(refusal(path, trouble), status=trouble.status, headers=headers)


async def _left(receive: Receive) -> None:
    async with asyncio.timeout(GRACE):
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
            each.listen(BACKLOG)

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
                await asyncio.wait_for(self._over.wait(), TICK)
            except TimeoutError:
                await self.on_tick(0)
