"""The model server: one model behind the Responses, Chat Completions and Anthropic Messages APIs."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from gymsdk import responses, tracing
from gymsdk.cluster.router import STICKY_KEY
from gymsdk.concurrency import gather_or_cancel
from gymsdk.convert import anthropic, api
from gymsdk.convert.api import ApiError, InboundApi, InvalidRequest
from gymsdk.convert.apis import COUNTING_APIS, INBOUND_APIS, CountingApi
from gymsdk.convert.completions import COMPLETIONS_API
from gymsdk.convert.request_keys import NO_PREFILL, build_bad_key_error
from gymsdk.convert.tokens import drop_token_fields
from gymsdk.edge.app import SERVICE_UNAVAILABLE
from gymsdk.edge.app import create_app as create_base_app
from gymsdk.edge.errors import RequestRejected, build_error_body, describe_missing_route
from gymsdk.edge.openapi import (
    CHAT_REQUEST_SCHEMA,
    COMPLETION_REQUEST_SCHEMA,
    RESPONSES_REQUEST_SCHEMA,
    STREAM_RESPONSE,
    document_endpoint,
)
from gymsdk.edge.request import get_state, json_response, read_json_object
from gymsdk.edge.streams import HEARTBEAT_SECONDS, StreamedResponse, StreamResult, stream_frames
from gymsdk.errors import EpisodeError, Failed
from gymsdk.jsonl import NestingError, measure_depth
from gymsdk.observability import metrics
from gymsdk.observability.metrics import ServerMetrics
from gymsdk.once import OnceLogger
from gymsdk.servers.pausing import PausableModel, add_pause_endpoints
from gymsdk.types import Item, Model

once = OnceLogger(logging.getLogger("gymsdk"))

BAD_REQUEST, UNPROCESSABLE, TOO_MANY_REQUESTS = 400, 422, 429
NOT_IMPLEMENTED, BAD_GATEWAY, GATEWAY_TIMEOUT = 501, 502, 504

STATUS_BY_KIND = MappingProxyType(
    {
        "model_bad_answer": BAD_GATEWAY,
        "model_bad_request": BAD_REQUEST,
        "model_bad_tokens": BAD_GATEWAY,
        "model_no_token_ids": BAD_GATEWAY,
        "model_cannot_complete": NOT_IMPLEMENTED,
        "model_cannot_count": NOT_IMPLEMENTED,
        "model_misconfigured": BAD_GATEWAY,
        "model_not_found": BAD_GATEWAY,
        "model_rate_limited": TOO_MANY_REQUESTS,
        "model_refused": BAD_REQUEST,
        "model_timeout": GATEWAY_TIMEOUT,
        "model_unauthorized": BAD_GATEWAY,
    }
)
"""HTTP statuses of failures with a kind that shows which side caused them."""

MAX_REQUEST_DEPTH = 500
"""The nesting depth above which the request, and not the model's response, is blamed for a value that is too deep."""

TOO_DEEP_MESSAGE = "the body is nested too deeply"

OVERFLOW_CODE = "context_length_exceeded"
"""OpenAI's code of the error for a prompt that does not fit the context of the model."""

OVERFLOW_OPTION = "propagate_context_overflow_errors"
"""NeMo Gym's option, and the key in the `metadata` of a request that sets it for one rollout."""

NO_RETRY_HEADERS = {"x-should-retry": "false"}
"""Tells the SDKs of OpenAI and Anthropic not to retry the request."""


NOT_FOUND, UPGRADE_REQUIRED = 404, 426

DEFAULT_NAME = "policy_model"
"""Default name of a model server, as in NeMo Gym."""

REQUEST_SCHEMAS = {
    "responses": RESPONSES_REQUEST_SCHEMA,
    "responses/input_tokens": RESPONSES_REQUEST_SCHEMA,
    "chat/completions": CHAT_REQUEST_SCHEMA,
    "completions": COMPLETION_REQUEST_SCHEMA,
    "messages": CHAT_REQUEST_SCHEMA,
    "messages/count_tokens": CHAT_REQUEST_SCHEMA,
}
"""JSON schemas of the request bodies, by path."""

