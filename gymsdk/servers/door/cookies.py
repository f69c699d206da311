"""Cookies: the token of a client's session, read off its requests and set on every answer."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from gymsdk.servers.door.routing import App, Receive, Scope, Send
from gymsdk.servers.nodes.service import INSTANCE
from gymsdk.values import written

BROKE = "the server broke on this request; its log says how"

ODD = re.compile(r"[^A-Za-z0-9._-]")
"""What may not stand in a cookie's name."""


def named(kind: str, name: str) -> str:
    """Give the name of the cookie of the server *name* of a *kind*, as clients of NeMo Gym know it."""
    return f"{kind}___{ODD.sub('_', name)}"


OURS = re.compile(rf"(?:(?P<instance>{INSTANCE})\.)?[A-Za-z0-9_-]{{32}}|lost\.[A-Za-z0-9_-]{{32}}")
"""What the token of a session is like, or of one that was lost; what is sent to those who have none is not."""


class Cookies:
    """Gives a request the token in its cookie *name*, if it is *known*, and every answer the token to go on with.

    Some clients keep only the cookies of the last answer, so errors have it too. A handler sets a new token in
    `scope["state"]["token"]`. Who has no session is given a token that nobody has had before, and none is adopted;
    `scope["state"]["lost"]` says that there was one, which its client believes in until it opens another.
    """

    def __init__(self, app: App, name: str, known: Callable[[str], bool], lasts: float) -> None:
        self._app = app
        self._name = name
        self._known = known
        self._attributes = f"Path=/; Max-Age={max(1, round(lasts))}; HttpOnly; SameSite=lax"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        brought = list(brought_by(scope, self._name))
        state["token"] = next(filter(self._known, brought), None)
        state["lost"] = state["token"] is None and any(map(OURS.fullmatch, brought))
        begun = False

        async def setting(message: MutableMapping[str, Any]) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message["headers"] = [*message["headers"], (b"set-cookie", self._build_cookie(state))]
            await send(message)

        try:
            await self._app(scope, receive, setting)
        except Exception:
            if not begun:
                await _break(setting)
            # A bug: the server's own log has it.
            raise

    def _build_cookie(self, state: MutableMapping[str, Any]) -> bytes:
        token = state["token"]
        if token is None or not self._known(token):
            token = f"{'lost' if state['lost'] and token is None else 'none'}.{secrets.token_urlsafe(24)}"
        return f"{self._name}={token}; {self._attributes}".encode()


def brought_by(scope: Scope, cookie: str) -> Iterator[str]:
    """Yield the tokens that a request brings in the *cookie* of that name."""
    for header, value in scope["headers"]:
        if header == b"cookie":
            for pair in value.decode("latin-1").split(";"):
                name, _, token = pair.strip().partition("=")
                if name == cookie:
                    yield token.strip('"')


def instance_of(token: str) -> str | None:
    """Give which instance has the session of *token*, `None` where it does not say."""
    found = OURS.fullmatch(token)
    return found["instance"] if found else None


async def _break(send: Send) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": written({"detail": BROKE})})
