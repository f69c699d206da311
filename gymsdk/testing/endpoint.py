"""The HTTP endpoint of a test policy: all inbound APIs, the token interfaces of engines, `/metrics` and `/health`."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware

from gymsdk import __version__
from gymsdk.convert import chat_inbound
from gymsdk.convert.api import ApiError, InboundApi, InvalidRequest
from gymsdk.convert.apis import COUNTING_APIS, INBOUND_APIS, CountingApi
from gymsdk.edge.errors import STOPPED_ERROR, build_error_body, describe_missing_route
from gymsdk.errors import Failed, UsageError
from gymsdk.http import bodies
from gymsdk.http.pages import PageCheck, allowed_hosts
from gymsdk.http.tls import is_loopback
from gymsdk.jsonl import dump_json
from gymsdk.observability.loop_lag import sample_loop_lag
from gymsdk.observability.metrics import ServerMetrics
from gymsdk.servers.model import build_model_entry, build_model_list, find_model, is_anthropic_client
from gymsdk.sockets import Acceptor, raise_open_file_limit
from gymsdk.testing import token_api
from gymsdk.testing.engine import Engine, EngineKind, Reasoning, build_prompt
from gymsdk.testing.faults import NO_FAULT, RATE_LIMITED_STATUS, Faults, RequestFault, draw_faults
from gymsdk.testing.templates import TEMPLATES, TemplateTokenizer
from gymsdk.testing.token_api import TokenEndpoint
from gymsdk.types import Item, Model

JSON, EVENTS = "application/json", "text/event-stream"


async def send_answer(
    request: web.Request, api: InboundApi, body: Item, answer: Item, fault: RequestFault
) -> web.StreamResponse:
    """Return the response with *answer*, as JSON or a stream as requested, and with *fault*."""
    if not body.get("stream"):
        return await _send(request, dump_json(answer), JSON, fault)
    frames = [*api.stream_events(answer, body)]
    # The last event marks the end of the stream.
    sent_frames = frames[: (len(frames) - 1) // 2] if fault.truncated else frames
    return await _send(request, b"".join(sent_frames), EVENTS, fault)


def build_json_response(body: Item, status: int = 200) -> web.Response:
    """Return a JSON response with *body*."""
    return web.Response(body=dump_json(body), status=status, content_type=JSON)


def build_error_response(api: InboundApi, error: ApiError) -> web.Response:
    """Return the error response in the format of the API *api*."""
    answer = build_json_response(api.build_error(error), error.status)
    if error.status == RATE_LIMITED_STATUS:
        answer.headers["Retry-After"] = "1"
    return answer


async def _send(request: web.Request, body: bytes, kind: str, fault: RequestFault) -> web.StreamResponse:
    answer = web.Response(body=body, content_type=kind)
    if fault.cut is None:
        return answer
    assert request.transport is not None
    # `abort`, because `close` sends the buffers first.
    if fault.cut == "halfway":
        partial_answer = web.StreamResponse(headers={"Content-Type": kind, "Content-Length": str(len(body))})
        await partial_answer.prepare(request)
        await partial_answer.write(body[: len(body) // 2])
        request.transport.abort()
        return partial_answer
    request.transport.abort()
    return answer


GRACE_SECONDS = 3.0
"""Seconds that requests in progress get when the server stops."""

CANCEL_SECONDS = 1.0
"""Seconds for the error responses of requests that are cancelled."""


class RequestTracker:
    """Tracks the requests in progress; once it is *ending*, new requests are refused."""

    def __init__(self) -> None:
        self.ending = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def add_current(self) -> None:
        """Track the current task until it is done."""
        task = asyncio.current_task()
        assert task is not None, "aiohttp calls a handler in a task"
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self, grace: float = GRACE_SECONDS) -> None:
        """Wait *grace* seconds for the requests in progress, and cancel the rest."""
        self.ending = True
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=grace)
        running = set(self._tasks)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=CANCEL_SECONDS)


REQUEST_TRACKER = web.AppKey("tracker", RequestTracker)
"""The key of the tracker in an application."""


NAME = "policy"
"""The default name of the served model."""

MAX_BODY_BYTES = 256 * 1024**2
CLIENT_CLOSED_STATUS = 499
"""The status in the metrics for a client that closed the connection before the response."""

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

INVALID_HTTP = (HttpProcessingError, web.RequestPayloadError)
"""The errors of aiohttp for requests that break the protocol."""

log = logging.getLogger("gymsdk.endpoint")
# aiohttp logs a traceback for each request that is not HTTP, or whose body is not in its encoding.
log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], INVALID_HTTP)))


def build_app(
    model: Model,
    *,
    name: str = NAME,
    faults: Faults = NO_FAULT,
    reasoning: Reasoning = "field",
    kind: EngineKind = "vllm",
    template: str = "chatml",
    pairs: bool = False,
) -> web.Application:
    """Create the application that serves *model*.

    Args:
        model: The model that answers.
        name: The name of the model in requests.
        faults: What goes wrong, and how often.
        reasoning: How chat responses show reasoning.
        kind: The engine to imitate: it determines the token interfaces.
        template: The name of the chat template, one of `gymsdk.testing.templates.TEMPLATES`.
        pairs: Whether some pairs of letters are tokens, so that the policy writes encodings that the tokenizer would
            not choose.

    Raises:
        UsageError: There is no such template.
    """
    metrics = ServerMetrics(name)
    if template not in TEMPLATES:
        raise UsageError(f"there is no chat template {template!r}; there are {', '.join(TEMPLATES)}")
    tokenizer = TemplateTokenizer(TEMPLATES[template], pairs)
    engine = Engine(model, name=name, faults=faults, reasoning=reasoning, kind=kind, tokenizer=tokenizer)
    app = web.Application(
        client_max_size=MAX_BODY_BYTES, middlewares=[_count_requests(metrics), _track_requests, _convert_route_errors]
    )
    app[REQUEST_TRACKER] = RequestTracker()
    app.cleanup_ctx.append(_sample_loop_lag(metrics))
    request_faults = draw_faults(faults)
    for api in INBOUND_APIS.values():
        answer = partial(_handle, api=api, engine=engine, request_faults=request_faults)
        app.router.add_post(f"/v1/{api.path}", partial(_count_running, answer, engine))
    for path, answer_tokens in token_api.build_endpoints(engine).items():
        answer = partial(_handle_tokens, answer_tokens=answer_tokens, request_faults=request_faults)
        generates = path in token_api.GENERATING_PATHS
        app.router.add_post(path, partial(_count_running, answer, engine) if generates else answer)
    for counting in COUNTING_APIS:
        app.router.add_post(f"/v1/{counting.inbound.path}", partial(_count_tokens, counting=counting, engine=engine))
    entry = build_model_entry(name) | {"root": name, "max_model_len": faults.context}
    app.router.add_get("/v1/models", partial(_models, {name: entry}))
    app.router.add_get("/v1/models/{model:.+}", partial(_model, {name: entry}))
    app.router.add_get("/metrics", partial(_metrics, metrics, engine))
    app.router.add_get("/version", _version)
    app.router.add_get("/health", _health)
    app.router.add_get("/", _root)
    return app


@asynccontextmanager
async def serve(
    application: web.Application, host: str = "127.0.0.1", port: int = 0, *, insecure: bool = False
) -> AsyncIterator[str]:
    """Serve *application* while the context is open.

    When the context closes, requests in progress get a few seconds; after that they receive an error response.

    Args:
        application: The application.
        host: The host to listen on.
        port: The port to listen on; 0 for any.
        insecure: Whether *host* may be reachable by other machines, although no key is required.

    Yields:
        The base URL, which ends in /v1.
    """
    _check_host(host)
    if not insecure and not is_loopback(host):
        raise UsageError(
            f"anyone who reaches {host!r} could use this policy, which requires no key;"
            " serve on 127.0.0.1, or allow it with --insecure (insecure=True in Python)"
        )
    raise_open_file_limit()
    sock = _bind(host, port)
    # The first one: a request of a web page must reach nothing else, not even the metrics.
    application.middlewares.insert(0, _check_pages(PageCheck(allowed_hosts(host))))
    # With cancellation: a policy must not play on for a client that has gone.
    runner = web.AppRunner(application, access_log=None, logger=log, shutdown_timeout=0.5, handler_cancellation=True)
    await runner.setup()
    assert runner.server is not None, "the runner has been set up"
    acceptor = Acceptor(sock, runner.server)
    try:
        acceptor.open()
        url_host = f"[{host}]" if ":" in host else host
        yield f"http://{url_host}:{sock.getsockname()[1]}/v1"
    finally:
        # New connections first: the tracker waits only for the requests that it knows.
        acceptor.close()
        sock.close()
        if (tracker := application.get(REQUEST_TRACKER)) is not None:
            await tracker.end()
        await runner.cleanup()


def _check_pages(check: PageCheck) -> Middleware:
    @web.middleware
    async def check_page(request: web.Request, handler: Handler) -> web.StreamResponse:
        headers = [(name.lower(), value) for name, value in request.raw_headers]
        if (rejection := check.find_rejection(headers, "http")) is not None:
            return build_json_response({"detail": rejection.reason}, rejection.status)
        return await handler(request)

    return check_page


def _count_requests(metrics: ServerMetrics) -> Middleware:
    @web.middleware
    async def count_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
        started, status, sent = time.perf_counter(), 500, 0
        metrics.start_request()
        try:
            answer = await handler(request)
        except web.HTTPException as error:
            status = error.status
            raise
        except asyncio.CancelledError:
            status = CLIENT_CLOSED_STATUS
            raise
        else:
            status, sent = answer.status, answer.content_length or 0
            return answer
        finally:
            metrics.in_flight -= 1
            resource = request.match_info.route.resource
            route = "other" if resource is None else resource.canonical
            seconds, received = time.perf_counter() - started, request.content_length or 0
            metrics.record_response(route, status, seconds, received=received, sent=sent)

    return count_requests


def _sample_loop_lag(metrics: ServerMetrics) -> Callable[[web.Application], AsyncIterator[None]]:
    async def sample(_: web.Application) -> AsyncIterator[None]:
        with sample_loop_lag(metrics):
            yield

    return sample


@web.middleware
async def _track_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer requests that the stop of the server cuts short with an error."""
    tracker = request.app[REQUEST_TRACKER]
    tracker.add_current()
    try:
        return _build_stopped_response(request) if tracker.ending else await handler(request)
    except asyncio.CancelledError:
        # Cancelled by the client, which reads no answer any more.
        if not tracker.ending or request.transport is None or request.transport.is_closing():
            raise
        return _build_stopped_response(request)