ERROR_RESPONSES = {
    BAD_REQUEST: "The request is invalid.",
    TOO_MANY_REQUESTS: "Too many requests: send the request again after `retry-after` seconds.",
    BAD_GATEWAY: "The model's server is misconfigured, or returned an invalid response.",
    GATEWAY_TIMEOUT: "The model did not answer in time.",
    NOT_IMPLEMENTED: "The engine lacks an endpoint that the route needs.",
}
"""Descriptions of the error statuses beside those of all servers."""

Responder: TypeAlias = Callable[[Item, Item], Awaitable[Item | bytes]]
"""Computes the response to a body and the Responses request made from it: a body, or all frames of a stream."""

TokenCounter: TypeAlias = Callable[[Item], Awaitable[int | None]]


def failure_to_api_error(error: EpisodeError) -> ApiError:
    """Convert a failed model call to an API error."""
    default_status = SERVICE_UNAVAILABLE if error.retryable else UNPROCESSABLE
    param = error.param if isinstance(error, Failed) else None
    return ApiError(STATUS_BY_KIND.get(error.kind, default_status), str(error), code=error.kind, param=param)


def request_error_to_api_error(error: InvalidRequest | RequestRejected | RecursionError) -> ApiError:
    """Convert an invalid request to an API error."""
    if isinstance(error, InvalidRequest):
        return ApiError(BAD_REQUEST, str(error), param=error.param)
    if isinstance(error, RecursionError):
        return ApiError(BAD_REQUEST, TOO_DEEP_MESSAGE)
    # Model APIs answer 400 where our other servers answer 422.
    return ApiError(BAD_REQUEST if error.status == UNPROCESSABLE else error.status, str(error))


def depth_to_api_error(request: Item) -> ApiError:
    """Build the error for a too deeply nested value: the request, or the model's response to it."""
    if measure_depth(request) > MAX_REQUEST_DEPTH:
        return ApiError(BAD_REQUEST, TOO_DEEP_MESSAGE)
    return ApiError(BAD_GATEWAY, "the model's response is nested too deeply", code="model_bad_answer")


def build_error_response(inbound_api: InboundApi, api_error: ApiError, error: EpisodeError | None = None) -> Response:
    """Build an error response in the form of an API.

    Args:
        inbound_api: The API.
        api_error: The error.
        error: The failure behind the error, if there is one.
    """
    if error is not None:
        tracing.add_log_fields(stage=error.stage, kind=error.kind)
    response = json_response(inbound_api.build_error(api_error), status=api_error.status)
    if error is not None and error.retryable:
        response.headers["retry-after"] = str(max(1, round(error.retry_after or 1)))
    elif api_error.status >= 500:  # noqa: PLR2004 - the SDKs retry after any 5xx status
        response.headers.update(NO_RETRY_HEADERS)
    return response


def build_model_entry(name: str) -> Item:
    """Build a model's entry with the fields of both OpenAI's and Anthropic's lists."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "gymsdk"}
    return openai | {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def build_model_list(models: Mapping[str, Item]) -> Item:
    """Build the list of models; there is at least one."""
    names = list(models)
    ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return {"object": "list", "data": list(models.values()), **ends}


def find_model(models: Mapping[str, Item], name: str, headers: Container[str]) -> tuple[int, Item]:
    """Return the status and the body for one model; errors have the form of the client's API."""
    if model := models.get(name):
        return 200, model
    sentence = f"unknown model {name!r}; this server lists {', '.join(models)}, but accepts any name in requests"
    api_error = ApiError(NOT_FOUND, sentence, code="model_not_found", param="model")
    return NOT_FOUND, (anthropic if is_anthropic_client(headers) else api).build_error(api_error)


def is_anthropic_client(headers: Container[str]) -> bool:
    """Return whether the request comes from a client of Anthropic's API, which always sends this header."""
    return "anthropic-version" in headers


