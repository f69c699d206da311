"""The endpoint of a policy: what an engine's server answers, over HTTP."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import TypeAlias

from aiohttp import web
from aiohttp.typedefs import Middleware

from gymsdk import large_json
from gymsdk.addresses import is_loopback
from gymsdk.convert.faces import chat, messages
from gymsdk.convert.faces.face import Face, Malformed, Trouble
from gymsdk.convert.faces.known import FACES
from gymsdk.descriptors import ListeningSocket, raise_limit, warn_of_exhaustion
from gymsdk.errors import Failed, UsageError
from gymsdk.servers.door import refusals
from gymsdk.servers.watching.figures import Figures
from gymsdk.servers.wire import listing
from gymsdk.transcript import Item
from gymsdk.types import Model

from .delivery import delivered, json, refused
from .engine import Engine, Reasoning, shown
from .faults import SOUND, Fate, Faults, fates
from .tokenizing import detokenized, tokenized
from .underway import UNDERWAY, Underway

NAME = "policy"
"""What a policy is called where nobody says otherwise."""

BACKLOG = 4096
LARGEST_BODY = 256 * 1024**2
GONE = 499
"""The status that is counted where a client went away before its answer."""

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


def app(
    model: Model,
    *,
    name: str = NAME,
    faults: Faults = SOUND,
    reasoning: Reasoning = "field",
    bundles: bool = False,
) -> web.Application:
    """The application that serves *model* under *name*, in every API there is a face of, streamed or not.

    What it has been asked for is at `/metrics`. *reasoning* is how a chat is told thoughts, *bundles* puts the tokens
    that a chat asks for on its message too.
    """
    figures = Figures(name)
    engine = Engine(model, name=name, faults=faults, reasoning=reasoning, bundles=bundles)
    served = web.Application(client_max_size=LARGEST_BODY, middlewares=[_counting(figures), _ending, _nowhere])
    served[UNDERWAY] = Underway()
    drawn = fates(faults)
    for face in FACES.values():
        served.router.add_post(f"/v1/{face.path}", partial(_handle, face=face, engine=engine, drawn=drawn))
    plain: dict[str, tuple[Face, Callable[[Item], Item]]] = {
        "/v1/messages/count_tokens": (messages.FACE, _counted),
        "/tokenize": (chat.FACE, partial(tokenized, context=faults.context)),
        "/detokenize": (chat.FACE, detokenized),
    }
    for path, (face, give) in plain.items():
        served.router.add_post(path, partial(_plain, face=face, give=give))
    entry = listing.entry(name) | {"root": name, "max_model_len": faults.context}
    served.router.add_get("/v1/models", partial(_models, {name: entry}))
    served.router.add_get("/v1/models/{model:.+}", partial(_model, {name: entry}))
    served.router.add_get("/metrics", partial(_metrics, figures))
    served.router.add_get("/version", _version)
    served.router.add_get("/health", _healthy)
    served.router.add_get("/", _root)
    return served


@asynccontextmanager
async def serve(
    application: web.Application, host: str = "127.0.0.1", port: int = 0, *, insecure: bool = False
) -> AsyncIterator[str]:
    """Serve *application* while the context is open; gives its base URL, which ends in /v1.

    It asks nobody for a key: a *host* that other machines reach has to be *insecure* by name. Requests under way get a
    moment to end when it does; the others are told that it has been stopped.
    """
    _check_there(host)
    if not insecure and not is_loopback(host):
        raise UsageError(
            f"anybody who reaches {host!r} could use this policy, which asks for no key;"
            " serve on 127.0.0.1, or let them with --insecure (insecure=True in Python)"
        )
    raise_limit()
    warn_of_exhaustion(asyncio.get_running_loop())
    at = _bound(host, port)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.5, handler_cancellation=True)
    await runner.setup()
    try:
        # A full queue of waiting connections costs each client whom it turns away a second.
        site = web.SockSite(runner, at, backlog=BACKLOG)
        await site.start()
        named = f"[{host}]" if ":" in host else host
        yield f"http://{named}:{at.getsockname()[1]}/v1"
    finally:
        await site.stop()
        if (underway := application.get(UNDERWAY)) is not None:
            await underway.end()
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
        except asyncio.CancelledError:
            status = GONE
            raise
        else:
            status = answer.status
            return answer
        finally:
            resource = request.match_info.route.resource
            route = "other" if resource is None else resource.canonical
            figures.record_response(route, status, time.perf_counter() - started)

    return counting


@web.middleware
async def _ending(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tell those whose requests the end cuts short."""
    underway = request.app[UNDERWAY]
    underway.begun()
    try:
        return _stopped(request) if underway.ending else await handler(request)
    except asyncio.CancelledError:
        if not underway.ending or request.transport is None or request.transport.is_closing():
            raise
        return _stopped(request)


