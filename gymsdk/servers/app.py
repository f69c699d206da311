"""The FastAPI application that every server builds on: health routes, metrics, error responses, request bodies.

A server calls `create_app`, adds its own routes, reads bodies with `read_json_object` and writes them with
`json_response`. An endpoint raises `RequestRejected` to answer with an error status.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, TypeAlias, TypedDict

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic.errors import PydanticUserError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gymsdk import tracing
from gymsdk.errors import EpisodeError, GymsdkError, Unscorable, UsageError
from gymsdk.http import bodies
from gymsdk.observability.metrics import ServerMetrics
from gymsdk.servers.errors import CLIENT_CLOSED_REQUEST, RequestRejected, ServerOverloaded
from gymsdk.servers.middleware import RoutingMiddleware, json_response
from gymsdk.servers.request_state import (
    HEAVY_BODY_BYTES,
    LARGE_BODY_BYTES,
    Receive,
    RequestState,
    Scope,
    Send,
    body_budget,
    default_body_budget,
    get_state,
)
from gymsdk.servers.routing import ServerApp
from gymsdk.types import Item, Task

BODY_WAIT_SECONDS = 30.0
"""Seconds that a large body waits for memory that other requests hold."""

BODY_RECEIVE_SECONDS = 60.0
"""Seconds within which a whole body must arrive, so that a client that stops halfway does not keep its connection."""

SERVICE_UNAVAILABLE = 503
RETRY_AFTER_SECONDS = 1.0
"""Default of the `Retry-After` header, in seconds."""

HEALTH_PATHS = ("/", "/livez", "/healthz", "/health")
"""Paths that report that the server is alive; `/readyz` reports whether it can be used."""

ReadinessCheck: TypeAlias = Callable[[], bool]

Lifespan: TypeAlias = Callable[[FastAPI], AbstractAsyncContextManager[None]]
"""The lifespan context of an app, as FastAPI takes it."""

log = logging.getLogger("gymsdk")


Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
"""An endpoint: answers one request."""

ERROR_DESCRIPTIONS = {
    408: "The body did not arrive in time.",
    409: "The session does not exist, or its state does not allow the request.",
    413: "The body is too large.",
    422: "The body is invalid, or the environment fails on it permanently.",
    503: "A temporary failure: send the request again after `retry-after` seconds.",
}
"""Descriptions of the error statuses that every endpoint can return."""

ITEM_SCHEMA: Item = {
    "type": "object",
    "properties": {
        "type": {"enum": ["message", "function_call", "function_call_output", "reasoning"]},
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
        "name": {"type": "string"},
        "arguments": {"type": "string"},
        "call_id": {"type": "string"},
        "output": {"type": "string"},
    },
}

PROMPT_SCHEMA: Item = {
    "type": "object",
    "required": ["input"],
    "properties": {"input": {"anyOf": [{"type": "string"}, {"type": "array", "items": ITEM_SCHEMA}]}},
}

MESSAGE_SCHEMA: Item = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["user", "assistant", "system", "tool"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
    },
}

RESPONSES_REQUEST_SCHEMA: Item = {
    **PROMPT_SCHEMA,
    "properties": {**PROMPT_SCHEMA["properties"], "stream": {"type": "boolean"}},
}
"""Body of a Responses API request."""

CHAT_REQUEST_SCHEMA: Item = {
    "type": "object",
    "required": ["messages"],
    "properties": {"messages": {"type": "array", "items": MESSAGE_SCHEMA}, "stream": {"type": "boolean"}},
}
"""Body of a Chat Completions request or an Anthropic Messages request."""

COMPLETION_REQUEST_SCHEMA: Item = {
    "type": "object",
    "required": ["prompt"],
    "properties": {
        "prompt": {"anyOf": [{"type": "string"}, {"type": "array"}]},
        "n": {"type": "integer"},
        "stream": {"type": "boolean"},
    },
}
"""Body of a Completions request."""

RESPONSE_SCHEMA: Item = {
    "type": "object",
    "required": ["output"],
    "properties": {"output": {"type": "array", "items": ITEM_SCHEMA}},
}

FLAT_ROW_SCHEMA: Item = {"type": "object", "required": ["responses_create_params"]}
"""A row whose environment fields are not described."""

AGGREGATE_SCHEMA: Item = {
    "type": "object",
    "properties": {"verify_responses": {"type": "array", "items": {"type": "object"}}},
}

STREAM_RESPONSE: Item = {
    "description": "The response, or a stream of server-sent events if the body asks for a stream.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}
"""A response that may be streamed."""

HEARTBEAT_SECONDS = 5.0
"""Seconds before a stream without a result starts, and between two heartbeats in it."""

EVENT_STREAM_TYPE = "text/event-stream"

STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Headers that keep proxies from caching a stream or buffering it until it is complete."""

STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (name.encode(), value.encode()) for name, value in {"content-type": EVENT_STREAM_TYPE, **STREAM_HEADERS}.items()
    ],
}


def create_app(
    name: str,
    about: str,
    *,
    metrics: ServerMetrics,
    ready: ReadinessCheck = lambda: True,
    lifespan: Lifespan | None = None,
    waiting: Sequence[str] = ("/readyz",),
) -> ServerApp:
    """Create an app with health routes, metrics and error handlers; the caller adds the server's own routes.

    Args:
        name: The server's name, used as the title.
        about: The description in the OpenAPI document.
        metrics: The server's metrics.
        ready: Reports whether the server can be used.
        lifespan: The lifespan context of the app.
        waiting: The paths that answer 503 until `ready` returns true.
    """
    app = ServerApp(title=name, version=version("gymsdk"), description=about, lifespan=lifespan)
    app.add_middleware(RoutingMiddleware, metrics=metrics)
    for path in HEALTH_PATHS:
        if path not in waiting:
            app.add_api_route(path, _report_alive, include_in_schema=False)

    async def readiness() -> Response:
        return json_response({"status": "ok"}) if ready() else _build_error_response({"status": "starting"}, 503, None)

    async def counted() -> Response:
        return PlainTextResponse(await metrics.render_current(), media_type="text/plain; version=0.0.4")

    for path in waiting:
        app.add_api_route(path, readiness, include_in_schema=False)
    app.add_api_route("/metrics", counted, include_in_schema=False)
    if tracing.is_profiling():

        async def statistic() -> Response:
            return json_response(tracing.get_statistics(metrics.name))

        app.add_api_route("/stats", statistic, include_in_schema=False)
    app.add_exception_handler(RequestRejected, _handle_rejection)
    app.add_exception_handler(GymsdkError, _handle_failure)
    app.add_exception_handler(HTTPException, _handle_http_error)
    app.add_exception_handler(RecursionError, _handle_recursion)
    app.add_exception_handler(ClientDisconnect, _handle_disconnect)
    return app


async def read_json_object(request: Request) -> Item:
    """Read a request's JSON object.

    A large body is parsed in a thread, and its size in memory counts against the limit until the request is answered.

    Raises:
        RequestRejected: The body is not a JSON object, is too large or did not arrive in time.
    """
    raw, state = await read_body(request) or b"{}", get_state(request.scope)
    try:
        parsed, size = await bodies.loads_with_size(raw, bodies.get_max_values(state.max_body))
    except bodies.TooComplex as error:
        raise RequestRejected(413, f"the body cannot be read: {error}") from None
    except ValueError as error:
        raise _invalid_body("json_invalid", f"the body is not valid JSON: {error}") from None
    if len(raw) >= LARGE_BODY_BYTES or size >= HEAVY_BODY_BYTES:
        body_budget().resize(state, size)
    if not isinstance(parsed, dict):
        raise _invalid_body("dict_type", "the body must be a JSON object")
    return parsed


async def read_body(request: Request) -> bytes:
    """Read a request's body.

    A large body is received only when there is memory for it beside the large bodies of other requests.

    Raises:
        RequestRejected: The body is too large, compressed or did not arrive in time.
    """
    state, length, encoding = get_state(request.scope), None, ""
    # Starlette would decode all headers to find two.
    for name, value in request.scope["headers"]:
        if name == b"content-length" and value.isdigit():
            length = int(value)
        elif name == b"content-encoding":
            encoding = value.decode("latin-1").strip().lower()
    if length is not None and length > state.max_body:
        raise _body_too_large(state)
    if encoding not in {"", "identity"}:
        raise RequestRejected(415, f"the body is encoded as {encoding[:40]!r}; send it as plain JSON")
    if length is not None and length >= LARGE_BODY_BYTES:
        await _reserve_memory(state, length)
    if (body := _take_body(state)) is not None:
        return body
    try:
        async with asyncio.timeout(BODY_RECEIVE_SECONDS):
            return await _receive_body(request, state, is_reserved=length is not None)
    except TimeoutError:
        raise RequestRejected(
            408, f"the body did not arrive within {BODY_RECEIVE_SECONDS:g} seconds; send it again"
        ) from None


