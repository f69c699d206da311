"""What every server is made of: an app with health and figures, errors as statuses, bodies read and written once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version
from typing import Any, TypeAlias

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gymsdk import spent, trail
from gymsdk.errors import EpisodeError, GymsdkError, Unscorable, UsageError
from gymsdk.servers.door.routing import Routing
from gymsdk.servers.watching.figures import Figures
from gymsdk.servers.watching.profiling import statistics
from gymsdk.transcript import Item
from gymsdk.values import parsed, written

LARGEST = 256 * 2**20
"""Bytes a request's body may have where nobody says otherwise."""

LIMIT = "gymsdk.largest"
"""The key of a request's scope under which its listener says how many."""

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

    def __init__(self, status: int, sentence: str, *, retry_after: float | None = None, **fields: Any) -> None:
        super().__init__(sentence)
        self.status = status
        self.retry_after = retry_after
        self.fields = fields


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
        return PlainTextResponse(await figures.told(), media_type="text/plain; version=0.0.4")

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
    """Give a request's JSON object; raises `Refused` where it is none, or too large."""
    try:
        given = parsed(await arrived(request) or b"{}")
    except ValueError as error:
        raise _unfit("json_invalid", f"the body is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise _unfit("dict_type", "the body must be a JSON object")
    return given


async def arrived(request: Request) -> bytes:
    """Give a request's body; raises `Refused` where it is too large, or does not come."""
    told, largest = request.headers.get("content-length", ""), request.scope.get(LIMIT, LARGEST)
    if told.isdecimal() and int(told) > largest:
        raise Refused(413, f"the body has more than {largest} bytes")
    read = bytearray()
    try:
        async with asyncio.timeout(ARRIVING):
            async for chunk in request.stream():
                read += chunk
                if len(read) > largest:
                    raise Refused(413, f"the body has more than {largest} bytes")
    except TimeoutError:
        raise Refused(408, f"the body did not come within {ARRIVING:g} seconds; send it again") from None
    return bytes(read)


def _unfit(kind: str, sentence: str) -> Refused:
    return Refused(422, sentence, shape=[{"type": kind, "loc": ["body"], "msg": sentence}])


def answer(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Give *value* as a JSON answer."""
    return Response(written(value), status_code=status, headers=headers, media_type="application/json")


async def _alive() -> Response:
    return answer({"status": "ok"})


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused), "registered for it"
    fields = dict(error.fields)
    trail.tell(**{key: str(fields[key]) for key in ("stage", "kind") if key in fields})
    return _with_pause({"detail": fields.pop("shape", str(error)), **fields}, error.status, error.retry_after)


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
