"""The model server: one model behind the APIs of OpenAI and Anthropic, straight to its adapter."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from gymsdk import responses
from gymsdk.convert.faces import messages
from gymsdk.convert.faces.face import Face, Malformed, Trouble
from gymsdk.convert.faces.known import FACES
from gymsdk.errors import EpisodeError, Failed
from gymsdk.replicas import STICKY
from gymsdk.servers.app import Refused, answer, body
from gymsdk.servers.app import app as bare
from gymsdk.servers.door import refusals
from gymsdk.servers.door.routing import rollout_of
from gymsdk.servers.watching import gpus
from gymsdk.servers.watching.figures import Figures
from gymsdk.servers.wire import listing, troubles
from gymsdk.servers.wire.documents import CHAT, CREATE, STREAMED, documented
from gymsdk.servers.wire.streaming import BEAT, Ending, Pending, streamed
from gymsdk.transcript import Item
from gymsdk.types import Model

NAMED = "policy_model"
"""What a model server is called where nobody says otherwise, as by NeMo Gym."""

SHAPES = {"responses": CREATE, "chat/completions": CHAT, "messages": CHAT}
"""What the body of each API holds at least."""

MORE = {
    troubles.BAD: "The request is wrong.",
    troubles.LIMITED: "It comes too soon: `retry-after` says when it may come again.",
    troubles.GATEWAY: "The model's server cannot be used as it is set up, or gave an answer nobody can read.",
    troubles.LATE: "The model did not answer in time.",
}
Say: TypeAlias = Callable[[Item, Item], Awaitable[Item | bytes]]
"""Gives what is said to a body and the request it is: a body, or all frames of a stream."""

Count: TypeAlias = Callable[[Item], Awaitable[int | None]]


def app(
    model: Model, *, name: str = NAMED, serves: str | None = None, figures: Figures | None = None, every: float = BEAT
) -> FastAPI:
    """Give the app of the model server *name*, whose clients know the model as *serves*, too.

    A stream gives a sign of life *every* so many seconds.
    """
    figures = figures or Figures(name)
    gpus.watched(figures)
    made = bare(name, "A model behind Responses, Chat Completions and Anthropic's Messages.", figures=figures)
    own = str(getattr(model, "name", name))
    for path, face in FACES.items():
        served = Served(face, Asked(model, face).say, every=every)
        words = documented(SHAPES[path], more=MORE)
        words["responses"][200] = STREAMED
        made.add_api_route(f"/v1/{path}", served.answer, methods=["POST"], **words)
    counted = Served(messages.FACE, Counted(model).say, every=every)
    words = documented(CHAT, more=MORE | {troubles.UNABLE: "The engine cannot count."})
    made.add_api_route("/v1/messages/count_tokens", counted.answer, methods=["POST"], **words)
    listed = Listed(dict.fromkeys((serves or own, own)))
    made.add_api_route("/v1/models", listed.list_models, methods=["GET"])
    unknown: dict[int | str, dict[str, Any]] = {listing.MISSING: {"description": "There is no model of that name."}}
    made.add_api_route("/v1/models/{model:path}", listed.get_model, methods=["GET"], responses=unknown)
    made.add_exception_handler(HTTPException, _nowhere)
    return made


async def _nowhere(request: Request, error: Exception) -> Response:
    """Refuse what no route is for in the form of the API that was meant."""
    assert isinstance(error, HTTPException), "registered for it"
    headers = error.headers or {}
    sentence = refusals.nowhere(request.scope["path"], request.method, headers.get("allow") or headers.get("Allow"))
    theirs = listing.is_anthropics(request.headers)
    told = refusals.refusal(request.scope["path"], Trouble(error.status_code, sentence), anthropic=theirs)
    return answer(told, status=error.status_code, headers=headers)


class Served:
    """What is said to the requests of the API of *face*; a stream gives a sign of life *every* so many seconds."""

    def __init__(self, face: Face, say: Say, *, every: float) -> None:
        self._face = face
        self._say = say
        self._every = every

    async def answer(self, request: Request) -> Response:
        """Answer one request."""
        try:
            asked = await body(request)
            given = self._face.parse_request(asked)
        except (Refused, Malformed, RecursionError) as error:
            return troubles.told(self._face, troubles.of_request(error))
        # A client without a rollout may still say which of its requests belong together, as OpenAI's do.
        together = rollout_of(request.scope) or asked.get("prompt_cache_key")
        ending = partial(self._build_result, asked, given, together if isinstance(together, str) else None)
        return Pending(ending, beat=self._face.heartbeat if asked.get("stream") else None, every=self._every)

    async def _build_result(self, asked: Item, given: Item, together: str | None) -> Ending:
        if together:
            STICKY.set(together)
        try:
            said = await self._say(asked, given)
            return Ending(streamed(said), said) if isinstance(said, bytes) else Ending(answer(said))
        except EpisodeError as error:
            trouble = troubles.of_failure(error)
            return Ending(troubles.told(self._face, trouble, error), self._face.build_error_frames(trouble))
        except RecursionError:
            trouble = troubles.of_depth(asked)
            return Ending(troubles.told(self._face, trouble), self._face.build_error_frames(trouble))


class Asked:
    """*model* as the API of *face* has it."""

    def __init__(self, model: Model, face: Face) -> None:
        self._model = model
        self._face = face

    async def say(self, asked: Item, given: Item) -> Item | bytes:
        """Give what the model answers to *given*, as the body that *asked* wants it told: whole, or all its frames."""
        # One that a filter held back too: each API has its own word for that.
        response = await responses.told(self._model, given, episode=None)
        try:
            said = self._face.build_answer(response, asked)
            return b"".join(self._face.stream_events(said, asked)) if asked.get("stream") else said
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            message = f"the model's answer cannot be told at {self._face.path}: {error!r}"
            raise Failed(message, kind="model_bad_answer", retryable=True) from error


class Counted:
    """The tokens that the engine of *model* counts in a prompt."""

    def __init__(self, model: Model) -> None:
        self._count: Count | None = getattr(model, "count", None)

    async def say(self, _: Item, given: Item) -> Item:
        """Give how many there are in that of *given*; raises `Failed` where the engine cannot count."""
        tokens = await self._count(given) if self._count else None
        if tokens is None:
            message = "the engine behind this server cannot count tokens; ask it, and read them off the answer's usage"
            raise Failed(message, kind="model_cannot_count")
        return messages.count(tokens)


class Listed:
    """The *names* that the one model has."""

    def __init__(self, names: Iterable[str]) -> None:
        self._models = {name: listing.entry(name) for name in names}

    async def list_models(self) -> Response:
        """List them."""
        return answer(listing.listed(self._models))

    async def get_model(self, model: str, request: Request) -> Response:
        """Give one of them."""
        status, told = listing.one(self._models, model, request.headers)
        return answer(told, status=status)
