"""What every server is made of: an app with health and figures, errors as statuses, bodies read and written once."""

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

from gymsdk import context, large_json, profiling
from gymsdk.errors import EpisodeError, GymsdkError, Unscorable, UsageError
from gymsdk.http.client import NOT_STARTED_HEADER
from gymsdk.jsonl import dump_json
from gymsdk.observability.metrics import ServerMetrics
from gymsdk.profiling import get_statistics
from gymsdk.servers.limits import HEAVY_BODY_BYTES, LARGE_BODY_BYTES, body_budget, default_body_budget
from gymsdk.servers.routing import Receive, RoutingMiddleware, Scope, Send
from gymsdk.types import Item, Task

MAX_BODY_BYTES = 256 * 2**20
"""Bytes a request's body may have where nobody says otherwise."""

BODY_LIMIT_KEY = "gymsdk.largest"
"""The key of a request's scope under which its listener says how many."""

BODY_BUDGET_KEY = "gymsdk.together"
"""The key under which it says how many bytes the large bodies of all requests may have together."""

BODY_WAIT_SECONDS = 30.0
"""Seconds that a large body waits for others to be answered."""

BODY_RECEIVE_SECONDS = 60.0
"""Seconds until all of a body must have come: a client that stops half way does not keep its connection for ever."""

SERVICE_UNAVAILABLE = 503
RETRY_AFTER_SECONDS = 1.0
"""Seconds after which what is unavailable may be asked for again where nobody knows better."""

CLIENT_CLOSED_REQUEST = 499
"""The status that is counted of an answer nobody waits for."""

HEALTH_PATHS = ("/", "/livez", "/healthz", "/health")
"""Where a server says that it is there; `/readyz` says whether it can be used."""

ReadinessCheck: TypeAlias = Callable[[], bool]

Lifespan: TypeAlias = Callable[[FastAPI], AbstractAsyncContextManager[None]]
"""What an app is inside of for as long as it is served."""

log = logging.getLogger("gymsdk")


class RequestRejected(Exception):
    """A request cannot be answered: the status and the sentence say why; *fields* go beside the sentence."""

    headers: Mapping[str, str] = MappingProxyType({})

    def __init__(self, status: int, sentence: str, *, retry_after: float | None = None, **fields: Any) -> None:
        super().__init__(sentence)
        self.status = status
        self.retry_after = retry_after
        self.fields = fields


class ServerOverloaded(RequestRejected):
    """The server has no place for a request and has started nothing; the client may send it again.

    Args:
        sentence: What is full, and what the client can do.
        retry_after: Seconds after which a place is likely to be free.
    """

    headers = MappingProxyType({NOT_STARTED_HEADER: "1"})

    def __init__(self, sentence: str, *, retry_after: float) -> None:
        super().__init__(503, sentence, retry_after=retry_after, stage="admission", kind="too_many", retryable=True)


def create_app(
    name: str,
    about: str,
    *,
    figures: ServerMetrics,
    ready: ReadinessCheck = lambda: True,
    lifespan: Lifespan | None = None,
    waiting: Sequence[str] = ("/readyz",),
) -> FastAPI:
    """Give an app called *name* that answers for its health, counts what it is asked, and has no route of its own yet.

    *ready* says whether it can be used by now: the paths *waiting* answer 503 until then.
    """
    made = FastAPI(title=name, version=version("gymsdk"), description=about, lifespan=lifespan)
    made.add_middleware(RoutingMiddleware, figures=figures)
    for path in HEALTH_PATHS:
        if path not in waiting:
            made.add_api_route(path, _report_alive, include_in_schema=False)

    async def readiness() -> Response:
        return json_response({"status": "ok"}) if ready() else _build_error_response({"status": "starting"}, 503, None)

    async def counted() -> Response:
        return PlainTextResponse(await figures.render_current(), media_type="text/plain; version=0.0.4")

    for path in waiting:
        made.add_api_route(path, readiness, include_in_schema=False)
    made.add_api_route("/metrics", counted, include_in_schema=False)
    if profiling.get_cpu_profile() is not None:

        async def statistic() -> Response:
            return json_response(get_statistics(figures.name))

        made.add_api_route("/stats", statistic, include_in_schema=False)
    made.add_exception_handler(RequestRejected, _handle_rejection)
    made.add_exception_handler(GymsdkError, _handle_failure)
    made.add_exception_handler(HTTPException, _handle_http_error)
    made.add_exception_handler(RecursionError, _handle_recursion)
    made.add_exception_handler(ClientDisconnect, _handle_disconnect)
    return made


async def read_json_object(request: Request) -> Item:
    """Give a request's JSON object; raises `Refused` where it is none, or too large.

    A large one is parsed in a thread, and its size in memory counts until the request is answered.
    """
    text = await read_body(request) or b"{}"
    try:
        given, size = await large_json.loads_with_size(text, large_json.get_max_values(_max_body_bytes(request)))
    except large_json.TooComplex as error:
        raise RequestRejected(413, f"the body cannot be read: {error}") from None
    except ValueError as error:
        raise _unsupported_media_type("json_invalid", f"the body is no JSON: {error}") from None
    if len(text) >= LARGE_BODY_BYTES or size >= HEAVY_BODY_BYTES:
        body_budget().resize(request.scope, size)
    if not isinstance(given, dict):
        raise _unsupported_media_type("dict_type", "the body must be a JSON object")
    return given