def _take_body(state: RequestState) -> bytes | None:
    """Return the body if all of it has arrived, else `None`; a chunked body has no length in its header."""
    body = state.connection.take_body(state) if state.connection is not None else None
    if body is not None:
        if len(body) > state.max_body:
            raise _body_too_large(state)
        state.received = len(body)
    return body


async def _receive_body(request: Request, state: RequestState, *, is_reserved: bool) -> bytes:
    received = bytearray()
    async for chunk in request.stream():
        received += chunk
        if len(received) > state.max_body:
            raise _body_too_large(state)
        if not is_reserved and len(received) >= LARGE_BODY_BYTES:
            # Without a content-length, assume the largest size that is allowed.
            await _reserve_memory(state, state.max_body)
            is_reserved = True
    if len(received) >= LARGE_BODY_BYTES:
        body_budget().resize(state, len(received))
    state.received = len(received)
    return bytes(received)


async def _reserve_memory(state: RequestState, size: int) -> None:
    """Wait for memory for a body of `size` bytes; raise `ServerOverloaded` if that takes too long."""
    max_bytes = state.server.limits.bodies or default_body_budget()
    try:
        async with asyncio.timeout(BODY_WAIT_SECONDS):
            await body_budget().reserve(state, size, max_bytes)
    except TimeoutError:
        sentence = "the server has no memory for another large body now; send the request again"
        raise ServerOverloaded(sentence, retry_after=RETRY_AFTER_SECONDS) from None


def _body_too_large(state: RequestState) -> RequestRejected:
    return RequestRejected(413, f"the body has more than {state.max_body} bytes")


def _invalid_body(kind: str, sentence: str) -> RequestRejected:
    return RequestRejected(422, sentence, shape=[{"type": kind, "loc": ["body"], "msg": sentence}])


async def _report_alive() -> Response:
    return json_response({"status": "ok"})


async def _handle_rejection(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRejected), "the handler is registered for this exception"
    return build_rejection(error)


def build_rejection(error: RequestRejected) -> Response:
    """Return the response for a rejected request."""
    fields = dict(error.fields)
    tracing.add_log_fields(**{key: str(fields[key]) for key in ("stage", "kind") if key in fields})
    response = _build_error_response(
        {"detail": fields.pop("shape", str(error)), **fields}, error.status, error.retry_after
    )
    response.headers.update(error.headers)
    return response


async def _handle_failure(_: Request, error: Exception) -> Response:
    if isinstance(error, UsageError):
        return json_response({"detail": str(error), "kind": _error_kind(error)}, status=422)
    if isinstance(error, EpisodeError):
        tracing.add_log_fields(stage=error.stage, kind=error.kind)
        detail = {"detail": str(error), "stage": error.stage, "kind": error.kind, "retryable": error.retryable}
        detail["outcome"] = "unscorable" if isinstance(error, Unscorable) else "failed"
        return _build_error_response(detail, 503 if error.retryable else 422, error.retry_after)
    tracing.add_log_fields(kind=_error_kind(error))
    return _build_error_response({"detail": str(error), "kind": _error_kind(error)}, 503, None)