def _stopped(request: web.Request) -> web.Response:
    told = _refused(request, refusals.STOPPED)
    told.headers["Retry-After"] = "5"
    return told


@web.middleware
async def _nowhere(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what no route is for in the form of the API that was meant."""
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge as error:
        return _refused(request, Trouble(error.status, f"the body has more than {LARGEST_BODY} bytes"))
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
        sentence = refusals.nowhere(request.path, request.method, error.headers.get("Allow"))
        return _refused(request, Trouble(error.status, sentence))


def _refused(request: web.Request, trouble: Trouble) -> web.Response:
    theirs = listing.is_anthropics(request.headers)
    return json(refusals.refusal(request.path, trouble, anthropic=theirs), trouble.status)


async def _handle(request: web.Request, *, face: Face, engine: Engine, drawn: Iterator[Fate]) -> web.StreamResponse:
    fate, sent = next(drawn), await request.read()
    if fate.delay:
        await asyncio.sleep(fate.delay)
    if fate.status:
        return refused(face, Trouble(fate.status, "this policy fails on purpose"))
    try:
        body = await _parsed(sent)
        answer = await engine.answer(face, body, fate)
    except Malformed as error:
        return refused(face, Trouble(400, str(error), param=error.param))
    except Failed as error:
        return refused(face, Trouble(_status(error), str(error), code=error.kind))
    return await delivered(request, face, body, answer, fate)


async def _plain(request: web.Request, *, face: Face, give: Callable[[Item], Item]) -> web.Response:
    try:
        return json(give(await _parsed(await request.read())))
    except Malformed as error:
        return refused(face, Trouble(400, str(error), param=error.param))


def _counted(body: Item) -> Item:
    _, size = shown(messages.FACE, body, messages.FACE.parse_request(body))
    return messages.count(size)


async def _models(models: dict[str, Item], _: web.Request) -> web.Response:
    return json(listing.listed(models))


async def _model(models: dict[str, Item], request: web.Request) -> web.Response:
    status, told = listing.one(models, request.match_info["model"], request.headers)
    return json(told, status)


async def _metrics(figures: Figures, _: web.Request) -> web.Response:
    return web.Response(text=figures.render(), headers={"Content-Type": "text/plain; version=0.0.4"})


async def _version(_: web.Request) -> web.Response:
    return json({"version": version("gymsdk")})


async def _healthy(_: web.Request) -> web.Response:
    return web.Response()


async def _root(_: web.Request) -> web.Response:
    return json({"status": "ok"})


def _bound(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return ListeningSocket.from_socket(socket.create_server((host, port), family=family))
    except OSError as error:
        if error.errno in {errno.EADDRINUSE, errno.EACCES, errno.EPERM}:
            why = f"port {port} of {host} cannot be had ({error.strerror}); choose another with --port"
        else:
            why = _nowhere_here(host, error)
        raise UsageError(f"the policy cannot listen: {why}") from None


def _check_there(host: str) -> None:
    """Refuse a name of no machine before anything is said of who reaches it."""
    try:
        socket.getaddrinfo(host or None, 0)
    except OSError as error:
        raise UsageError(f"the policy cannot listen: {_nowhere_here(host, error)}") from None


def _nowhere_here(host: str, error: OSError) -> str:
    return f"{host!r} is no address of this machine ({error.strerror or error}); listen on 127.0.0.1"


async def _parsed(body: bytes) -> Item:
    try:
        parsed = await large_json.loaded(body, strict=True)
    except ValueError as error:
        raise Malformed(f"the body is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise Malformed("the body must be a JSON object")
    return parsed


def _status(error: Failed) -> int:
    if error.kind == "model_rate_limited":
        return 429
    return 503 if error.retryable else 422
