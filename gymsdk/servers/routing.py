"""Routing: what lies before a server's routes: whose a request is, that it is counted, and its line in the log."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

from gymsdk import context, profiling
from gymsdk.context import LogContext
from gymsdk.observability.metrics import ServerMetrics
from gymsdk.servers.limits import body_budget

REJECTED_ROUTE = "refused"
"""What stands in the place of a route where a request got to none."""

LOG_INTERVAL_SECONDS = 1.0
"""Seconds in which one refusal of each status has a line: the others have theirs in `debug`."""

MAX_METHOD_CHARS = 16
"""How much is told of the word that a client has for its method."""

REJECTION_LOG_KEY = "gymsdk.doorstep"
"""The key of an app's state, which each of its requests has too, under which its doorstep is."""

log = logging.getLogger("gymsdk.requests")


class RejectionLog:
    """Where the requests that a server refuses are counted, in its *figures*."""

    def __init__(self, figures: ServerMetrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._figures = figures
        self._clock = clock
        self._quiet: dict[int, float] = {}

    def record(self, scope: Mapping[str, Any], status: int, route: str) -> None:
        """Count a request, and write its line unless there have been like it: whoever floods does not fill the log."""
        self._figures.record_response(route, status, 0.0)
        level = logging.INFO if route == REJECTED_ROUTE and self._is_rare(status) else logging.DEBUG
        if log.isEnabledFor(level):
            before = context.set_log_context(context.build_log_context(self._figures.name, scope["headers"]))
            _log_rejection(level, scope, status, route)
            context.reset_log_context(before)

    def _is_rare(self, status: int) -> bool:
        now = self._clock()
        if now < self._quiet.get(status, 0.0):
            return False
        self._quiet[status] = now + LOG_INTERVAL_SECONDS
        return True


def record_rejection(scope: Mapping[str, Any], status: int, route: str = REJECTED_ROUTE) -> None:
    """Say on the doorstep of the server that a request came to that it is refused, at a *route* if that is known."""
    step = scope.get("state", {}).get(REJECTION_LOG_KEY)
    if isinstance(step, RejectionLog):
        step.record(scope, status, route)


def _log_rejection(level: int, scope: Mapping[str, Any], status: int, route: str) -> None:
    # Neither its path nor its headers: whatever a stranger writes there, a token meant for another server too.
    method, client = scope["method"][:MAX_METHOD_CHARS], (scope.get("client") or ("nobody",))[0]
    told = {"method": method, "route": route, "status": status, "client": client}
    log.log(level, "%s %s %d client=%s", method, route, status, client, extra={"told": told})


Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

ID_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]*"
"""What a rollout may be called."""

ROLLOUT_PREFIX_PATTERN = re.compile(rf"^/ng-rollout/({ID_PATTERN})(?:/training-token-capture)?(?=/)")
"""What clients of NeMo Gym put before any path to say which rollout a request belongs to."""

RESERVED_PATHS = frozenset(
    {"seed_session", "close_session", "verify", "aggregate_metrics", "reverify_mode", "reset", "step", "close", "mcp"}
)
"""Paths of a resources server that are endpoints: no tool is called at them."""


UNLOGGED_PATHS = frozenset(
    {"/", "/livez", "/healthz", "/health", "/readyz", "/metrics", "/stats", "/nodes", "/nodes/{node}"}
)
"""Routes that are asked every few seconds for as long as a server runs: their lines are for `debug` alone."""

OTHER_ROUTE = "other"
"""What a path is called that no route is for."""

SERVER_ERROR = 500

# Silent until somebody asks for lines, who may have done so before this is imported: see `logs`.
if log.level == logging.NOTSET:
    log.setLevel(logging.CRITICAL)


def rollout_id_of(scope: Scope) -> str | None:
    """Give the id of the rollout that a request's path was prefixed with."""
    found = scope.get("state", {}).get("rollout_id")
    return found if isinstance(found, str) else None


class RoutingMiddleware:
    """Takes the rollout's prefix off a path, keeps its id in the request's state, and counts what is answered.

    A request has an id, its client's or a new one, which is on the answer and goes with every call made for it.
    """

    def __init__(self, app: App, figures: ServerMetrics) -> None:
        self._app = app
        self._figures = figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._handle_lifespan(scope, receive, send)
            return
        if found := ROLLOUT_PREFIX_PATTERN.match(scope["path"]):
            path = scope["path"][found.end() :]
            scope["path"], scope["raw_path"] = path, path.encode()
            scope.setdefault("state", {})["rollout_id"] = found[1]
        here = context.build_log_context(self._figures.name, scope["headers"], found[1] if found else None)
        before = context.set_log_context(here)
        try:
            await self._handle_counted(here, scope, receive, send)
        finally:
            body_budget().release(scope)
            # Where time is counted, a step's is when it is over, which is later.
            if profiling.get_cpu_profile() is None:
                context.reset_log_context(before)

    async def _handle_counted(self, here: LogContext, scope: Scope, receive: Receive, send: Send) -> None:
        started, status, busy = time.perf_counter(), SERVER_ERROR, scope["path"] not in UNLOGGED_PATHS

        async def counting(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                named = (context.REQUEST_ID_HEADER.encode(), here.request.encode())
                message = {**message, "headers": [*message.get("headers", ()), named]}
            await send(message)

        self._figures.in_flight += busy
        try:
            await self._app(scope, receive, counting)
        except Exception as error:
            context.add_log_fields(error=type(error).__name__)
            raise
        finally:
            self._figures.in_flight -= busy
            seconds, route = time.perf_counter() - started, getattr(scope.get("route"), "path", OTHER_ROUTE)
            self._figures.record_response(route, status, seconds)
            profiling.assign_route(here, route)
            level = (
                logging.DEBUG
                if route in UNLOGGED_PATHS
                else logging.WARNING
                if status >= SERVER_ERROR
                else logging.INFO
            )
            if log.isEnabledFor(level):
                _log_request(level, here, scope["method"], route, status=status, seconds=seconds)

    async def _handle_lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Be there for as long as the app is: what it does beside its requests is its server's, too."""
        context.set_log_context(LogContext(self._figures.name))
        scope.setdefault("state", {})[REJECTION_LOG_KEY] = RejectionLog(self._figures)
        if profiling.get_cpu_profile() is not None:
            profiling.profile_tasks(asyncio.get_running_loop())
        await self._app(scope, receive, send)


def _log_request(level: int, here: LogContext, method: str, route: str, *, status: int, seconds: float) -> None:
    told = {"method": method, "route": route, "status": status, "ms": round(seconds * 1e3, 3), **here.fields}
    said = "".join(f" {key}={value}" for key, value in here.fields.items())
    form, given = "%s %s %d in %.1f ms%s", (method, route, status, seconds * 1e3, said)
    # Straight to the handlers: to find out who calls takes longer than to write the line.
    log.handle(log.makeRecord(log.name, level, __file__, 0, form, given, None, extra={"told": told}))
