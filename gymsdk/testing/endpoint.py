"""What a policy takes: the requests that can be answered by who keeps nothing, runs no tools and reads messages."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any, TypeAlias

from aiohttp import web
from aiohttp.typedefs import Middleware

from gymsdk import large_json
from gymsdk.convert import anthropic, chat_inbound
from gymsdk.convert.api import ApiError, InboundApi, InvalidRequest
from gymsdk.convert.apis import INBOUND_APIS
from gymsdk.descriptors import ListeningSocket, install_exhaustion_handler, raise_open_file_limit
from gymsdk.errors import Failed, UsageError
from gymsdk.http.tls import is_loopback
from gymsdk.jsonl import dump_json
from gymsdk.observability.metrics import ServerMetrics
from gymsdk.servers import middleware
from gymsdk.servers import model as listing
from gymsdk.testing import engine
from gymsdk.testing.engine import BYTES, Engine, Reasoning, shown
from gymsdk.testing.faults import LIMITED, SOUND, Fate, Faults, fates
from gymsdk.types import Item, Model


def tokenized(body: Item, *, context: int | None) -> Item:
    """Give the ids of the `prompt`, or of the `messages`, in *body*; raises `Malformed`."""
    ids = _ids(body)
    spelled = [BYTES.decode([token]) for token in ids] if body.get("return_token_strs") else None
    return {"count": len(ids), "max_model_len": context, "tokens": ids, "token_strs": spelled}


def detokenized(body: Item) -> Item:
    """Give the text of the `tokens` in *body*; raises `Malformed`."""
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise InvalidRequest("'tokens' must be a list of token ids", "tokens")
    try:
        return {"prompt": BYTES.decode(tokens)}
    except UsageError as error:
        raise InvalidRequest(str(error), "tokens") from error


def _ids(body: Item) -> list[int]:
    if "messages" not in body:
        if not isinstance(body.get("prompt"), str):
            raise InvalidRequest("give a 'prompt', which is a text, or 'messages'", "prompt")
        return BYTES.encode(body["prompt"])
    # Read as what it would be asked as, so that what is malformed there is so here.
    chat_inbound.parse_request({"messages": body["messages"], "tools": body.get("tools")})
    open_ended = bool(body.get("continue_final_message"))
    prompted = not open_ended and body.get("add_generation_prompt") is not False
    try:
        ids = engine.of_chat(body).ids(add_generation_prompt=prompted)
    except UsageError as error:
        raise InvalidRequest(str(error), "messages") from error
    # Without the end of the turn and its line break the policy goes on with the last message.
    return ids[:-2] if open_ended else ids


JSON, EVENTS = "application/json", "text/event-stream"


async def delivered(request: web.Request, face: InboundApi, body: Item, answer: Item, fate: Fate) -> web.StreamResponse:
    """Give the *answer* to *body* as its client wants it told, a stream of events or JSON, and as its *fate* is."""
    if not body.get("stream"):
        return await _sent(request, dump_json(answer), JSON, fate)
    frames = [*face.stream_events(answer, body)]
    # What comes last says that all has come.
    kept = frames[: (len(frames) - 1) // 2] if fate.truncated else frames
    return await _sent(request, b"".join(kept), EVENTS, fate)


def json(body: Item, status: int = 200) -> web.Response:
    """Give *body* as an answer."""
    return web.Response(body=dump_json(body), status=status, content_type=JSON)


def refused(face: InboundApi, trouble: ApiError) -> web.Response:
    """Give the answer that tells of *trouble* in the words of the API of *face*."""
    answer = json(face.build_error(trouble), trouble.status)
    if trouble.status == LIMITED:
        answer.headers["Retry-After"] = "1"
    return answer


async def _sent(request: web.Request, whole: bytes, kind: str, fate: Fate) -> web.StreamResponse:
    answer = web.Response(body=whole, content_type=kind)
    if fate.cut is None:
        return answer
    assert request.transport is not None
    if fate.cut == "halfway":
        half = web.StreamResponse(headers={"Content-Type": kind, "Content-Length": str(len(whole))})
        await half.prepare(request)
        await half.write(whole[: len(whole) // 2])
        request.transport.abort()
        return half
    request.transport.abort()
    return answer


GRACE = 3.0
"""Seconds that requests under way get when their server is stopped."""

LAST = 1.0
"""Seconds in which those that are cut short are told so."""


class Underway:
    """The tasks that answer; once it is *ending*, no more are taken."""

    def __init__(self) -> None:
        self.ending = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def begun(self) -> None:
        """Count the task that runs until it is done."""
        task = asyncio.current_task()
        assert task is not None, "a handler is called in a task"
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self, grace: float = GRACE) -> None:
        """Wait *grace* seconds for what is under way, and cancel what is left of it."""
        self.ending = True
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=grace)
        late = set(self._tasks)
        for each in late:
            each.cancel()
        if late:
            await asyncio.wait(late, timeout=LAST)


UNDERWAY = web.AppKey("underway", Underway)
"""Where an application keeps it."""


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
    figures = ServerMetrics(name)
    engine = Engine(model, name=name, faults=faults, reasoning=reasoning, bundles=bundles)
    served = web.Application(client_max_size=LARGEST_BODY, middlewares=[_counting(figures), _ending, _nowhere])
    served[UNDERWAY] = Underway()
    drawn = fates(faults)
    for face in INBOUND_APIS.values():
        served.router.add_post(f"/v1/{face.path}", partial(_handle, face=face, engine=engine, drawn=drawn))
    plain: dict[str, tuple[InboundApi, Callable[[Item], Item]]] = {
        "/v1/messages/count_tokens": (anthropic.MESSAGES_API, _counted),
        "/tokenize": (chat_inbound.CHAT_API, partial(tokenized, context=faults.context)),
        "/detokenize": (chat_inbound.CHAT_API, detokenized),
    }
    for path, (face, give) in plain.items():
        served.router.add_post(path, partial(_plain, face=face, give=give))
    entry = listing.build_model_entry(name) | {"root": name, "max_model_len": faults.context}
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
    raise_open_file_limit()
    install_exhaustion_handler(asyncio.get_running_loop())
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


def _counting(figures: ServerMetrics) -> Middleware:
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
    told = _refused(request, middleware.STOPPED_ERROR)
    told.headers["Retry-After"] = "5"
    return told


@web.middleware
async def _nowhere(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what no route is for in the form of the API that was meant."""
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge as error:
        return _refused(request, ApiError(error.status, f"the body has more than {LARGEST_BODY} bytes"))
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
        sentence = middleware.describe_missing_route(request.path, request.method, error.headers.get("Allow"))
        return _refused(request, ApiError(error.status, sentence))


