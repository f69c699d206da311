"""What every server is made of: an app with health and figures, errors as statuses, bodies read and written once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, TypeAlias

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gymsdk import large_json, spent, trail
from gymsdk.errors import EpisodeError, GymsdkError, Unscorable, UsageError
from gymsdk.http import NOT_STARTED
from gymsdk.servers.door.large_bodies import HEAVY, LARGE, budget, share_of_memory
from gymsdk.servers.door.routing import Routing
from gymsdk.servers.watching.figures import Figures
from gymsdk.servers.watching.profiling import statistics
from gymsdk.transcript import Item
from gymsdk.values import written

LARGEST = 256 * 2**20
"""Bytes a request's body may have where nobody says otherwise."""

LIMIT = "gymsdk.largest"
"""The key of a request's scope under which its listener says how many."""

TOGETHER = "gymsdk.together"
"""The key under which it says how many bytes the large bodies of all requests may have together."""

TURN = 30.0
"""Seconds that a large body waits for others to be answered."""

ARRIVING = 60.0
"""Seconds until all of a body must have come: a client that stops half way does not keep its connection for ever."""

UNAVAILABLE = 503
PAUSE = 1.0
"""Seconds after which what is unavailable may be asked for again where nobody knows better."""

GONE = 499
"""The status that is counted of an answer nobody waits for."""

HEALTH = ("/", "/livez", "/healthz", "/health")
"""Where a server says that it is there; `/readyz` says whether it can be used."""

Ready: TypeAlias = Callable[[], bool]

Lifespan: TypeAlias = Callable[[FastAPI], AbstractAsyncContextManager[None]]
"""What an app is inside of for as long as it is served."""

log = logging.getLogger("gymsdk")


class Refused(Exception):
    """A request cannot be answered: the status and the sentence say why; *fields* go beside the sentence."""

    headers: Mapping[str, str] = MappingProxyType({})

    def __init__(self, status: int, sentence: str, *, retry_after: float | None = None, **fields: Any) -> None:
        super().__init__(sentence)
        self.status = status
        self.retry_after = retry_after
        self.fields = fields


class Overloaded(Refused):
    """The server has no place for a request and has started nothing; the client may send it again.

    Args:
        sentence: What is full, and what the client can do.
        retry_after: Seconds after which a place is likely to be free.
    """

    headers = MappingProxyType({NOT_STARTED: "1"})

    def __init__(self, sentence: str, *, retry_after: float) -> None:
        super().__init__(503, sentence, retry_after=retry_after, stage="admission", kind="too_many", retryable=True)


def app(
    name: str,
    about: str,
    *,
    figures: Figures,
    ready: Ready = lambda: True,
    lifespan: Lifespan | None = None,
    waiting: Sequence[str] = ("/readyz",),
) -> FastAPI:
    """Give an app called *name* that answers for its health, counts what it is asked, and has no route of its own yet.

    *ready* says whether it can be used by now: the paths *waiting* answer 503 until then.
    """
    made = FastAPI(title=name, version=version("gymsdk"), description=about, lifespan=lifespan)
    made.add_middleware(Routing, figures=figures)
    for path in HEALTH:
        if path not in waiting:
            made.add_api_route(path, _alive, include_in_schema=False)

    async def readiness() -> Response:
        return answer({"status": "ok"}) if ready() else _with_pause({"status": "starting"}, 503, None)

    async def counted() -> Response:
        return PlainTextResponse(await figures.render_current(), media_type="text/plain; version=0.0.4")

    for path in waiting:
        made.add_api_route(path, readiness, include_in_schema=False)
    made.add_api_route("/metrics", counted, include_in_schema=False)
    if spent.ledger() is not None:

        async def statistic() -> Response:
            return answer(statistics(figures.name))

        made.add_api_route("/stats", statistic, include_in_schema=False)
    made.add_exception_handler(Refused, _refused)
    made.add_exception_handler(GymsdkError, _failed)
    made.add_exception_handler(HTTPException, _http)
    made.add_exception_handler(RecursionError, _nested)
    made.add_exception_handler(ClientDisconnect, _gone)
    return made


