"""Forwarding: a request for a session that another instance has, handed on to that one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from pydantic import SecretStr
from starlette.requests import ClientDisconnect

from gymsdk import credentials, http
from gymsdk.errors import EpisodeError
from gymsdk.servers.app import Refused, answer, arrived, refusal_of
from gymsdk.servers.door.cookies import brought_by, instance_of
from gymsdk.servers.door.large_bodies import budget
from gymsdk.servers.door.routing import PREFIX, App, Receive, Scope, Send
from gymsdk.servers.nodes import waiting
from gymsdk.servers.wire.mcp import TOKEN

ONCE = "x-gymsdk-forwarded"
"""The header of what has been handed on: it is answered where it comes to, whoever has the session."""

BELONGING = frozenset({"/aggregate_metrics"})
"""Posts that belong to no session."""

OWN = frozenset(
    {
        "host",
        "connection",
        "keep-alive",
        "transfer-encoding",
        "te",
        "trailer",
        "upgrade",
        "content-length",
        "accept-encoding",
    }
)
THEIRS = OWN | {"date", "server", "content-encoding"}
"""Headers that belong to one connection, of a request and of an answer."""

MOST = 4
"""Instances of one request that are looked for."""

LONGEST = 3600.0
"""Seconds that an answer may take: the instance has bounds of its own."""

PAUSE = 1.0


@dataclass(frozen=True, slots=True)
class Peers:
    """The other instances of a server, as the one with the id *instance* knows them.

    *url* gives where one is by its id, `None` where it is gone: the head does not know it, and it is silent. They are
    asked with the *token*, or this process's own.
    """

    instance: str
    url: Callable[[str], Awaitable[str | None]]
    token: SecretStr | str | None = None
    watch_seconds: float = waiting.WATCH


class Forwarding:
    """Hands a request on whose session one of *peers* has, by the *cookie* of that name or the key of `/mcp`.

    Where that one is gone, the session is, which is then said here. What was handed on once is not again.
    """

    def __init__(self, app: App, cookie: str, peers: Peers) -> None:
        self._app = app
        self._cookie = cookie
        self._peers = peers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        other = await self._find_owner(scope) if scope["type"] == "http" and scope["method"] == "POST" else None
        if other is None:
            await self._app(scope, receive, send)
            return
        try:
            await self._forward(other, scope, receive, send)
        finally:
            budget().release(scope)

    async def _forward(self, other: tuple[str, str], scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by the instance *other*, or here if nobody is there."""
        request = Request(scope, receive)
        try:
            body = await arrived(request)
        except Refused as refused:
            await refusal_of(refused)(scope, receive, send)
            return
        except ClientDisconnect:
            return
        found = await self._send_to(*other, request, body)
        if found is None:
            await self._app(scope, _again(body, receive), send)
        else:
            await found(scope, receive, send)

    async def _find_owner(self, scope: Scope) -> tuple[str, str] | None:
        """Give the instance that has the session of a request, and where; `None` where it is this one, or none."""
        for other in self._find_instances(scope):
            if (url := await self._peers.url(other)) is not None:
                return other, url
        return None

    def _find_instances(self, scope: Scope) -> list[str]:
        """Give the instances that a request names; none where this one is among them."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path = PREFIX.sub("", scope["path"])
        if ONCE in headers or path in BELONGING:
            return []
        if path == "/mcp":
            tokens: Iterable[str] = [headers.get(TOKEN.lower(), "")]
        else:
            tokens = brought_by(scope, self._cookie)
        instances = [found for token in tokens if (found := instance_of(token)) is not None]
        return [] if self._peers.instance in instances else instances[:MOST]

    async def _send_to(self, other: str, url: str, request: Request, body: bytes) -> Response | None:
        """Give the answer of the instance *other* at *url*, `None` where nobody is there."""

        async def known() -> bool:
            return await self._peers.url(other) is not None

        headers = _joined(_kept(request.headers.items(), OWN))
        # That of the request stays with whoever checked it.
        carried: http.Headers = {**headers, ONCE: "1", **credentials.carried(self._peers.token)}
        try:
            target = _target(url, request.scope)
            asked = http.post(target, body, headers=carried, timeout=LONGEST, retry=http.ONCE, once=True)
            told = await waiting.answered(asked, url, known, watch=self._peers.watch_seconds)
        except http.Unsent:
            return None
        except EpisodeError as error:
            # It may have been done: whoever asked decides whether it can be asked for again.
            return _broken(error)
        found = Response(told.body, status_code=told.status)
        kept = _kept(told.headers.items(), THEIRS)
        found.raw_headers += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in kept]
        return found


def _target(url: str, scope: Scope) -> str:
    """Give what a request asks for, at the instance at *url*: nothing in it is taken for another host or port."""
    path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
    query = scope.get("query_string", b"").decode("latin-1")
    return f"{url.rstrip('/')}/{path.removeprefix('/')}" + (f"?{query}" if query else "")


def _kept(headers: Iterable[tuple[str, str]], own: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield those of *headers* that belong to what is said, and not to one connection, as those *own* do."""
    lower = [(name.lower(), value) for name, value in headers]
    named = {word.strip().lower() for name, value in lower if name == "connection" for word in value.split(",")}
    for name, value in lower:
        if name not in own and name not in named and not name.startswith("proxy-"):
            yield name, value


def _joined(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Give *headers*, each name once: what came in several is one list by then."""
    found: dict[str, str] = {}
    for name, value in headers:
        between = "; " if name == "cookie" else ", "
        title = _titled(name)
        found[title] = f"{found[title]}{between}{value}" if title in found else value
    return found


def _titled(name: str) -> str:
    """Give a header's *name* as our own client writes it, so that none is sent twice."""
    return "Content-Type" if name == "content-type" else name


def _broken(error: EpisodeError) -> Response:
    detail = f"the instance that has the session broke off: {error}"
    about = {"stage": "step", "kind": "server_unreachable", "retryable": True, "outcome": "failed"}
    found = answer({"detail": detail, **about}, status=503)
    found.headers["retry-after"] = f"{PAUSE:g}"
    return found


def _again(body: bytes, receive: Receive) -> Receive:
    """Give what a request's *body* comes by that has been read before."""
    told = False

    async def received() -> MutableMapping[str, Any]:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return received
