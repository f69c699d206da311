"""Forwarding: a request for a session that another instance has, handed on to that one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from pydantic import SecretStr
from starlette.requests import ClientDisconnect

from gymsdk import credentials
from gymsdk.errors import EpisodeError
from gymsdk.http import client
from gymsdk.servers import instances as waiting
from gymsdk.servers.app import RequestRejected, build_rejection, json_response, read_body
from gymsdk.servers.auth import parse_instance, tokens_in_request
from gymsdk.servers.limits import body_budget
from gymsdk.servers.mcp import TOKEN_HEADER
from gymsdk.servers.routing import ROLLOUT_PREFIX_PATTERN, App, Receive, Scope, Send

FORWARDED_HEADER = "x-gymsdk-forwarded"
"""The header of what has been handed on: it is answered where it comes to, whoever has the session."""

FORWARDED_PATHS = frozenset({"/aggregate_metrics"})
"""Posts that belong to no session."""

REQUEST_HOP_HEADERS = frozenset(
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
RESPONSE_HOP_HEADERS = REQUEST_HOP_HEADERS | {"date", "server", "content-encoding"}
"""Headers that belong to one connection, of a request and of an answer."""

MAX_INSTANCES = 4
"""Instances of one request that are looked for."""

MAX_FORWARD_SECONDS = 3600.0
"""Seconds that an answer may take: the instance has bounds of its own."""

RETRY_AFTER_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Peers:
    """The other instances of a server, as the one with the id *instance* knows them.

    *url* gives where one is by its id, `None` where it is gone: the head does not know it, and it is silent. They are
    asked with the *token*, or this process's own.
    """

    instance: str
    url: Callable[[str], Awaitable[str | None]]
    token: SecretStr | str | None = None
    watch_seconds: float = waiting.WATCH_SECONDS


class ForwardingMiddleware:
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
            body_budget().release(scope)

    async def _forward(self, other: tuple[str, str], scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by the instance *other*, or here if nobody is there."""
        request = Request(scope, receive)
        try:
            body = await read_body(request)
        except RequestRejected as refused:
            await build_rejection(refused)(scope, receive, send)
            return
        except ClientDisconnect:
            return
        found = await self._send_to(*other, request, body)
        if found is None:
            await self._app(scope, _replay_body(body, receive), send)
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
        path = ROLLOUT_PREFIX_PATTERN.sub("", scope["path"])
        if FORWARDED_HEADER in headers or path in FORWARDED_PATHS:
            return []
        if path == "/mcp":
            tokens: Iterable[str] = [headers.get(TOKEN_HEADER.lower(), "")]
        else:
            tokens = tokens_in_request(scope, self._cookie)
        instances = [found for token in tokens if (found := parse_instance(token)) is not None]
        return [] if self._peers.instance in instances else instances[:MAX_INSTANCES]

    async def _send_to(self, other: str, url: str, request: Request, body: bytes) -> Response | None:
        """Give the answer of the instance *other* at *url*, `None` where nobody is there."""

        async def known() -> bool:
            return await self._peers.url(other) is not None

        headers = _join_headers(_filter_headers(request.headers.items(), REQUEST_HOP_HEADERS))
        # That of the request stays with whoever checked it.
        carried: client.Headers = {
            **headers,
            FORWARDED_HEADER: "1",
            **credentials.resolve_auth_headers(self._peers.token),
        }
        try:
            target = _build_url(url, request.scope)
            asked = client.post(
                target, body, headers=carried, timeout=MAX_FORWARD_SECONDS, retry=client.NO_RETRY, once=True
            )
            told = await waiting.wait_while_alive(asked, url, known, watch=self._peers.watch_seconds)
        except client.NotSent:
            return None
        except EpisodeError as error:
            # It may have been done: whoever asked decides whether it can be asked for again.
            return _failure_response(error)
        found = Response(told.body, status_code=told.status)
        kept = _filter_headers(told.headers.items(), RESPONSE_HOP_HEADERS)
        found.raw_headers += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in kept]
        return found


def _build_url(url: str, scope: Scope) -> str:
    """Give what a request asks for, at the instance at *url*: nothing in it is taken for another host or port."""
    path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
    query = scope.get("query_string", b"").decode("latin-1")
    return f"{url.rstrip('/')}/{path.removeprefix('/')}" + (f"?{query}" if query else "")


def _filter_headers(headers: Iterable[tuple[str, str]], own: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield those of *headers* that belong to what is said, and not to one connection, as those *own* do."""
    lower = [(name.lower(), value) for name, value in headers]
    named = {word.strip().lower() for name, value in lower if name == "connection" for word in value.split(",")}
    for name, value in lower:
        if name not in own and name not in named and not name.startswith("proxy-"):
            yield name, value


def _join_headers(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Give *headers*, each name once: what came in several is one list by then."""
    found: dict[str, str] = {}
    for name, value in headers:
        between = "; " if name == "cookie" else ", "
        title = _title_case_header(name)
        found[title] = f"{found[title]}{between}{value}" if title in found else value
    return found


def _title_case_header(name: str) -> str:
    """Give a header's *name* as our own client writes it, so that none is sent twice."""
    return "Content-Type" if name == "content-type" else name


def _failure_response(error: EpisodeError) -> Response:
    detail = f"the instance that has the session broke off: {error}"
    about = {"stage": "step", "kind": "server_unreachable", "retryable": True, "outcome": "failed"}
    found = json_response({"detail": detail, **about}, status=503)
    found.headers["retry-after"] = f"{RETRY_AFTER_SECONDS:g}"
    return found


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Give what a request's *body* comes by that has been read before."""
    told = False

    async def received() -> MutableMapping[str, Any]:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return received