def _build_stopped_response(request: web.Request) -> web.Response:
    response = _build_route_error(request, STOPPED_ERROR)
    response.headers["Retry-After"] = "5"
    return response


@web.middleware
async def _convert_route_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer requests without a route in the error format of the API that the path suggests."""
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge as error:
        return _build_route_error(request, ApiError(error.status, f"the body exceeds {MAX_BODY_BYTES} bytes"))
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
        sentence = describe_missing_route(request.path, request.method, error.headers.get("Allow"))
        return _build_route_error(request, ApiError(error.status, sentence))


def _build_route_error(request: web.Request, error: ApiError) -> web.Response:
    is_anthropic = is_anthropic_client(request.headers)
    return build_json_response(build_error_body(request.path, error, anthropic=is_anthropic), error.status)


async def _count_running(answer: Handler, engine: Engine, request: web.Request) -> web.StreamResponse:
    """Answer *request*, which is one of the engine's running requests until then."""
    engine.running += 1
    try:
        return await answer(request)
    finally:
        engine.running -= 1


async def _handle(
    request: web.Request, *, api: InboundApi, engine: Engine, request_faults: Iterator[RequestFault]
) -> web.StreamResponse:
    fault = next(request_faults)
    if fault.delay:
        await asyncio.sleep(fault.delay)
    if fault.status:
        return build_error_response(api, ApiError(fault.status, "this policy fails on purpose"))
    try:
        body = await _read_object(request)
        answer = await engine.answer(api, body, fault)
    except InvalidRequest as error:
        return build_error_response(api, ApiError(400, str(error), param=error.param))
    except Failed as error:
        return build_error_response(api, ApiError(_get_status(error), str(error), code=error.kind))
    return await send_answer(request, api, body, answer, fault)


