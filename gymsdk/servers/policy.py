"""A policy served over HTTP as an OpenAI-compatible endpoint, as slow, faulty and unreliable as it is told to be."""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Self, TypeAlias, TypeGuard

import orjson
from aiohttp import web
from aiohttp.typedefs import Middleware
from pydantic import BaseModel, ConfigDict, Field, model_validator

from gymsdk.convert.faces import chat as served
from gymsdk.errors import Failed, UsageError
from gymsdk.servers.figures import Figures
from gymsdk.transcript import Item
from gymsdk.types import Model

NAME = "policy"
"""What a policy is called where nobody says otherwise."""

BACKLOG = 4096
LARGEST_BODY = 256 * 1024**2
Answering: TypeAlias = Callable[[Item], Awaitable[Item]]
Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Faults(BaseModel):
    """What goes wrong: seconds of *latency* for each answer, the share of *errors* (5xx) and of *cuts*.

    Half of the cut connections end before the answer, half in its middle.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    latency: float = Field(0.0, ge=0)
    errors: float = Field(0.0, ge=0, le=1)
    cuts: float = Field(0.0, ge=0, le=1)
    seed: int = 0

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if self.errors + self.cuts > 1:
            raise ValueError("the shares of errors and cuts add up to more than 1")
        return self


SOUND = Faults()


class BadRequest(Exception):
    """A request that is answered 400; *param* is what is wrong with it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def app(model: Model, *, name: str = NAME, faults: Faults = SOUND) -> web.Application:
    """The application that serves *model* under *name*: Chat Completions, Responses, and the list of models.

    What it has been asked for is at `/metrics`.
    """
    figures = Figures(name)
    served_app = web.Application(client_max_size=LARGEST_BODY, middlewares=[_counting(figures)])
    luck = random.Random(faults.seed)
    for path, answering in {"chat/completions": _chat, "responses": _responses}.items():
        handler = partial(_handle, answering=partial(answering, model, name), faults=faults, luck=luck)
        served_app.router.add_post(f"/v1/{path}", handler)
    served_app.router.add_get("/v1/models", partial(_models, name))
    served_app.router.add_get("/metrics", partial(_metrics, figures))
    served_app.router.add_get("/", _root)
    return served_app


@asynccontextmanager
async def serve(
    application: web.Application, host: str = "127.0.0.1", port: int = 0, *, insecure: bool = False
) -> AsyncIterator[str]:
    """Serve *application* while the context is open; gives its base URL, which ends in /v1.

    It asks nobody for a key: a *host* that other machines reach has to be *insecure* by name.
    """
    if not insecure and not _is_loopback(host):
        raise UsageError(
            f"anybody who reaches {host!r} could use this policy: serve on 127.0.0.1, or say insecure=True"
        )
    bound = socket.create_server((host, port))
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        # A full queue of waiting connections costs each client whom it turns away a second.
        await web.SockSite(runner, bound, backlog=BACKLOG).start()
        yield f"http://{host}:{bound.getsockname()[1]}/v1"
    finally:
        await runner.cleanup()


def _counting(figures: Figures) -> Middleware:
    @web.middleware
    async def counting(request: web.Request, handler: Handler) -> web.StreamResponse:
        started, status = time.perf_counter(), 500
        try:
            answer = await handler(request)
        except web.HTTPException as error:
            status = error.status
            raise
        else:
            status = answer.status
            return answer
        finally:
            resource = request.match_info.route.resource
            route = "other" if resource is None else resource.canonical
            figures.answered(route, status, time.perf_counter() - started)

    return counting


async def _handle(
    request: web.Request, *, answering: Answering, faults: Faults, luck: random.Random
) -> web.StreamResponse:
    drawn, failing, early = luck.random(), luck.choice((500, 502, 503)), luck.random() < 0.5  # noqa: PLR2004 - a coin
    if faults.latency:
        await asyncio.sleep(faults.latency)
    if drawn < faults.errors:
        return _error(failing, "this policy fails on purpose", kind="server_error")
    answer = await _answer(request, answering)
    if drawn < faults.errors + faults.cuts:
        return await _cut(request, answer, early=early)
    return answer


async def _answer(request: web.Request, answering: Answering) -> web.Response:
    try:
        return _json(await answering(_parsed(await request.read())))
    except BadRequest as error:
        return _error(400, str(error), kind="invalid_request_error", param=error.param)
    except Failed as error:
        return _error(503 if error.retryable else 500, str(error), kind="server_error", code=error.kind)


async def _chat(model: Model, name: str, body: Item) -> Item:
    messages = body.get("messages")
    if not _is_objects(messages) or not all(isinstance(one.get("role"), str) for one in messages):
        raise BadRequest("'messages' must be a list of messages, each with a role", "messages")
    try:
        request = served.request(body)
    except (LookupError, TypeError, AttributeError) as error:
        raise BadRequest(f"a message or tool is malformed: {error!r}", "messages") from error
    return served.completion(await model.respond(request)) | {"model": name}


async def _responses(model: Model, name: str, body: Item) -> Item:
    if not isinstance(body.get("input"), str) and not _is_objects(body.get("input")):
        raise BadRequest("'input' must be a string or a list of items", "input")
    return await model.respond(body) | {"model": name}


async def _models(name: str, _: web.Request) -> web.Response:
    one = {"id": name, "object": "model", "created": 0, "owned_by": "gymsdk"}
    return _json({"object": "list", "data": [one]})


async def _metrics(figures: Figures, _: web.Request) -> web.Response:
    return web.Response(text=figures.text(), headers={"Content-Type": "text/plain; version=0.0.4"})


async def _root(_: web.Request) -> web.Response:
    return _json({"status": "ok"})


async def _cut(request: web.Request, answer: web.Response, *, early: bool) -> web.StreamResponse:
    """Close the connection before *answer*, or halfway through it."""
    assert request.transport is not None
    if early:
        request.transport.abort()
        return answer
    whole = answer.body
    assert isinstance(whole, bytes)
    half = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(whole))})
    await half.prepare(request)
    await half.write(whole[: len(whole) // 2])
    request.transport.abort()
    return half


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _parsed(body: bytes) -> Item:
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise BadRequest("the body must be a JSON object")
    if parsed.get("stream"):
        raise BadRequest("this policy does not stream", "stream")
    if parsed.get("n") not in {None, 1}:
        raise BadRequest("this policy gives one answer at a time", "n")
    return parsed


def _is_objects(value: object) -> TypeGuard[list[Item]]:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _json(body: Item, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def _error(status: int, message: str, *, kind: str, param: str | None = None, code: str | None = None) -> web.Response:
    return _json({"error": {"message": message, "type": kind, "param": param, "code": code}}, status)