async def read_body(request: Request) -> bytes:
    """Give a request's body; raises `Refused` where it is too large, compressed, or does not come.

    It is not received before there is room for it beside the large bodies of other requests.
    """
    told, largest = request.headers.get("content-length", ""), _max_body_bytes(request)
    length = int(told) if told.isdecimal() else None
    if length is not None and length > largest:
        raise _body_too_large(largest)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in {"", "identity"}:
        raise RequestRejected(415, f"the body is encoded as {encoding[:40]!r}; send it as plain JSON")
    if length is not None and length >= LARGE_BODY_BYTES:
        await _reserve_memory(request, length)
    try:
        async with asyncio.timeout(BODY_RECEIVE_SECONDS):
            return await _receive_body(request, largest, is_counted=length is not None)
    except TimeoutError:
        raise RequestRejected(
            408, f"the body did not come within {BODY_RECEIVE_SECONDS:g} seconds; send it again"
        ) from None


async def _receive_body(request: Request, largest: int, *, is_counted: bool) -> bytes:
    read = bytearray()
    async for chunk in request.stream():
        read += chunk
        if len(read) > largest:
            raise _body_too_large(largest)
        if not is_counted and len(read) >= LARGE_BODY_BYTES:
            # It does not say how large it will be.
            await _reserve_memory(request, largest)
            is_counted = True
    if len(read) >= LARGE_BODY_BYTES:
        body_budget().resize(request.scope, len(read))
    return bytes(read)


async def _reserve_memory(request: Request, size: int) -> None:
    """Wait until a body of *size* bytes has room beside the others; raises `Refused` if that takes too long."""
    most = request.scope.get(BODY_BUDGET_KEY) or default_body_budget()
    try:
        async with asyncio.timeout(BODY_WAIT_SECONDS):
            await body_budget().reserve(request.scope, size, most)
    except TimeoutError:
        sentence = "the server has as many large bodies as it has room for; send it again"
        raise ServerOverloaded(sentence, retry_after=RETRY_AFTER_SECONDS) from None


def _max_body_bytes(request: Request) -> int:
    largest: int = request.scope.get(BODY_LIMIT_KEY, MAX_BODY_BYTES)
    return largest


def _body_too_large(largest: int) -> RequestRejected:
    return RequestRejected(413, f"the body has more than {largest} bytes")


def _unsupported_media_type(kind: str, sentence: str) -> RequestRejected:
    return RequestRejected(422, sentence, shape=[{"type": kind, "loc": ["body"], "msg": sentence}])


