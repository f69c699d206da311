"""ASGI middleware before a server's routes: host names, proxy prefixes, rollout ids, request logs and metrics.

The module also builds the JSON responses and error bodies that middleware and routes send.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response

from gymsdk import tracing
from gymsdk.convert import api
from gymsdk.convert.anthropic import build_error
from gymsdk.convert.api import ApiError
from gymsdk.http.pages import PageCheck
from gymsdk.jsonl import dump_json
from gymsdk.observability.loop_lag import sample_loop_lag
from gymsdk.observability.metrics import ServerMetrics
from gymsdk.servers.errors import CLIENT_CLOSED_REQUEST, RequestRejected
from gymsdk.servers.request_state import (
    App,
    Receive,
    RejectionLog,
    RequestState,
    Scope,
    Send,
    get_state,
    log,
    record_rejection,
    release_body,
)
from gymsdk.tracing import LogContext
from gymsdk.types import Item

FORWARDED_HEADER = "x-gymsdk-forwarded"
"""Header that marks a forwarded request, so that it is not forwarded again."""

T = TypeVar("T")

ID_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}"
"""Pattern of a rollout id, which is also a part of file names."""

ROLLOUT_PREFIX_PATTERN = re.compile(rf"^/ng-rollout/({ID_PATTERN})(/training-token-capture)?(?=/)")
"""Path prefix in which NeMo Gym's clients name the rollout that a request belongs to, and ask to capture token ids."""

