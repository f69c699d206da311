"""The model server: one model behind the APIs of OpenAI and Anthropic, straight to its adapter."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from gymsdk import context, responses
from gymsdk.convert import anthropic, anthropic_stream, api
from gymsdk.convert.api import ApiError, InboundApi, InvalidRequest
from gymsdk.convert.apis import INBOUND_APIS
from gymsdk.errors import EpisodeError, Failed
from gymsdk.http.client import RequestRefused as RefusedBehind
from gymsdk.jsonl import dump_json
from gymsdk.observability import metrics
from gymsdk.observability.metrics import ServerMetrics
from gymsdk.router import STICKY_KEY
from gymsdk.servers import middleware
from gymsdk.servers.app import (
    CHAT_REQUEST_SCHEMA,
    HEARTBEAT_SECONDS,
    RESPONSES_REQUEST_SCHEMA,
    SERVICE_UNAVAILABLE,
    STREAM_RESPONSE,
    RequestRejected,
    StreamedResponse,
    StreamResult,
    document_endpoint,
    json_response,
    read_json_object,
    stream_frames,
)
from gymsdk.servers.app import create_app as bare
from gymsdk.servers.routing import rollout_id_of
from gymsdk.types import Item, Model

BAD_REQUEST, UNPROCESSABLE, TOO_MANY_REQUESTS, NOT_IMPLEMENTED, BAD_GATEWAY, GATEWAY_TIMEOUT = (
    400,
    422,
    429,
    501,
    502,
    504,
)
"""A wrong request, one nobody can answer here, one that comes too soon; what the engine has not, a bad answer from
behind, or none in time."""

STATUS_BY_KIND = MappingProxyType(
    {
        "model_bad_answer": BAD_GATEWAY,
        "model_bad_request": BAD_REQUEST,
        "model_bad_tokens": BAD_GATEWAY,
        "model_cannot_count": NOT_IMPLEMENTED,
        "model_misconfigured": BAD_GATEWAY,
        "model_not_found": BAD_GATEWAY,
        "model_rate_limited": TOO_MANY_REQUESTS,
        "model_refused": BAD_REQUEST,
        "model_timeout": GATEWAY_TIMEOUT,
        "model_unauthorized": BAD_GATEWAY,
    }
)
"""The statuses of failures whose kind says whose fault they are."""

TOO_DEEP_MESSAGE = "the body is nested too deeply"

NO_RETRY_HEADERS = {"x-should-retry": "false"}
"""What tells the SDKs of OpenAI and Anthropic that a failure of the server is one for good."""


def failure_to_api_error(error: EpisodeError) -> ApiError:
    """Give the trouble that a failed call of a model is."""
    otherwise = SERVICE_UNAVAILABLE if error.retryable else UNPROCESSABLE
    param = error.param if isinstance(error, RefusedBehind) else None
    return ApiError(STATUS_BY_KIND.get(error.kind, otherwise), str(error), code=error.kind, param=param)


def request_error_to_api_error(error: InvalidRequest | RequestRejected | RecursionError) -> ApiError:
    """Give the trouble that a request is which cannot be read."""
    if isinstance(error, InvalidRequest):
        return ApiError(BAD_REQUEST, str(error), param=error.param)
    if isinstance(error, RecursionError):
        return ApiError(BAD_REQUEST, TOO_DEEP_MESSAGE)
    # What other servers refuse as unfit, the APIs of models call bad.
    return ApiError(BAD_REQUEST if error.status == UNPROCESSABLE else error.status, str(error))


def depth_to_api_error(asked: Item) -> ApiError:
    """Give the trouble that it is where something is nested too deeply: the request *asked*, or what is said to it."""
    try:
        dump_json(asked)
    except RecursionError:
        return ApiError(BAD_REQUEST, TOO_DEEP_MESSAGE)
    return ApiError(BAD_GATEWAY, "the model's answer is nested too deeply to be told", code="model_bad_answer")


def build_error_response(face: InboundApi, trouble: ApiError, error: EpisodeError | None = None) -> Response:
    """Give *trouble* as the API of *face* tells it; *error* is the failure it comes from."""
    if error is not None:
        context.add_log_fields(stage=error.stage, kind=error.kind)
    found = json_response(face.build_error(trouble), status=trouble.status)
    if error is not None and error.retryable:
        found.headers["retry-after"] = str(max(1, round(error.retry_after or 1)))
    elif trouble.status >= 500:  # noqa: PLR2004 - the SDKs ask again after each of them
        found.headers.update(NO_RETRY_HEADERS)
    return found


NOT_FOUND = 404


def build_model_entry(name: str) -> Item:
    """Give what OpenAI's list and Anthropic's say of the model *name*."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "gymsdk"}
    return openai | {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def build_model_list(models: Mapping[str, Item]) -> Item:
    """Give the list of *models*, at least one."""
    names = list(models)
    ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return {"object": "list", "data": list(models.values()), **ends}


def find_model(models: Mapping[str, Item], name: str, headers: Container[str]) -> tuple[int, Item]:
    """Give the status and the body that tell of the model *name*, in the form that a client with *headers* reads."""
    if found := models.get(name):
        return 200, found
    sentence = f"no model named {name!r}; there is {', '.join(models)}, and requests may name any"
    trouble = ApiError(NOT_FOUND, sentence, code="model_not_found", param="model")
    return NOT_FOUND, (anthropic_stream if is_anthropic_client(headers) else api).error(trouble)


def is_anthropic_client(headers: Container[str]) -> bool:
    """Whether *headers* are those of a client of Anthropic's API."""
    return "anthropic-version" in headers


DEFAULT_NAME = "policy_model"
"""What a model server is called where nobody says otherwise, as by NeMo Gym."""

REQUEST_SCHEMAS = {
    "responses": RESPONSES_REQUEST_SCHEMA,
    "chat/completions": CHAT_REQUEST_SCHEMA,
    "messages": CHAT_REQUEST_SCHEMA,
}
"""What the body of each API holds at least."""

ERROR_RESPONSES = {
    BAD_REQUEST: "The request is wrong.",
    TOO_MANY_REQUESTS: "It comes too soon: `retry-after` says when it may come again.",
    BAD_GATEWAY: "The model's server cannot be used as it is set up, or gave an answer nobody can read.",
    GATEWAY_TIMEOUT: "The model did not answer in time.",
}
Responder: TypeAlias = Callable[[Item, Item], Awaitable[Item | bytes]]
"""Gives what is said to a body and the request it is: a body, or all frames of a stream."""

TokenCounter: TypeAlias = Callable[[Item], Awaitable[int | None]]


def create_app(
    model: Model,
    *,
    name: str = DEFAULT_NAME,
    serves: str | None = None,
    figures: ServerMetrics | None = None,
    every: float = HEARTBEAT_SECONDS,
) -> FastAPI:
    """Give the app of the model server *name*, whose clients know the model as *serves*, too.

    A stream gives a sign of life *every* so many seconds.
    """
    figures = figures or ServerMetrics(name)
    metrics.add_gpu_metrics(figures)
    made = bare(name, "A model behind Responses, Chat Completions and Anthropic's Messages.", figures=figures)
    own = str(getattr(model, "name", name))
    for path, face in INBOUND_APIS.items():
        served = ApiEndpoint(face, ModelResponder(model, face).say, every=every)
        words = document_endpoint(REQUEST_SCHEMAS[path], more=ERROR_RESPONSES)
        words["responses"][200] = STREAM_RESPONSE
        made.add_api_route(f"/v1/{path}", served.answer, methods=["POST"], **words)
    counted = ApiEndpoint(anthropic.MESSAGES_API, TokenCountResponder(model).say, every=every)
    words = document_endpoint(CHAT_REQUEST_SCHEMA, more=ERROR_RESPONSES | {NOT_IMPLEMENTED: "The engine cannot count."})
    made.add_api_route("/v1/messages/count_tokens", counted.answer, methods=["POST"], **words)
    listed = ModelListEndpoints(dict.fromkeys((serves or own, own)))
    made.add_api_route("/v1/models", listed.list_models, methods=["GET"])
    unknown: dict[int | str, dict[str, Any]] = {NOT_FOUND: {"description": "There is no model of that name."}}
    made.add_api_route("/v1/models/{model:path}", listed.get_model, methods=["GET"], responses=unknown)
    made.add_exception_handler(HTTPException, _handle_not_found)
    return made


async def _handle_not_found(request: Request, error: Exception) -> Response:
    """Refuse what no route is for in the form of the API that was meant."""
    assert isinstance(error, HTTPException), "registered for it"
    headers = error.headers or {}
    sentence = middleware.describe_missing_route(
        request.scope["path"], request.method, headers.get("allow") or headers.get("Allow")
    )
    theirs = is_anthropic_client(request.headers)
    told = middleware.build_error_body(request.scope["path"], ApiError(error.status_code, sentence), anthropic=theirs)
    return json_response(told, status=error.status_code, headers=headers)


class ApiEndpoint:
    """What is said to the requests of the API of *face*; a stream gives a sign of life *every* so many seconds."""

    def __init__(self, face: InboundApi, say: Responder, *, every: float) -> None:
        self._face = face
        self._say = say
        self._every = every

    async def answer(self, request: Request) -> Response:
        """Answer one request."""
        try:
            asked = await read_json_object(request)
            given = self._face.parse_request(asked)
        except (RequestRejected, InvalidRequest, RecursionError) as error:
            return build_error_response(self._face, request_error_to_api_error(error))
        # A client without a rollout may still say which of its requests belong together, as OpenAI's do.
        together = rollout_id_of(request.scope) or asked.get("prompt_cache_key")
        ending = partial(self._build_result, asked, given, together if isinstance(together, str) else None)
        return StreamedResponse(ending, beat=self._face.heartbeat if asked.get("stream") else None, every=self._every)

    async def _build_result(self, asked: Item, given: Item, together: str | None) -> StreamResult:
        if together:
            STICKY_KEY.set(together)
        try:
            said = await self._say(asked, given)
            return (
                StreamResult(stream_frames(said), said)
                if isinstance(said, bytes)
                else StreamResult(json_response(said))
            )
        except EpisodeError as error:
            trouble = failure_to_api_error(error)
            return StreamResult(
                build_error_response(self._face, trouble, error), self._face.build_error_frames(trouble)
            )
        except RecursionError:
            trouble = depth_to_api_error(asked)
            return StreamResult(build_error_response(self._face, trouble), self._face.build_error_frames(trouble))


class ModelResponder:
    """*model* as the API of *face* has it."""

    def __init__(self, model: Model, face: InboundApi) -> None:
        self._model = model
        self._face = face

    async def say(self, asked: Item, given: Item) -> Item | bytes:
        """Give what the model answers to *given*, as the body that *asked* wants it told: whole, or all its frames."""
        # One that a filter held back too: each API has its own word for that.
        response = await responses.query_model_allowing_filtered(self._model, given, episode=None)
        try:
            said = self._face.build_answer(response, asked)
            return b"".join(self._face.stream_events(said, asked)) if asked.get("stream") else said
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            message = f"the model's answer cannot be told at {self._face.path}: {error!r}"
            raise Failed(message, kind="model_bad_answer", retryable=True) from error


class TokenCountResponder:
    """The tokens that the engine of *model* counts in a prompt."""

    def __init__(self, model: Model) -> None:
        self._count: TokenCounter | None = getattr(model, "count", None)

    async def say(self, _: Item, given: Item) -> Item:
        """Give how many there are in that of *given*; raises `Failed` where the engine cannot count."""
        tokens = await self._count(given) if self._count else None
        if tokens is None:
            message = "the engine behind this server cannot count tokens; ask it, and read them off the answer's usage"
            raise Failed(message, kind="model_cannot_count")
        return anthropic.format_token_count(tokens)


class ModelListEndpoints:
    """The *names* that the one model has."""

    def __init__(self, names: Iterable[str]) -> None:
        self._models = {name: build_model_entry(name) for name in names}

    async def list_models(self) -> Response:
        """List them."""
        return json_response(build_model_list(self._models))

    async def get_model(self, model: str, request: Request) -> Response:
        """Give one of them."""
        status, told = find_model(self._models, model, request.headers)
        return json_response(told, status=status)