def create_app(
    model: Model,
    *,
    name: str = DEFAULT_NAME,
    serves: str | None = None,
    server_metrics: ServerMetrics | None = None,
    every: float = HEARTBEAT_SECONDS,
) -> FastAPI:
    """Create the model server.

    Args:
        model: The model.
        name: The server's name.
        serves: A further name under which clients know the model.
        server_metrics: The server's metrics.
        every: Seconds between two heartbeats of a stream.
    """
    server_metrics = server_metrics or ServerMetrics(name)
    metrics.add_gpu_metrics(server_metrics)
    # The wrappers that capture calls pass on the pausable model inside them.
    pausable: PausableModel | None = getattr(model, "pausable", None)
    if pausable is None:
        model = pausable = PausableModel(model)
    app = create_base_app(
        name, "A model behind Responses, Chat Completions and Anthropic's Messages.", metrics=server_metrics
    )
    model_name = str(getattr(model, "name", name))
    has_retries = bool(get_option(model, "retries"))
    for route in build_routes(model, pausable):
        endpoint = ApiEndpoint(route.api, route.say, every=every, has_retries=has_retries, can_stream=route.can_stream)
        docs = document_endpoint(REQUEST_SCHEMAS[route.api.path], more=ERROR_RESPONSES)
        if route.can_stream:
            docs["responses"][200] = STREAM_RESPONSE
        app.add_post(f"/v1/{route.api.path}", endpoint.answer, **docs)
    models = ModelListEndpoints(dict.fromkeys((serves or model_name, model_name)))
    app.add_api_route("/v1/models", models.list_models, methods=["GET"])
    unknown: dict[int | str, dict[str, Any]] = {NOT_FOUND: {"description": "No model has this name."}}
    # The names of models contain slashes.
    app.add_api_route("/v1/models/{model:path}", models.get_model, methods=["GET"], responses=unknown)
    add_pause_endpoints(app, pausable)
    app.add_exception_handler(HTTPException, _handle_not_found)
    return app


async def _handle_not_found(request: Request, error: Exception) -> Response:
    """Answer an unknown route with an error in the form of the API that the client uses."""
    assert isinstance(error, HTTPException), "the handler is registered for this exception"
    headers = error.headers or {}
    sentence = describe_missing_route(
        request.scope["path"], request.method, headers.get("allow") or headers.get("Allow")
    )
    is_anthropic = is_anthropic_client(request.headers)
    status = error.status_code
    if request.headers.get("upgrade", "").lower() == "websocket":
        # Codex sends requests without a websocket at once after this status, and tries others again.
        status, sentence = UPGRADE_REQUIRED, f"{request.scope['path']} has no websocket; send requests with POST"
    content = build_error_body(request.scope["path"], ApiError(status, sentence), anthropic=is_anthropic)
    return json_response(content, status=status, headers=headers)


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """A route of the model server for POST requests.

    Attributes:
        api: The API; its path is that of the route below `/v1/`.
        say: Computes the response.
        can_stream: Whether a request can ask for a stream.
    """

    api: InboundApi
    say: Responder
    can_stream: bool = True


def build_routes(model: Model, pausable: PausableModel) -> tuple[ModelRoute, ...]:
    """Return the routes at which clients query *model*; *pausable* is this model without captures of its calls."""
    return (
        *(ModelRoute(inbound_api, ModelResponder(model, inbound_api).say) for inbound_api in INBOUND_APIS.values()),
        ModelRoute(COMPLETIONS_API, CompletionResponder(pausable).say),
        *(
            ModelRoute(counting.inbound, TokenCountResponder(model, counting).say, can_stream=False)
            for counting in COUNTING_APIS
        ),
    )


def get_option(model: Model, name: str) -> Any:
    """Return the option *name* of *model*, `None` if the model has no `ModelOptions`, as a scripted one."""
    return getattr(getattr(model, "options", None), name, None)


class ContextOverflow(Exception):
    """A prompt does not fit the context of the model; the argument is the message of the engine."""


