"""Routing: what lies before a server's routes: whose a request is, that it is counted, and its line in the log."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from gymsdk import spent, trail
from gymsdk.servers.door import doorstep
from gymsdk.servers.door.large_bodies import budget
from gymsdk.servers.watching.figures import Figures
from gymsdk.trail import Trail

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

ID = r"[A-Za-z0-9][A-Za-z0-9._-]*"
"""What a rollout may be called."""

PREFIX = re.compile(rf"^/ng-rollout/({ID})(?:/training-token-capture)?(?=/)")
"""What clients of NeMo Gym put before any path to say which rollout a request belongs to."""

RESERVED = frozenset(
    {"seed_session", "close_session", "verify", "aggregate_metrics", "reverify_mode", "reset", "step", "close", "mcp"}
)
"""Paths of a resources server that are endpoints: no tool is called at them."""


QUIET = frozenset({"/", "/livez", "/healthz", "/health", "/readyz", "/metrics", "/stats", "/nodes", "/nodes/{node}"})
"""Routes that are asked every few seconds for as long as a server runs: their lines are for `debug` alone."""

OTHER = "other"
"""What a path is called that no route is for."""

BROKEN = 500

log = logging.getLogger("gymsdk.requests")
# Silent until somebody asks for lines, who may have done so before this is imported: see `logs`.
if log.level == logging.NOTSET:
    log.setLevel(logging.CRITICAL)


def rollout_of(scope: Scope) -> str | None:
    """Give the id of the rollout that a request's path was prefixed with."""
    found = scope.get("state", {}).get("rollout_id")
    return found if isinstance(found, str) else None


class Routing:
    """Takes the rollout's prefix off a path, keeps its id in the request's state, and counts what is answered.

    A request has an id, its client's or a new one, which is on the answer and goes with every call made for it.
    """

    def __init__(self, app: App, figures: Figures) -> None:
        self._app = app
        self._figures = figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._handle_lifespan(scope, receive, send)
            return
        if found := PREFIX.match(scope["path"]):
            path = scope["path"][found.end() :]
            scope["path"], scope["raw_path"] = path, path.encode()
            scope.setdefault("state", {})["rollout_id"] = found[1]
        here = trail.begun(self._figures.name, scope["headers"], found[1] if found else None)
        before = trail.follow(here)
        try:
            await self._handle_counted(here, scope, receive, send)
        finally:
            budget().release(scope)
            # Where time is counted, a step's is when it is over, which is later.
            if spent.ledger() is None:
                trail.leave(before)

    async def _handle_counted(self, here: Trail, scope: Scope, receive: Receive, send: Send) -> None:
        started, status, busy = time.perf_counter(), BROKEN, scope["path"] not in QUIET

        async def counting(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                named = (trail.REQUEST.encode(), here.request.encode())
                message = {**message, "headers": [*message.get("headers", ()), named]}
            await send(message)

        self._figures.in_flight += busy
        try:
            await self._app(scope, receive, counting)
        except Exception as error:
            trail.tell(error=type(error).__name__)
            raise
        finally:
            self._figures.in_flight -= busy
            seconds, route = time.perf_counter() - started, getattr(scope.get("route"), "path", OTHER)
            self._figures.record_response(route, status, seconds)
            spent.settle(here, route)
            level = logging.DEBUG if route in QUIET else logging.WARNING if status >= BROKEN else logging.INFO
            if log.isEnabledFor(level):
                _log(level, here, scope["method"], route, status=status, seconds=seconds)

    async def _handle_lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Be there for as long as the app is: what it does beside its requests is its server's, too."""
        trail.follow(Trail(self._figures.name))
        scope.setdefault("state", {})[doorstep.STEP] = doorstep.Doorstep(self._figures)
        if spent.ledger() is not None:
            spent.watch(asyncio.get_running_loop())
        await self._app(scope, receive, send)


def _log(level: int, here: Trail, method: str, route: str, *, status: int, seconds: float) -> None:
    told = {"method": method, "route": route, "status": status, "ms": round(seconds * 1e3, 3), **here.fields}
    said = "".join(f" {key}={value}" for key, value in here.fields.items())
    form, given = "%s %s %d in %.1f ms%s", (method, route, status, seconds * 1e3, said)
    # Straight to the handlers: to find out who calls takes longer than to write the line.
    log.handle(log.makeRecord(log.name, level, __file__, 0, form, given, None, extra={"told": told}))
