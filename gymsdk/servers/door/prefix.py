"""A prefix: the path beneath which a proxy shows a server, which its own routes know nothing of."""

from __future__ import annotations

import re

from gymsdk.errors import UsageError
from gymsdk.servers.door.routing import App, Receive, Scope, Send

FORM = re.compile(r"(/(?!\.+(/|$))[A-Za-z0-9._~-]+)+")


def prefix(given: str) -> str:
    """Give the path *given*, without a slash at its end; raises `UsageError` where it is none."""
    path = given.rstrip("/")
    if path and not FORM.fullmatch(path):
        raise UsageError(f"--root-path {given}: write the path that a proxy shows the servers at, as in /gym")
    return path


def beneath(path: str, name: str | None) -> str:
    """Give the prefix of the server *name*: of the head, which has none, it is *path* itself."""
    return f"{path}/{name}" if path and name else path


class Prefixed:
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