async def _handle_tokens(
    request: web.Request, *, answer_tokens: TokenEndpoint, request_faults: Iterator[RequestFault]
) -> web.StreamResponse:
    """Answer a request to a token interface. Only generations have faults."""
    generates = request.path in token_api.GENERATING_PATHS
    fault = next(request_faults) if generates else RequestFault()
    if fault.delay:
        await asyncio.sleep(fault.delay)
    if fault.status:
        return build_error_response(chat_inbound.CHAT_API, ApiError(fault.status, "this policy fails on purpose"))
    try:
        body = await _read_object(request)
        answer = await answer_tokens(body, fault)
    except InvalidRequest as error:
        return build_error_response(chat_inbound.CHAT_API, ApiError(400, str(error), param=error.param))
    except Failed as error:
        return build_error_response(chat_inbound.CHAT_API, ApiError(_get_status(error), str(error), code=error.kind))
    if (api := token_api.STREAMED_APIS.get(request.path)) is not None:
        return await send_answer(request, api, body, answer, fault)
    return await _send(request, dump_json(answer), JSON, fault)


async def _count_tokens(request: web.Request, *, counting: CountingApi, engine: Engine) -> web.Response:
    try:
        body = await _read_object(request)
        parsed = counting.inbound.parse_request(body)
        _, size = build_prompt(counting.inbound, body, parsed, engine.tokenizer)
        return build_json_response(counting.format_count(size))
    except InvalidRequest as error:
        return build_error_response(counting.inbound, ApiError(400, str(error), param=error.param))


