"""Guard: who may ask a server at all: clients that call it by a name it has, and no page of another site."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from gymsdk.addresses import ANYWHERE, is_loopback
from gymsdk.servers.app import answer
from gymsdk.servers.door import doorstep
from gymsdk.servers.door.routing import App, Receive, Scope, Send

LOOPBACK = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})

ELSEWHERE = "this server is not called {name!r}: ask it at 127.0.0.1, or serve it with --host"
FOREIGN = "a page of {name!r} may not ask this server"
PLAIN = "a page has to send JSON as application/json"


def names(*hosts: str) -> frozenset[str] | None:
    """Give the names of a server that listens at *hosts*, `None` where it listens everywhere: then any may be its."""
    if ANYWHERE & set(hosts):
        return None
    own = set() if all(is_loopback(host) or host in LOOPBACK for host in hosts) else {socket.gethostname()}
    return frozenset(each.lower() for each in (*hosts, *own, *LOOPBACK))


class Guard:
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
        doorstep.refused(scope, status)
        await answer({"detail": sentence}, status=status)(scope, receive, send)

    def _find_rejection(self, scope: Scope) -> tuple[int, str] | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host"), headers.get(b"origin")
        if host and not self._is_allowed(name := _name("//" + host)):
            return 421, ELSEWHERE.format(name=name[:80])
        if origin is None:
            return None
        if not self._is_allowed(name := _name(origin)):
            return 403, FOREIGN.format(name=(name or origin)[:80])
        # A page needs nobody's leave to send what is no JSON by its type.
        kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        return (403, PLAIN) if scope["method"] == "POST" and kind not in {"", "application/json"} else None

    def _is_allowed(self, name: str) -> bool:
        return name in self._allowed or is_loopback(name)


def _name(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""
