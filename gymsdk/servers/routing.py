"""Routing: what lies before a server's routes: the rollout a path is prefixed with, and the counting of requests."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from gymsdk.servers.figures import Figures

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

ID = r"[A-Za-z0-9][A-Za-z0-9._-]*"
"""What a rollout may be called."""

PREFIX = re.compile(rf"^/ng-rollout/({ID})(?:/training-token-capture)?(?=/)")
"""What clients of NeMo Gym put before any path to say which rollout a request belongs to."""


def rollout_of(scope: Scope) -> str | None:
    """Give the id of the rollout that a request's path was prefixed with."""
    found = scope.get("state", {}).get("rollout_id")
    return found if isinstance(found, str) else None


class Routing:
    """Takes the rollout's prefix off a path, keeps its id in the request's state, and counts what is answered."""

    def __init__(self, app: App, figures: Figures) -> None:
        self._app = app
        self._figures = figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if found := PREFIX.match(scope["path"]):
            path = scope["path"][found.end() :]
            scope["path"], scope["raw_path"] = path, path.encode()
            scope.setdefault("state", {})["rollout_id"] = found[1]
        started, status = time.perf_counter(), 500

        async def counting(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, counting)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._figures.answered(route, status, time.perf_counter() - started)