def json_response(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Give *value* as a JSON answer."""
    return Response(dump_json(value), status_code=status, headers=headers, media_type="application/json")


async def _report_alive() -> Response:
    return json_response({"status": "ok"})


async def _handle_rejection(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRejected), "registered for it"
    return build_rejection(error)


def build_rejection(error: RequestRejected) -> Response:
    """Return the response that tells a client why its request was refused."""
    fields = dict(error.fields)
    context.add_log_fields(**{key: str(fields[key]) for key in ("stage", "kind") if key in fields})
    told = _build_error_response({"detail": fields.pop("shape", str(error)), **fields}, error.status, error.retry_after)
    told.headers.update(error.headers)
    return told


async def _handle_failure(_: Request, error: Exception) -> Response:
    if isinstance(error, UsageError):
        return json_response({"detail": str(error), "kind": _error_kind(error)}, status=422)
    if isinstance(error, EpisodeError):
        context.add_log_fields(stage=error.stage, kind=error.kind)
        told = {"detail": str(error), "stage": error.stage, "kind": error.kind, "retryable": error.retryable}
        told["outcome"] = "unscorable" if isinstance(error, Unscorable) else "failed"
        return _build_error_response(told, 503 if error.retryable else 422, error.retry_after)
    context.add_log_fields(kind=_error_kind(error))
    return _build_error_response({"detail": str(error), "kind": _error_kind(error)}, 503, None)


async def _handle_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for it"
    found = json_response({"detail": error.detail}, status=error.status_code)
    found.headers.update(error.headers or {})
    return found


async def _handle_recursion(_: Request, __: Exception) -> Response:
    return json_response({"detail": "the body is nested too deeply"}, status=422)


async def _handle_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def _build_error_response(told: Item, status: int, seconds: float | None) -> Response:
    found = json_response(told, status=status)
    if seconds is not None or status == SERVICE_UNAVAILABLE:
        found.headers["retry-after"] = str(max(1, round(seconds or RETRY_AFTER_SECONDS)))
    return found


def _error_kind(error: Exception) -> str:
    return type(error).__name__


Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
"""Answers one request."""


ERROR_DESCRIPTIONS = {
    408: "The body did not come in time.",
    409: "The session is not there, or in no state for this.",
    413: "The body is too large.",
    422: "The body does not fit; or the environment broke on it for good.",
    503: "It may go well another time: `retry-after` says when.",
}


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
"""A Responses request."""

CHAT_REQUEST_SCHEMA: Item = {
    "type": "object",
    "required": ["messages"],
    "properties": {"messages": {"type": "array", "items": MESSAGE_SCHEMA}, "stream": {"type": "boolean"}},
}
"""A request of Chat Completions, or of Anthropic's Messages."""

RESPONSE_SCHEMA: Item = {
    "type": "object",
    "required": ["output"],
    "properties": {"output": {"type": "array", "items": ITEM_SCHEMA}},
}


FLAT_ROW_SCHEMA: Item = {"type": "object", "required": ["responses_create_params"]}
"""A row of an environment whose own fields are not looked at."""

AGGREGATE_SCHEMA: Item = {
    "type": "object",
    "properties": {"verify_responses": {"type": "array", "items": {"type": "object"}}},
}


STREAM_RESPONSE: Item = {
    "description": "The answer, or a stream of server-sent events where the body asks for one.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}
"""An answer that may be streamed."""


class EndpointDocs(TypedDict):
    """What `FastAPI.add_api_route` is told of an endpoint."""

    openapi_extra: dict[str, Any]
    responses: dict[int | str, dict[str, Any]]


def document_endpoint(
    shape: Item, *, required: bool = True, more: Mapping[int, str] = MappingProxyType({})
) -> EndpointDocs:
    """Give the documentation of an endpoint whose body has this *shape*, a JSON schema; *more* it answers with."""
    content = {"application/json": {"schema": _inline_references(shape, shape.get("$defs", {}))}}
    return {
        "openapi_extra": {"requestBody": {"required": required, "content": content}},
        "responses": {status: {"description": words} for status, words in {**ERROR_DESCRIPTIONS, **more}.items()},
    }


def build_row_schema(task: type[Task], **more: Item) -> Item:
    """Give the shape of a row of *task*, with whatever *more* it must hold."""
    try:
        shape = task.model_json_schema()
    except PydanticUserError:
        # An author's own type may have no schema; what it takes is found out by its validator alone.
        shape = {"type": "object"}
    fields = {**shape.get("properties", {}), "responses_create_params": PROMPT_SCHEMA, **more}
    required = [*{"responses_create_params": None, **dict.fromkeys(shape.get("required", ())), **more}]
    return {**shape, "properties": fields, "required": required}


def _inline_references(shape: Any, named: Item) -> Any:
    """Give *shape* with what it refers to in its place: a reference would look for it in the whole document."""
    if isinstance(shape, list):
        return [_inline_references(each, named) for each in shape]
    if not isinstance(shape, dict):
        return shape
    if "$ref" in shape and (name := str(shape["$ref"]).removeprefix("#/$defs/")) in named:
        # A shape that holds itself is open from there on.
        rest = {other: each for other, each in named.items() if other != name}
        return _inline_references(named[name], rest)
    if "$ref" in shape:
        return {}
    return {key: _inline_references(each, named) for key, each in shape.items() if key != "$defs"}


HEARTBEAT_SECONDS = 5.0
"""Seconds until a stream begins whose answer is not there yet, and between two signs of life in it."""

EVENT_STREAM_TYPE = "text/event-stream"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""What keeps those in between from keeping a stream, or holding it back until it is whole."""

STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (name.encode(), value.encode()) for name, value in {"content-type": EVENT_STREAM_TYPE, **STREAM_HEADERS}.items()
    ],
}


@dataclass(frozen=True, slots=True)
class StreamResult:
    """How an answer ends: *early* where nothing of it has been sent, *late* as the last frames of its stream."""

    response: Response
    last_frames: bytes = b""


class StreamedResponse(Response):
    """An answer that *ending* gives, which is cancelled where the client goes away before.

    With a *beat* it is a stream, which begins after *every* seconds without an ending, and is kept alive by that frame.
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
        """Answer one request, its body read."""
        ending, gone = asyncio.ensure_future(self._ending()), asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({ending, gone}, timeout=self._every, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                # Nobody reads it; it is counted.
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)
            elif ending.done():
                await ending.result().response(scope, receive, send)
            else:
                await self._stream(ending, gone, send)
        finally:
            both: set[asyncio.Future[Any]] = {ending, gone}
            for each in both:
                each.cancel()
            # Nothing of a request outlasts it.
            await asyncio.wait(both)

    async def _stream(self, ending: asyncio.Task[StreamResult], gone: asyncio.Task[None], send: Send) -> None:
        await send(STREAM_START)
        while not (ending.done() or gone.done()):
            await send({"type": "http.response.body", "body": self._beat, "more_body": True})
            await asyncio.wait({ending, gone}, timeout=self._every, return_when=asyncio.FIRST_COMPLETED)
        if not gone.done():
            await send({"type": "http.response.body", "body": ending.result().last_frames})


def stream_frames(frames: bytes) -> Response:
    """Give a stream whose *frames* are all there."""
    return Response(frames, media_type=EVENT_STREAM_TYPE, headers=STREAM_HEADERS)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