class ApiEndpoint:
    """An endpoint of a model API.

    Args:
        inbound_api: Converts between the API and the Responses API.
        say: Computes the response.
        every: Seconds between two heartbeats of a stream.
        has_retries: Whether the model tries failed calls again by itself.
        can_stream: Whether a request can ask for a stream.
    """

    def __init__(
        self, inbound_api: InboundApi, say: Responder, *, every: float, has_retries: bool, can_stream: bool
    ) -> None:
        self._api = inbound_api
        self._say = say
        self._every = every
        self._has_retries = has_retries
        self._can_stream = can_stream

    async def answer(self, request: Request) -> Response:
        """Answer one request."""
        try:
            content = await read_json_object(request)
            model_request = self._api.parse_request(content)
        except (RequestRejected, InvalidRequest, RecursionError) as error:
            return build_error_response(self._api, request_error_to_api_error(error))
        # Without a rollout id, OpenAI's `prompt_cache_key` says which requests belong together.
        affinity = get_state(request.scope).rollout_id or content.get("prompt_cache_key")
        build_result = partial(
            self._build_result, content, model_request, affinity if isinstance(affinity, str) else None
        )
        return StreamedResponse(
            build_result,
            beat=self._api.heartbeat if self._can_stream and content.get("stream") else None,
            every=self._every,
        )

    async def _build_result(self, content: Item, model_request: Item, affinity: str | None) -> StreamResult:
        if affinity:
            STICKY_KEY.set(affinity)
        try:
            result = await self._say(content, model_request)
            return (
                StreamResult(stream_frames(result), result)
                if isinstance(result, bytes)
                else StreamResult(json_response(result))
            )
        except EpisodeError as error:
            api_error = failure_to_api_error(error)
            response = build_error_response(self._api, api_error, error)
            if self._has_retries and api_error.status >= 500:  # noqa: PLR2004 - the SDKs retry after any 5xx status
                # The retries of the client would multiply those of the model.
                response.headers.update(NO_RETRY_HEADERS)
            return StreamResult(response, self._api.build_error_frames(api_error))
        except ContextOverflow as error:
            api_error = ApiError(BAD_REQUEST, self._api.format_overflow(str(error)), code=OVERFLOW_CODE)
            return StreamResult(build_error_response(self._api, api_error), self._api.build_error_frames(api_error))
        except RecursionError:
            api_error = depth_to_api_error(content)
            return StreamResult(build_error_response(self._api, api_error), self._api.build_error_frames(api_error))


class ModelResponder:
    """Queries the model and converts its response to an API.

    Args:
        model: The model.
        inbound_api: The API.
    """

    def __init__(self, model: Model, inbound_api: InboundApi) -> None:
        self._model = model
        self._api = inbound_api

    async def say(self, content: Item, model_request: Item) -> Item | bytes:
        """Return the model's response in the form of the API: a body, or all frames of a stream if `content` wants one.

        Raises:
            ContextOverflow: The prompt does not fit the context, and the client gets an error for it.
            Failed: The model failed, or the API cannot express its response.
            NestingError: The response, which repeats parts of the request, is nested too deeply.
        """
        self._check_prefill(model_request)
        count = self._api.count_answers(content)
        if count == 1:
            answers = [await self._say_once(content, model_request)]
        else:
            self._check_token_ids()
            answers = await gather_or_cancel(
                self._say_once(content, vary_seed(model_request, number)) for number in range(count)
            )
        return format_answer(self._api, self._api.join_answers(answers), content)

    async def _say_once(self, content: Item, model_request: Item) -> Item:
        """Return one answer of the model in the form of the API."""
        # A response stopped by a content filter is returned too: each API has its own form for it.
        response = await responses.query_model_allowing_filtered(self._model, model_request, episode=None)
        if (message := responses.get_overflow_message(response)) and self._refuses_overflow(content):
            raise ContextOverflow(message)
        if tracing.get_captured_rollout():
            if not getattr(self._model, "captures_tokens", False):
                once.warn(
                    "a request asks for a capture of its token ids, and none is written: serve with --token-capture-dir"
                )
            elif not (self._api.echoes_token_ids or content.get("return_token_ids")):
                response = response | {"output": drop_token_fields(response["output"])}
        with report_inexpressible(self._api):
            return self._api.build_answer(response, content)

    def _check_token_ids(self) -> None:
        """Raise `Failed` if the server returns or captures token ids: these belong to one answer per call."""
        if get_option(self._model, "tokens") or tracing.get_captured_rollout():
            message = "'n' must be 1 with token ids, because a conversation continues one answer; send several requests"
            raise build_bad_key_error("n", message)

    def _check_prefill(self, request: Item) -> None:
        """Raise `Failed` if *request* begins the policy's answer, which is not possible with token ids."""
        items = responses.get_input_items(request)
        if (
            self._api.continues_last_turn
            and get_option(self._model, "tokens")
            and items
            and items[-1].get("role") == "assistant"
        ):
            message = f"the last message is the assistant's: {NO_PREFILL}; end with a user message"
            raise Failed(message, kind="model_bad_request")

    def _refuses_overflow(self, content: Item) -> bool:
        """Return whether the request with the body *content* gets an error if its prompt does not fit the context."""
        metadata = content.get("metadata")
        asked = metadata.get(OVERFLOW_OPTION) if isinstance(metadata, dict) else None
        chosen = {"true": True, "false": False}.get(str(asked).lower(), get_option(self._model, OVERFLOW_OPTION))
        return self._api.refuses_overflow if chosen is None else bool(chosen)


