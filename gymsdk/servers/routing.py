"""The outermost middleware of a server: rollout ids in paths, request ids, metrics and the request log."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

from gymsdk import tracing
from gymsdk.observability.metrics import ServerMetrics
from gymsdk.servers.limits import body_budget
from gymsdk.tracing import LogContext

REJECTED_ROUTE = "refused"
"""Route label of requests that were rejected before routing."""

LOG_INTERVAL_SECONDS = 1.0
"""Seconds between two logged rejections with the same status; the others are logged at `debug`."""

MAX_METHOD_CHARS = 16
"""How many characters of a client's method are logged."""

REJECTION_LOG_KEY = "gymsdk.rejections"
"""Key of the app's state, and so of each request's, that holds the rejection log."""

log = logging.getLogger("gymsdk.requests")
# Silent until `observability.logging` configures it, which may happen before this module is imported.
if log.level == logging.NOTSET:
    log.setLevel(logging.CRITICAL)


Scope: TypeAlias = MutableMapping[str, Any]

Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]

Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

ID_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]*"
"""Pattern of a rollout id."""

ROLLOUT_PREFIX_PATTERN = re.compile(rf"^/ng-rollout/({ID_PATTERN})(?:/training-token-capture)?(?=/)")
"""Path prefix in which NeMo Gym's clients name the rollout that a request belongs to."""

RESERVED_PATHS = frozenset(
    {"seed_session", "close_session", "verify", "aggregate_metrics", "reverify_mode", "reset", "step", "close", "mcp"}
)
"""Paths of a resources server that are endpoints, so no tool of that name can be called over HTTP."""

UNLOGGED_PATHS = frozenset(
    {"/", "/livez", "/healthz", "/health", "/readyz", "/metrics", "/stats", "/nodes", "/nodes/{node}"}
)
"""Routes that are polled every few seconds; their lines are logged at `debug` only."""

OTHER_ROUTE = "other"
"""Route label of requests that match no route."""

SERVER_ERROR = 500


class RejectionLog:
    """Counts and logs requests that the middleware rejects.

    Args:
        metrics: The server's metrics.
        clock: Returns the time in seconds.
    """

    def __init__(self, metrics: ServerMetrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._quiet: dict[int, float] = {}

    def record(self, scope: Mapping[str, Any], status: int, route: str) -> None:
        """Count a rejected request; log at most one per status and interval, so that a flood does not fill the log."""
        self._metrics.record_response(route, status, 0.0)
        level = logging.INFO if route == REJECTED_ROUTE and self._is_rare(status) else logging.DEBUG
        if log.isEnabledFor(level):
            previous = tracing.set_log_context(tracing.build_log_context(self._metrics.name, scope["headers"]))
            _log_rejection(level, scope, status, route)
            tracing.reset_log_context(previous)

    def _is_rare(self, status: int) -> bool:
        now = self._clock()
        if now < self._quiet.get(status, 0.0):
            return False
        self._quiet[status] = now + LOG_INTERVAL_SECONDS
        return True


def record_rejection(scope: Mapping[str, Any], status: int, route: str = REJECTED_ROUTE) -> None:
    """Record that the middleware rejected a request.

    Args:
        scope: The request's scope.
        status: The status of the response.
        route: The route, if known.
    """
    rejection_log = scope.get("state", {}).get(REJECTION_LOG_KEY)
    if isinstance(rejection_log, RejectionLog):
        rejection_log.record(scope, status, route)


def _log_rejection(level: int, scope: Mapping[str, Any], status: int, route: str) -> None:
    # Log neither path nor headers: a client controls both, and they may contain another server's token.
    method, client = scope["method"][:MAX_METHOD_CHARS], (scope.get("client") or ("nobody",))[0]
    fields = {"method": method, "route": route, "status": status, "client": client}
    log.log(level, "%s %s %d client=%s", method, route, status, client, extra={"fields": fields})


def rollout_id_of(scope: Scope) -> str | None:
    """Return the rollout id in a request's path prefix, or `None`."""
    rollout_id = scope.get("state", {}).get("rollout_id")
    return rollout_id if isinstance(rollout_id, str) else None


class RoutingMiddleware:
    """ASGI middleware that strips the rollout prefix, assigns a request id, and counts and logs each response.

    The request id is the client's or a new one. It is returned on the response and sent with every call made for it.
    """

    def __init__(self, app: App, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request or the lifespan."""
        if scope["type"] != "http":
            await self._handle_lifespan(scope, receive, send)
            return
        if match := ROLLOUT_PREFIX_PATTERN.match(scope["path"]):
            path = scope["path"][match.end() :]
            scope["path"], scope["raw_path"] = path, path.encode()
            scope.setdefault("state", {})["rollout_id"] = match[1]
        request_context = tracing.build_log_context(self._metrics.name, scope["headers"], match[1] if match else None)
        previous = tracing.set_log_context(request_context)
        try:
            await self._handle_counted(request_context, scope, receive, send)
        finally:
            body_budget().release(scope)
            # With profiling on, a step's CPU time is recorded after the request.
            if not tracing.is_profiling():
                tracing.reset_log_context(previous)

    async def _handle_counted(self, request_context: LogContext, scope: Scope, receive: Receive, send: Send) -> None:
        started, status, is_counted = time.perf_counter(), SERVER_ERROR, scope["path"] not in UNLOGGED_PATHS

        async def send_counted(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                header = (tracing.REQUEST_ID_HEADER.encode(), request_context.request.encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        self._metrics.in_flight += is_counted
        try:
            await self._app(scope, receive, send_counted)
        except Exception as error:
            tracing.add_log_fields(error=type(error).__name__)
            raise
        finally:
            self._metrics.in_flight -= is_counted
            seconds, route = time.perf_counter() - started, getattr(scope.get("route"), "path", OTHER_ROUTE)
            self._metrics.record_response(route, status, seconds)
            tracing.assign_route(request_context, route)
            level = (
                logging.DEBUG
                if route in UNLOGGED_PATHS
                else logging.WARNING
                if status >= SERVER_ERROR
                else logging.INFO
            )
            if log.isEnabledFor(level):
                _log_request(level, request_context, scope["method"], route, status=status, seconds=seconds)

    async def _handle_lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle the lifespan: work outside of requests is logged under the server's name, too."""
        tracing.set_log_context(LogContext(self._metrics.name))
        scope.setdefault("state", {})[REJECTION_LOG_KEY] = RejectionLog(self._metrics)
        if tracing.is_profiling():
            tracing.profile_tasks(asyncio.get_running_loop())
        await self._app(scope, receive, send)


def _log_request(
    level: int, request_context: LogContext, method: str, route: str, *, status: int, seconds: float
) -> None:
    fields = {
        "method": method,
        "route": route,
        "status": status,
        "ms": round(seconds * 1e3, 3),
        **request_context.fields,
    }
    suffix = "".join(f" {key}={value}" for key, value in request_context.fields.items())
    template, args = "%s %s %d in %.1f ms%s", (method, route, status, seconds * 1e3, suffix)
    # Call the handlers directly: looking up the caller would cost more than writing the line.
    log.handle(log.makeRecord(log.name, level, __file__, 0, template, args, None, extra={"fields": fields}))
