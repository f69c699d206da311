"""The model server: one model behind Responses and Chat Completions, straight to its adapter."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeGuard

from fastapi import FastAPI, Request, Response

from gymsdk import responses, usage
from gymsdk.convert.faces import chat as served
from gymsdk.errors import EpisodeError, Failed
from gymsdk.servers.app import Refused, answer, body
from gymsdk.servers.app import app as bare
from gymsdk.servers.documents import PROMPT, documented
from gymsdk.servers.figures import Figures
from gymsdk.servers.presence import while_there
from gymsdk.transcript import Item
from gymsdk.types import Model

NAMED = "policy_model"
"""What a model server is called where nobody says otherwise, as by NeMo Gym."""

LIMITED, BAD = 429, 400
"""The statuses of a request that comes too soon, and of one that is wrong."""

OURS = frozenset({"model_bad_request", "model_refused"})
"""Failures that lie with the request."""


def app(model: Model, *, name: str = NAMED, serves: str | None = None, figures: Figures | None = None) -> FastAPI:
    """Give the app of the model server *name*, whose clients know the model as *serves*."""
    figures = figures or Figures(name)
    made = bare(name, "A model behind the OpenAI API's two forms.", figures=figures)
    server = Served(model, serves or str(getattr(model, "name", name)))
    chat = {"type": "object", "required": ["messages"], "properties": {"messages": {"type": "array"}}}
    more = {BAD: "The request is wrong.", LIMITED: "It comes too soon: `retry-after` says when it may come again."}
    made.add_api_route("/v1/responses", server.respond, methods=["POST"], **documented(PROMPT, more=more))
    made.add_api_route("/v1/chat/completions", server.complete, methods=["POST"], **documented(chat, more=more))
    made.add_api_route("/v1/models", server.models, methods=["GET"])
    return made


class Served:
    """The endpoints of *model*, called *name*."""

    def __init__(self, model: Model, name: str) -> None:
        self._model = model
        self._name = name

    async def respond(self, request: Request) -> Response:
        """Answer a Responses request."""
        return await _told(request, self._whole)

    async def complete(self, request: Request) -> Response:
        """Answer a Chat Completions request."""
        return await _told(request, self._completion)

    async def models(self) -> Response:
        """List the one model."""
        one = {"id": self._name, "object": "model", "created": 0, "owned_by": "gymsdk"}
        return answer({"object": "list", "data": [one]})

    async def _response(self, asked: Item) -> Item:
        if not isinstance(asked.get("input"), str) and not _are_items(asked.get("input")):
            raise Refused(BAD, "'input' must be a string or a list of items", param="input")
        if not (asked.get("tools") is None or _are_objects(asked["tools"])):
            raise Refused(BAD, "'tools' must be a list of tools", param="tools")
        given = {key: value for key, value in asked.items() if key not in {"stream", "stream_options"}}
        try:
            return await responses.asked(self._model, given, episode=None)
        except EpisodeError as error:
            if error.kind != "no_episode":
                raise
            sentence = f"{self._name} plays whole episodes, and a request is none: POST the row to /run of an agent"
            raise Failed(f"{sentence}, or serve another model with --model", kind=error.kind) from None

    async def _whole(self, asked: Item) -> Item:
        return usage.whole(await self._response(asked))

    async def _completion(self, asked: Item) -> Item:
        messages = asked.get("messages")
        if not _are_objects(messages) or not all(isinstance(each.get("role"), str) for each in messages):
            raise Refused(BAD, "'messages' must be a list of messages, each with a role", param="messages")
        if asked.get("n") not in {None, 1}:
            raise Refused(BAD, "this server gives one answer at a time; leave 'n' out", param="n")
        try:
            request = served.request(asked)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise Refused(BAD, f"a message or tool is malformed: {error!r}", param="messages") from None
        response = await self._response(request)
        try:
            return served.completion(response)
        except (LookupError, TypeError, AttributeError) as error:
            message = f"the model's answer cannot be told as a completion: {error!r}"
            raise Failed(message, kind="model_bad_answer", retryable=True) from error


async def _told(request: Request, answering: Callable[[Item], Awaitable[Item]]) -> Response:
    """Give what *answering* says to the body of *request*, or its error in OpenAI's form."""
    try:
        asked = await body(request)
        if asked.get("stream"):
            raise Refused(BAD, "this server does not stream yet; leave 'stream' out", param="stream")  # noqa: TRY301 - as any other refusal
        return answer(await while_there(request, _coroutine(answering, asked)))
    except Refused as error:
        return _error(error.status, str(error), "invalid_request_error", param=error.fields.get("param"))
    except EpisodeError as error:
        response = _error(
            _status(error), str(error), "server_error" if error.retryable else "invalid_request_error", code=error.kind
        )
        if error.retryable:
            response.headers["retry-after"] = str(max(1, round(error.retry_after or 1)))
        return response


async def _coroutine(answering: Callable[[Item], Awaitable[Item]], asked: Item) -> Item:
    return await answering(asked)


def _status(error: EpisodeError) -> int:
    if error.kind == "model_rate_limited":
        return LIMITED
    if error.retryable:
        return 503
    return BAD if error.kind in OURS else 422


def _error(status: int, message: str, kind: str, *, code: str | None = None, param: Any = None) -> Response:
    return answer({"error": {"message": message, "type": kind, "param": param, "code": code}}, status=status)


def _are_objects(value: object) -> TypeGuard[list[Item]]:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _are_items(value: object) -> TypeGuard[list[Item]]:
    return responses.is_response({"output": value})
