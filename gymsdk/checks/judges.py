"""Record the answers of the models that an environment asks, to find out whether a judge compares at all."""

from __future__ import annotations

import hashlib

from gymsdk import jsonl, responses
from gymsdk.environment import Environment
from gymsdk.models.registry import MeteredModel
from gymsdk.types import Episode, Item, Model


class AnswerLog:
    """The distinct requests to the models of an environment, and their distinct answers."""

    def __init__(self) -> None:
        self._requests: set[bytes] = set()
        self._answers: set[bytes] = set()

    def add(self, request: Item, response: Item) -> None:
        """Record an answer."""
        self._requests.add(_hash(request))
        self._answers.add(_hash([responses.read_text(item.get("content")) for item in response.get("output") or []]))

    @property
    def is_constant(self) -> bool:
        """Whether different requests got one and the same answer."""
        return len(self._requests) > 1 and len(self._answers) == 1


def _hash(value: object) -> bytes:
    return hashlib.blake2b(jsonl.dump_json(value, default=str), digest_size=16).digest()


class RecordedModel:
    """A model whose answers are recorded."""

    def __init__(self, model: Model, log: AnswerLog) -> None:
        self.model = model
        self.log = log

    def __repr__(self) -> str:
        return repr(self.model)

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Ask the model, and record its answer."""
        response = await self.model.respond(request, episode=episode)
        self.log.add(request, response)
        return response


def record_models(environment: Environment, log: AnswerLog) -> Environment:
    """Record in *log* the answers of the models in the settings of *environment*, and return the environment."""
    for _, value in environment.config:
        if isinstance(value, MeteredModel):
            # A model that is recorded already gets the new log in place of the old one.
            model = value.model.model if isinstance(value.model, RecordedModel) else value.model
            value.model = RecordedModel(model, log)
    return environment