def _refused(request: web.Request, trouble: ApiError) -> web.Response:
    theirs = listing.is_anthropic_client(request.headers)
    return json(middleware.build_error_body(request.path, trouble, anthropic=theirs), trouble.status)


async def _handle(
    request: web.Request, *, face: InboundApi, engine: Engine, drawn: Iterator[Fate]
) -> web.StreamResponse:
    fate, sent = next(drawn), await request.read()
    if fate.delay:
        await asyncio.sleep(fate.delay)
    if fate.status:
        return refused(face, ApiError(fate.status, "this policy fails on purpose"))
    try:
        body = await _parsed(sent)
        answer = await engine.answer(face, body, fate)
    except InvalidRequest as error:
        return refused(face, ApiError(400, str(error), param=error.param))
    except Failed as error:
        return refused(face, ApiError(_status(error), str(error), code=error.kind))
    return await delivered(request, face, body, answer, fate)


async def _plain(request: web.Request, *, face: InboundApi, give: Callable[[Item], Item]) -> web.Response:
    try:
        return json(give(await _parsed(await request.read())))
    except InvalidRequest as error:
        return refused(face, ApiError(400, str(error), param=error.param))


def _counted(body: Item) -> Item:
    _, size = shown(anthropic.MESSAGES_API, body, anthropic.MESSAGES_API.parse_request(body))
    return anthropic.format_token_count(size)


async def _models(models: dict[str, Item], _: web.Request) -> web.Response:
    return json(listing.build_model_list(models))


async def _model(models: dict[str, Item], request: web.Request) -> web.Response:
    status, told = listing.find_model(models, request.match_info["model"], request.headers)
    return json(told, status)


async def _metrics(figures: ServerMetrics, _: web.Request) -> web.Response:
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
        parsed = await large_json.loads_async(body, strict=True)
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidRequest("the body must be a JSON object")
    return parsed


def _status(error: Failed) -> int:
    if error.kind == "model_rate_limited":
        return 429
    return 503 if error.retryable else 422