ROLLOUT_PREFIX = "/ng-rollout/"

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
        state = get_state(scope)
        match = ROLLOUT_PREFIX_PATTERN.match(scope["path"]) if scope["path"].startswith(ROLLOUT_PREFIX) else None
        if match:
            path = scope["path"][match.end() :]
            scope["path"], scope["raw_path"] = path, path.encode()
            state.rollout_id, state.rollout_prefix = match[1], match[0]
        request_context = tracing.build_log_context(self._metrics.name, scope["headers"], match[1] if match else None)
        if match and match[2]:
            request_context.captured_rollout = match[1]
        previous = tracing.set_log_context(request_context)
        try:
            await self._handle_counted(request_context, state, scope, receive, send)
        finally:
            release_body(state)
            # With profiling on, a step's CPU time is recorded after the request.
            if not tracing.is_profiling():
                tracing.reset_log_context(previous)

    async def _handle_counted(
        self, request_context: LogContext, state: RequestState, scope: Scope, receive: Receive, send: Send
    ) -> None:
        started, status, is_counted = time.perf_counter(), SERVER_ERROR, scope["path"] not in UNLOGGED_PATHS
        sent = 0

        async def send_counted(message: MutableMapping[str, Any]) -> None:
            nonlocal status, sent
            sent += len(message.get("body") or b"")
            if message["type"] == "http.response.start":
                status = message["status"]
                header = (tracing.REQUEST_ID_HEADER.encode(), request_context.request.encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        if is_counted:
            self._metrics.start_request()
        try:
            await self._app(scope, receive, send_counted)
        except asyncio.CancelledError:
            # Only the stop of the server cancels a request, and answers it with `STOPPED_ERROR`.
            status = STOPPED_ERROR.status if status == SERVER_ERROR else status
            raise
        except Exception as error:
            tracing.add_log_fields(error=type(error).__name__)
            raise
        finally:
            self._metrics.in_flight -= is_counted
            seconds, route = time.perf_counter() - started, getattr(scope.get("route"), "path", OTHER_ROUTE)
            self._metrics.record_response(route, status, seconds, received=state.received, sent=sent)
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
        server = get_state(scope).server
        server.rejections = RejectionLog(self._metrics)
        if server.get_admission_seconds is not None:
            self._metrics.add_counter(
                "admission_seconds",
                "Seconds that requests waited until they were started.",
                server.get_admission_seconds,
            )
        if tracing.is_profiling():
            tracing.profile_tasks(asyncio.get_running_loop())
        with sample_loop_lag(self._metrics):
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


def json_response(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with `value` as JSON."""
    return Response(dump_json(value), status_code=status, headers=headers, media_type="application/json")


DISCONNECTED_MESSAGE = "the client disconnected before the response"

STOPPED_ERROR = ApiError(
    503, "the server has been stopped; send the request again when it is back", code="server_stopped"
)
"""Returned to requests that are running when the server stops."""


class HostCheck:
    """ASGI middleware that rejects requests for another host name, and requests of web pages that are not the server's.

    Args:
        app: The app.
        allowed: The server's host names; `None` allows every name.
    """

    def __init__(self, app: App, allowed: Iterable[str] | None) -> None:
        self._app = app
        self._check = PageCheck(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or reject it."""
        is_request = scope["type"] == "http"
        rejection = self._check.find_rejection(scope["headers"], scope["scheme"]) if is_request else None
        if rejection is None:
            await self._app(scope, receive, send)
            return
        record_rejection(scope, rejection.status)
        await json_response({"detail": rejection.reason}, status=rejection.status)(scope, receive, send)


def server_prefix(path: str, name: str | None) -> str:
    """Return the path prefix of one server: the head, with no `name`, is at `path` itself."""
    return f"{path}/{name}" if path and name else path


class PrefixMiddleware:
    """ASGI middleware that strips the proxy's path prefix, if the proxy has not stripped it."""

    def __init__(self, app: App, path: str) -> None:
        self._app = app
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http":
            path = scope["path"]
            stripped = path.removeprefix(self._path) if f"{path}/".startswith(f"{self._path}/") else path
            scope = {**scope, "path": stripped or "/", "raw_path": (stripped or "/").encode(), "root_path": self._path}
        await self._app(scope, receive, send)


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it if the client of `request` disconnects.

    Args:
        request: The request; its body has been read.
        work: The coroutine.

    Raises:
        RequestRejected: The client disconnected.
    """
    handler, is_disconnected = asyncio.current_task(), False
    assert handler is not None, "requests are handled in a task"

    def cancel() -> None:
        nonlocal is_disconnected
        is_disconnected = True
        handler.cancel()

    connection = get_state(request.scope).connection
    # Without a connection to ask, a task waits for the message that the client has disconnected.
    watcher = None if connection else asyncio.ensure_future(_call_on_disconnect(request, cancel))
    if connection is not None and not connection.add_disconnect_callback(cancel):
        work.close()
        raise RequestRejected(CLIENT_CLOSED_REQUEST, DISCONNECTED_MESSAGE)
    try:
        return await work
    except asyncio.CancelledError:
        if not is_disconnected:
            raise
        handler.uncancel()
        raise RequestRejected(CLIENT_CLOSED_REQUEST, DISCONNECTED_MESSAGE) from None
    finally:
        if watcher is not None:
            watcher.cancel()
        elif connection is not None:
            connection.remove_disconnect_callback(cancel)


async def _call_on_disconnect(request: Request, callback: Callable[[], object]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    callback()


def build_error_body(path: str, error: ApiError, *, anthropic: bool = False) -> Item:
    """Build the error body for a request in the form that the clients of the path expect.

    Below `/v1/` that is the form of the path's API. Where the path names no API, it is Anthropic's form for Anthropic's
    clients and OpenAI's for all others.

    Args:
        path: The request's path.
        error: The error.
        anthropic: Whether the request comes from a client of Anthropic's API.
    """
    endpoint = re.sub(r"^/ng-rollout/.*?(?=/v1/)", "", path)
    if endpoint == "/v1/messages" or endpoint.startswith("/v1/messages/"):
        return build_error(error)
    if not endpoint.startswith("/v1/"):
        return {"detail": error.message}
    return build_error(error) if anthropic and not _is_openai_path(endpoint) else api.build_error(error)


def _is_openai_path(path: str) -> bool:
    return path.startswith(("/v1/chat/", "/v1/completions", "/v1/responses"))


def describe_missing_route(path: str, method: str, allowed: str | None) -> str:
    """Describe why `method` at `path` has no endpoint; `allowed` are the methods that the path has."""
    if allowed:
        return f"{path} does not accept {method}; use {allowed.replace(',', ' or ')}"
    if path.startswith("/ng-rollout/"):
        return (
            f"{path} does not exist; write /ng-rollout/ID/v1 or /ng-rollout/ID/training-token-capture/v1, where ID has"
            " at most 200 letters, digits and . _ -, and begins with a letter or digit"
        )
    return (
        f"{path} does not exist; this server has /v1/responses, /v1/chat/completions, /v1/completions and /v1/messages"
    )
