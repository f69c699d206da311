"""Checks on requests before they reach a server's routes: host names, proxy prefixes, disconnects, error bodies."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastapi import Request

from gymsdk.convert import api
from gymsdk.convert.anthropic import build_error
from gymsdk.convert.api import ApiError
from gymsdk.http.tls import WILDCARD_HOSTS, is_loopback
from gymsdk.servers import routing
from gymsdk.servers.app import CLIENT_CLOSED_REQUEST, RequestRejected, json_response
from gymsdk.servers.routing import ROLLOUT_PREFIX_PATTERN, App, Receive, Scope, Send
from gymsdk.types import Item

LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})

UNKNOWN_HOST_MESSAGE = (
    "this server does not answer for the host {name!r}: use 127.0.0.1, or start the server with --host"
)
FOREIGN_ORIGIN_MESSAGE = "web pages of {name!r} may not send requests to this server"
NOT_JSON_MESSAGE = "a web page must send JSON as application/json"


T = TypeVar("T")

STOPPED_ERROR = ApiError(
    503, "the server has been stopped; send the request again when it is back", code="server_stopped"
)
"""Returned to requests that are running when the server stops."""


def allowed_hosts(*hosts: str) -> frozenset[str] | None:
    """Return the host names of a server that listens at `hosts`; `None` if it listens on all addresses."""
    if WILDCARD_HOSTS & set(hosts):
        return None
    hostname = set() if all(is_loopback(host) or host in LOOPBACK_NAMES for host in hosts) else {socket.gethostname()}
    return frozenset(name.lower() for name in (*hosts, *hostname, *LOOPBACK_NAMES))


class HostCheck:
    """ASGI middleware that rejects requests for another host name, and requests from web pages of other sites.

    This prevents DNS rebinding: another site's host name can resolve to this server, and a browser would then treat the
    server as part of that site. Loopback addresses are always allowed.

    Args:
        app: The app.
        allowed: The server's host names.
    """

    def __init__(self, app: App, allowed: Iterable[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or reject it."""
        rejection = self._find_rejection(scope) if scope["type"] == "http" else None
        if rejection is None:
            await self._app(scope, receive, send)
            return
        status, sentence = rejection
        routing.record_rejection(scope, status)
        await json_response({"detail": sentence}, status=status)(scope, receive, send)

    def _find_rejection(self, scope: Scope) -> tuple[int, str] | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host"), headers.get(b"origin")
        if host and not self._is_allowed(name := _hostname_of("//" + host)):
            return 421, UNKNOWN_HOST_MESSAGE.format(name=name[:80])
        if origin is None:
            return None
        if not self._is_allowed(name := _hostname_of(origin)):
            return 403, FOREIGN_ORIGIN_MESSAGE.format(name=(name or origin)[:80])
        # Browsers send other content types across sites without a preflight request.
        kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        return (403, NOT_JSON_MESSAGE) if scope["method"] == "POST" and kind not in {"", "application/json"} else None

    def _is_allowed(self, name: str) -> bool:
        return name in self._allowed or is_loopback(name)


def _hostname_of(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


def server_prefix(path: str, name: str | None) -> str:
    """Return the path prefix of one server: the head, with no `name`, is at `path` itself."""
    return f"{path}/{name}" if path and name else path


class PrefixMiddleware:
    """ASGI middleware that strips the proxy's path prefix, if the proxy has not stripped it."""

    def __init__(self, app: App, path: str) -> None:
        self._app = app
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http":
            path = scope["path"]
            stripped = path.removeprefix(self._path) if f"{path}/".startswith(f"{self._path}/") else path
            scope = {**scope, "path": stripped or "/", "raw_path": (stripped or "/").encode(), "root_path": self._path}
        await self._app(scope, receive, send)


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it if the client of `request` disconnects.

    Args:
        request: The request; its body has been read.
        work: The coroutine.

    Raises:
        RequestRejected: The client disconnected.
    """
    handler, is_disconnected = asyncio.current_task(), False
    assert handler is not None, "requests are handled in a task"

    async def wait_for_disconnect() -> None:
        nonlocal is_disconnected
        while (await request.receive())["type"] != "http.disconnect":
            pass
        is_disconnected = True
        handler.cancel()

    watcher = asyncio.ensure_future(wait_for_disconnect())
    try:
        return await work
    except asyncio.CancelledError:
        if not is_disconnected:
            raise
        handler.uncancel()
        raise RequestRejected(CLIENT_CLOSED_REQUEST, "the client disconnected before the response") from None
    finally:
        watcher.cancel()


def build_error_body(path: str, error: ApiError, *, anthropic: bool = False) -> Item:
    """Build the error body for a request in the form that the clients of the path expect.

    Below `/v1/` that is the form of the path's API. Where the path names no API, it is Anthropic's form for Anthropic's
    clients and OpenAI's for all others.

    Args:
        path: The request's path.
        error: The error.
        anthropic: Whether the request comes from a client of Anthropic's API.
    """
    endpoint = ROLLOUT_PREFIX_PATTERN.sub("", path)
    if endpoint == "/v1/messages" or endpoint.startswith("/v1/messages/"):
        return build_error(error)
    if not endpoint.startswith("/v1/"):
        return {"detail": error.message}
    return build_error(error) if anthropic and not _is_openai_path(endpoint) else api.build_error(error)


def _is_openai_path(path: str) -> bool:
    return path.startswith(("/v1/chat/", "/v1/responses"))


def describe_missing_route(path: str, method: str, allowed: str | None) -> str:
    """Describe why `method` at `path` has no endpoint; `allowed` are the methods that the path has."""
    if allowed:
        return f"{path} does not accept {method}; use {allowed.replace(',', ' or ')}"
    return f"{path} does not exist; this server has /v1/responses, /v1/chat/completions and /v1/messages"