class CompletionResponder:
    """Forwards a legacy completion to the engine of the model."""

    def __init__(self, model: PausableModel) -> None:
        self._model = model

    async def say(self, content: Item, body: Item) -> Item | bytes:
        """Return the engine's completion: a body, or all frames of a stream if `content` wants one.

        Raises:
            ContextOverflow: The prompt does not fit the context.
            Failed: The engine failed or has no completions, or the rollout captures the token ids of its calls.
        """
        if tracing.get_captured_rollout():
            reason = "completions have no token capture; send a chat completion, or leave the capture out of the path"
            raise Failed(reason, kind="model_bad_request")
        answer = await self._model.complete(body)
        if overflow := responses.get_overflow_message(answer):
            raise ContextOverflow(overflow)
        with report_inexpressible(COMPLETIONS_API):
            completion = COMPLETIONS_API.build_answer(answer, content)
        return format_answer(COMPLETIONS_API, completion, content)


@contextmanager
def report_inexpressible(inbound_api: InboundApi) -> Iterator[None]:
    """Raise `Failed` if a response of the model has not the form that an API needs."""
    try:
        yield
    except NestingError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        message = f"the model's response cannot be expressed at {inbound_api.path}: {error!r}"
        raise Failed(message, kind="model_bad_answer", retryable=True) from error


def format_answer(inbound_api: InboundApi, answer: Item, content: Item) -> Item | bytes:
    """Return *answer*, or all frames of a stream if the body *content* of the request wants one."""
    if not content.get("stream"):
        return answer
    with report_inexpressible(inbound_api):
        return b"".join(inbound_api.stream_events(answer, content))


def vary_seed(request: Item, number: int) -> Item:
    """Return *request* for the answer with this *number*: with one seed, all answers would be the same.

    vLLM derives the seeds of several choices in the same way.
    """
    seed = request.get("seed")
    return request | {"seed": seed + number} if isinstance(seed, int) else request


class TokenCountResponder:
    """Counts the tokens of a prompt with the model's engine."""

    def __init__(self, model: Model, counting: CountingApi) -> None:
        self._format = counting.format_count
        self._count: TokenCounter | None = getattr(model, counting.method, None)

    async def say(self, _: Item, model_request: Item) -> Item:
        """Return the number of tokens in the prompt.

        Raises:
            Failed: The engine cannot count tokens.
        """
        tokens = await self._count(model_request) if self._count else None
        if tokens is None:
            message = "the engine behind this server cannot count tokens; read the usage of a response instead"
            raise Failed(message, kind="model_cannot_count")
        return self._format(tokens)


class ModelListEndpoints:
    """The endpoints that list the model under each of its names."""

    def __init__(self, names: Iterable[str]) -> None:
        self._models = {name: build_model_entry(name) for name in names}

    async def list_models(self) -> Response:
        """List the models."""
        return json_response(build_model_list(self._models))

    async def get_model(self, model: str, request: Request) -> Response:
        """Return one model."""
        status, content = find_model(self._models, model, request.headers)
        return json_response(content, status=status)