async def _handle_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "the handler is registered for this exception"
    response = json_response({"detail": error.detail}, status=error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _handle_recursion(_: Request, __: Exception) -> Response:
    return json_response({"detail": "the body is nested too deeply"}, status=422)


async def _handle_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def _build_error_response(content: Item, status: int, retry_after: float | None) -> Response:
    response = json_response(content, status=status)
    if retry_after is not None or status == SERVICE_UNAVAILABLE:
        response.headers["retry-after"] = str(max(1, round(retry_after or RETRY_AFTER_SECONDS)))
    return response


def _error_kind(error: Exception) -> str:
    return type(error).__name__


class EndpointDocs(TypedDict):
    """The keyword arguments of `FastAPI.add_api_route` that document an endpoint."""

    openapi_extra: dict[str, Any]
    responses: dict[int | str, dict[str, Any]]


def document_endpoint(
    schema: Item, *, required: bool = True, more: Mapping[int, str] = MappingProxyType({})
) -> EndpointDocs:
    """Return the OpenAPI arguments for an endpoint that parses its body itself.

    Args:
        schema: The JSON schema of the body.
        required: Whether the body is required.
        more: Descriptions of further response statuses.
    """
    content = {"application/json": {"schema": _inline_references(schema, schema.get("$defs", {}))}}
    return {
        "openapi_extra": {"requestBody": {"required": required, "content": content}},
        "responses": {status: {"description": words} for status, words in {**ERROR_DESCRIPTIONS, **more}.items()},
    }


def build_row_schema(task: type[Task], **more: Item) -> Item:
    """Build the JSON schema of a row of `task`; `more` are further required fields."""
    try:
        schema = task.model_json_schema()
    except PydanticUserError:
        # A custom type of the environment may have no JSON schema; only its validator knows it.
        schema = {"type": "object"}
    fields = {**schema.get("properties", {}), "responses_create_params": PROMPT_SCHEMA, **more}
    required = [*{"responses_create_params": None, **dict.fromkeys(schema.get("required", ())), **more}]
    return {**schema, "properties": fields, "required": required}


def _inline_references(schema: Any, definitions: Item) -> Any:
    """Replace each `$ref` by its definition: FastAPI resolves references only against the whole document."""
    if isinstance(schema, list):
        return [_inline_references(value, definitions) for value in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema and (name := str(schema["$ref"]).removeprefix("#/$defs/")) in definitions:
        # A recursive schema stays open at the second level.
        rest = {key: value for key, value in definitions.items() if key != name}
        return _inline_references(definitions[name], rest)
    if "$ref" in schema:
        return {}
    return {key: _inline_references(value, definitions) for key, value in schema.items() if key != "$defs"}


@dataclass(frozen=True, slots=True)
class StreamResult:
    """The result of a streamed request.

    Attributes:
        response: The whole response, sent when the stream has not started.
        last_frames: The last frames, sent when it has.
    """

    response: Response
    last_frames: bytes = b""


class StreamedResponse(Response):
    """A response that computes its result while it watches for a disconnect of the client.

    Without `beat` the response waits for the result. With `beat` it becomes a stream if the result takes longer than
    `every` seconds, and sends `beat` as a heartbeat every `every` seconds from then on. If the client disconnects, the
    computation is cancelled.

    Args:
        ending: Computes the result.
        beat: The heartbeat frame, or `None` for a response that is not streamed.
        every: Seconds between heartbeats.
    """

    def __init__(
        self,
        ending: Callable[[], Coroutine[Any, Any, StreamResult]],
        *,
        beat: bytes | None = None,
        every: float = HEARTBEAT_SECONDS,
    ) -> None:
        super().__init__()
        self._ending = ending
        self._beat = beat
        self._every = None if beat is None else every

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; the request body has been read before."""
        ending, disconnect = asyncio.ensure_future(self._ending()), asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({ending, disconnect}, timeout=self._every, return_when=asyncio.FIRST_COMPLETED)
            if disconnect.done():
                # The client is gone; the status is only counted.
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)
            elif ending.done():
                await ending.result().response(scope, receive, send)
            else:
                await self._stream(ending, disconnect, send)
        finally:
            tasks: set[asyncio.Future[Any]] = {ending, disconnect}
            for each in tasks:
                each.cancel()
            # No task of a request outlives the request.
            await asyncio.wait(tasks)

    async def _stream(self, ending: asyncio.Task[StreamResult], disconnect: asyncio.Task[None], send: Send) -> None:
        await send(STREAM_START)
        while not (ending.done() or disconnect.done()):
            await send({"type": "http.response.body", "body": self._beat, "more_body": True})
            await asyncio.wait({ending, disconnect}, timeout=self._every, return_when=asyncio.FIRST_COMPLETED)
        if not disconnect.done():
            await send({"type": "http.response.body", "body": ending.result().last_frames})


def stream_frames(frames: bytes) -> Response:
    """Return an event stream whose frames are all known."""
    return Response(frames, media_type=EVENT_STREAM_TYPE, headers=STREAM_HEADERS)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