async def body(request: Request) -> Item:
    """Give a request's JSON object; raises `Refused` where it is none, or too large.

    A large one is parsed in a thread, and its size in memory counts until the request is answered.
    """
    text = await arrived(request) or b"{}"
    try:
        given, size = await large_json.measured(text, large_json.values_for(_largest(request)))
    except large_json.TooComplex as error:
        raise Refused(413, f"the body cannot be read: {error}") from None
    except ValueError as error:
        raise _unfit("json_invalid", f"the body is no JSON: {error}") from None
    if len(text) >= LARGE or size >= HEAVY:
        budget().resize(request.scope, size)
    if not isinstance(given, dict):
        raise _unfit("dict_type", "the body must be a JSON object")
    return given


async def arrived(request: Request) -> bytes:
    """Give a request's body; raises `Refused` where it is too large, compressed, or does not come.

    It is not received before there is room for it beside the large bodies of other requests.
    """
    told, largest = request.headers.get("content-length", ""), _largest(request)
    length = int(told) if told.isdecimal() else None
    if length is not None and length > largest:
        raise _too_large(largest)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in {"", "identity"}:
        raise Refused(415, f"the body is encoded as {encoding[:40]!r}; send it as plain JSON")
    if length is not None and length >= LARGE:
        await _room(request, length)
    try:
        async with asyncio.timeout(ARRIVING):
            return await _received(request, largest, is_counted=length is not None)
    except TimeoutError:
        raise Refused(408, f"the body did not come within {ARRIVING:g} seconds; send it again") from None


async def _received(request: Request, largest: int, *, is_counted: bool) -> bytes:
    read = bytearray()
    async for chunk in request.stream():
        read += chunk
        if len(read) > largest:
            raise _too_large(largest)
        if not is_counted and len(read) >= LARGE:
            # It does not say how large it will be.
            await _room(request, largest)
            is_counted = True
    if len(read) >= LARGE:
        budget().resize(request.scope, len(read))
    return bytes(read)


async def _room(request: Request, size: int) -> None:
    """Wait until a body of *size* bytes has room beside the others; raises `Refused` if that takes too long."""
    most = request.scope.get(TOGETHER) or share_of_memory()
    try:
        async with asyncio.timeout(TURN):
            await budget().reserve(request.scope, size, most)
    except TimeoutError:
        sentence = "the server has as many large bodies as it has room for; send it again"
        raise Overloaded(sentence, retry_after=PAUSE) from None


def _largest(request: Request) -> int:
    largest: int = request.scope.get(LIMIT, LARGEST)
    return largest


def _too_large(largest: int) -> Refused:
    return Refused(413, f"the body has more than {largest} bytes")


def _unfit(kind: str, sentence: str) -> Refused:
    return Refused(422, sentence, shape=[{"type": kind, "loc": ["body"], "msg": sentence}])


def answer(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Give *value* as a JSON answer."""
    return Response(written(value), status_code=status, headers=headers, media_type="application/json")


async def _alive() -> Response:
    return answer({"status": "ok"})


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused), "registered for it"
    return refusal_of(error)


def refusal_of(error: Refused) -> Response:
    """Return the response that tells a client why its request was refused."""
    fields = dict(error.fields)
    trail.tell(**{key: str(fields[key]) for key in ("stage", "kind") if key in fields})
    told = _with_pause({"detail": fields.pop("shape", str(error)), **fields}, error.status, error.retry_after)
    told.headers.update(error.headers)
    return told


async def _failed(_: Request, error: Exception) -> Response:
    if isinstance(error, UsageError):
        return answer({"detail": str(error), "kind": _kind(error)}, status=422)
    if isinstance(error, EpisodeError):
        trail.tell(stage=error.stage, kind=error.kind)
        told = {"detail": str(error), "stage": error.stage, "kind": error.kind, "retryable": error.retryable}
        told["outcome"] = "unscorable" if isinstance(error, Unscorable) else "failed"
        return _with_pause(told, 503 if error.retryable else 422, error.retry_after)
    trail.tell(kind=_kind(error))
    return _with_pause({"detail": str(error), "kind": _kind(error)}, 503, None)


async def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for it"
    found = answer({"detail": error.detail}, status=error.status_code)
    found.headers.update(error.headers or {})
    return found


async def _nested(_: Request, __: Exception) -> Response:
    return answer({"detail": "the body is nested too deeply"}, status=422)


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=GONE)


def _with_pause(told: Item, status: int, seconds: float | None) -> Response:
    found = answer(told, status=status)
    if seconds is not None or status == UNAVAILABLE:
        found.headers["retry-after"] = str(max(1, round(seconds or PAUSE)))
    return found


def _kind(error: Exception) -> str:
    return type(error).__name__


Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
"""Answers one request."""