async def _models(models: dict[str, Item], _: web.Request) -> web.Response:
    return build_json_response(build_model_list(models))


async def _model(models: dict[str, Item], request: web.Request) -> web.Response:
    status, response = find_model(models, request.match_info["model"], request.headers)
    return build_json_response(response, status)


async def _metrics(metrics: ServerMetrics, engine: Engine, _: web.Request) -> web.Response:
    running = f'vllm:num_requests_running{{engine="0",model_name="{engine.name}"}} {float(engine.running)}\n'
    text = metrics.render() + (running if engine.kind.startswith("vllm") else "")
    return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4"})


async def _version(_: web.Request) -> web.Response:
    return build_json_response({"version": __version__})


async def _health(_: web.Request) -> web.Response:
    return web.Response()


async def _root(_: web.Request) -> web.Response:
    return build_json_response({"status": "ok"})


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno in {errno.EADDRINUSE, errno.EACCES, errno.EPERM}:
            reason = f"port {port} of {host} is not available ({error.strerror}); choose another with --port"
        else:
            reason = _describe_bind_error(host, error)
        raise UsageError(f"the policy cannot listen: {reason}") from None


def _check_host(host: str) -> None:
    """Raise `UsageError` if *host* is not an address, before the check who can reach it."""
    try:
        socket.getaddrinfo(host or None, 0)
    except OSError as error:
        raise UsageError(f"the policy cannot listen: {_describe_bind_error(host, error)}") from None


def _describe_bind_error(host: str, error: OSError) -> str:
    return f"{host!r} is not an address of this machine ({error.strerror or error}); listen on 127.0.0.1"


async def _read_object(request: web.Request) -> Item:
    try:
        parsed = await bodies.loads_async(await request.read(), strict=True)
    except web.RequestPayloadError as error:
        raise InvalidRequest("the body cannot be read: its encoding is invalid, or it is incomplete") from error
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidRequest("the body must be a JSON object")
    return parsed


def _get_status(error: Failed) -> int:
    if error.kind == "model_rate_limited":
        return 429
    return 503 if error.retryable else 422
