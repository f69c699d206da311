"""A refusal: what is said before any route is asked, in the form that the clients of the path read."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastapi import Request

from gymsdk.convert import anthropic_stream, api
from gymsdk.convert.api import ApiError
from gymsdk.errors import UsageError
from gymsdk.http.tls import WILDCARD_HOSTS, is_loopback
from gymsdk.servers import routing
from gymsdk.servers.app import CLIENT_CLOSED_REQUEST, RequestRejected, json_response
from gymsdk.servers.routing import ROLLOUT_PREFIX_PATTERN, App, Receive, Scope, Send
from gymsdk.types import Item

LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})

UNKNOWN_HOST_MESSAGE = "this server is not called {name!r}: ask it at 127.0.0.1, or serve it with --host"
FOREIGN_ORIGIN_MESSAGE = "a page of {name!r} may not ask this server"
NOT_JSON_MESSAGE = "a page has to send JSON as application/json"


def allowed_hosts(*hosts: str) -> frozenset[str] | None:
    """Give the names of a server that listens at *hosts*, `None` where it listens everywhere: then any may be its."""
    if WILDCARD_HOSTS & set(hosts):
        return None
    own = set() if all(is_loopback(host) or host in LOOPBACK_NAMES for host in hosts) else {socket.gethostname()}
    return frozenset(each.lower() for each in (*hosts, *own, *LOOPBACK_NAMES))


class HostCheck:
    """Lets through what asks for one of *allowed* names, or of a loopback address, and comes from no other site.

    A name of somebody else's may lead here too (DNS rebinding), and then a browser takes this server for a part of
    that site.
    """

    def __init__(self, app: App, allowed: Iterable[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        refused = self._find_rejection(scope) if scope["type"] == "http" else None
        if refused is None:
            await self._app(scope, receive, send)
            return
        status, sentence = refused
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
        # A page needs nobody's leave to send what is no JSON by its type.
        kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        return (403, NOT_JSON_MESSAGE) if scope["method"] == "POST" and kind not in {"", "application/json"} else None

    def _is_allowed(self, name: str) -> bool:
        return name in self._allowed or is_loopback(name)


def _hostname_of(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


PREFIX_PATTERN = re.compile(r"(/(?!\.+(/|$))[A-Za-z0-9._~-]+)+")


def parse_prefix(given: str) -> str:
    """Give the path *given*, without a slash at its end; raises `UsageError` where it is none."""
    path = given.rstrip("/")
    if path and not PREFIX_PATTERN.fullmatch(path):
        raise UsageError(f"--root-path {given}: write the path that a proxy shows the servers at, as in /gym")
    return path


def server_prefix(path: str, name: str | None) -> str:
    """Give the prefix of the server *name*: of the head, which has none, it is *path* itself."""
    return f"{path}/{name}" if path and name else path


class PrefixMiddleware:
    """Answers by *app* what is asked at *path*, whether the proxy has taken that off by then or not."""

    def __init__(self, app: App, path: str) -> None:
        self._app = app
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http":
            asked = scope["path"]
            rest = asked.removeprefix(self._path) if f"{asked}/".startswith(f"{self._path}/") else asked
            scope = {**scope, "path": rest or "/", "raw_path": (rest or "/").encode(), "root_path": self._path}
        await self._app(scope, receive, send)


T = TypeVar("T")


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Give what *work* gives; it is cancelled where the client of *request*, its body read, goes away before."""
    asking, gone = asyncio.current_task(), False
    assert asking is not None, "a request is answered in a task"

    async def watch() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        asking.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not gone:
            raise
        asking.uncancel()
        raise RequestRejected(CLIENT_CLOSED_REQUEST, "the client went away before the answer") from None
    finally:
        watching.cancel()


STOPPED_ERROR = ApiError(503, "the server has been stopped; ask again when it is back", code="server_stopped")
"""What those are told whose requests its end cuts short."""


def build_error_body(path: str, trouble: ApiError, *, anthropic: bool = False) -> Item:
    """Give the body that tells those who ask for *path* of *trouble*.

    Beneath `/v1/` that is the form of its API; where no path says which, of Anthropic's where the client is one of
    theirs, so *anthropic*.
    """
    asked = ROLLOUT_PREFIX_PATTERN.sub("", path)
    if asked == "/v1/messages" or asked.startswith("/v1/messages/"):
        return anthropic_stream.build_error(trouble)
    if not asked.startswith("/v1/"):
        return {"detail": trouble.message}
    return (
        anthropic_stream.build_error(trouble) if anthropic and not _is_openai_path(asked) else api.build_error(trouble)
    )


def _is_openai_path(path: str) -> bool:
    return path.startswith(("/v1/chat/", "/v1/responses"))


def describe_missing_route(path: str, method: str, allowed: str | None) -> str:
    """Give the sentence that refuses *method* at *path*, where *allowed* are answered, or nothing is."""
    if allowed:
        return f"{method} is not answered at {path}; ask it with {allowed.replace(',', ' or ')}"
    return f"nothing is answered at {path}; this server has /v1/responses, /v1/chat/completions and /v1/messages"
