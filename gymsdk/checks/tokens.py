"""Check whether the conversations of an environment keep the token ids that the policy sampled.

The check plays episodes with token ids. For each call after the first of an episode it records two things: whether its
prompt continues the ids of the call before, and whether the prompt would, if the chat template rendered the whole
conversation again, as Chat Completions does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from gymsdk import responses
from gymsdk.checks.results import CheckResult
from gymsdk.environment import Environment
from gymsdk.episode import play
from gymsdk.errors import Failed, ModelLost
from gymsdk.responses import BROKEN_FIELD, TOKEN_FIELDS
from gymsdk.rollouts.jobs import build_input_row, iter_jobs
from gymsdk.tokens.history import find_history
from gymsdk.types import Budget, Episode, Item, Model, Row

CONTEXT_TOKENS = 8
"""How many tokens around a difference are shown."""


class TokenModel(Model, Protocol):
    """A model with token ids and access to its tokenizer."""

    async def tokenize(self, request: Item) -> list[int]:
        """Return the ids of the prompt of *request*, as the chat template renders the whole conversation."""

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of *ids*."""


class Difference(BaseModel):
    """The first difference between a rendered conversation and the ids that the policy read and sampled.

    Attributes:
        position: The number of equal ids before.
        before: The texts of the last equal tokens.
        sampled: The texts of the next tokens that the policy read or sampled.
        rendered: The texts of the next tokens of the rendered conversation.
    """

    model_config = ConfigDict(frozen=True)

    position: int
    before: list[str]
    sampled: list[str]
    rendered: list[str]


class Continuation(BaseModel):
    """A call that continues a conversation.

    Attributes:
        task: The number of the task.
        call: The number of the call in its episode, from 1.
        continued: Whether the prompt continues the ids of the call before.
        difference: How the rendered conversation differs, `None` if it does not.
    """

    model_config = ConfigDict(frozen=True)

    task: int
    call: int
    continued: bool
    difference: Difference | None


class TokenReport(BaseModel):
    """The result of the check.

    Attributes:
        episodes: The number of episodes.
        calls: The number of model calls.
        continuations: The calls that continue a conversation.
        failures: The messages of episodes that failed.
        engine: The results of the checks of the engine; empty without a server.
    """

    model_config = ConfigDict(frozen=True)

    episodes: int
    calls: int
    continuations: list[Continuation]
    failures: list[str]
    engine: list[CheckResult] = []

    @property
    def engine_defects(self) -> list[CheckResult]:
        """The checks of the engine that failed."""
        return [result for result in self.engine if result.outcome == "failed"]

    @property
    def broken(self) -> list[Continuation]:
        """The continuations with a prompt that does not continue the ids of the call before."""
        return [continuation for continuation in self.continuations if not continuation.continued]

    @property
    def drifting(self) -> list[Continuation]:
        """The continuations that would not keep their ids over Chat Completions."""
        return [continuation for continuation in self.continuations if continuation.difference is not None]


class _Recorder:
    """A model that records the continuations of one episode."""

    def __init__(self, model: TokenModel, task: int) -> None:
        self.model = model
        self.task = task
        self.calls = 0
        self.continuations: list[Continuation] = []

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        response = await self.model.respond(request, episode=episode)
        self.calls += 1
        history = find_history(responses.get_input_items(request))
        carrier = response["output"][-1] if response["output"] else {}
        # The first call of an episode has no history, and an answer that fails has no token fields.
        if history is not None and TOKEN_FIELDS[0] in carrier:
            prompt = carrier[TOKEN_FIELDS[0]]
            continued = prompt[: len(history.ids)] == history.ids and not carrier.get(BROKEN_FIELD)
            difference = await self._compare(history.ids, await self.model.tokenize(request))
            self.continuations.append(
                Continuation(task=self.task, call=self.calls, continued=continued, difference=difference)
            )
        return response

    async def _compare(self, ids: list[int], rendered: list[int]) -> Difference | None:
        if rendered[: len(ids)] == ids:
            return None
        pairs = zip(ids, rendered, strict=False)
        position = next(
            (index for index, (own, other) in enumerate(pairs) if own != other), min(len(ids), len(rendered))
        )
        start, end = max(position - CONTEXT_TOKENS, 0), position + CONTEXT_TOKENS
        return Difference(
            position=position,
            before=await self._spell(ids[start:position]),
            sampled=await self._spell(ids[position:end]),
            rendered=await self._spell(rendered[position:end]),
        )

    async def _spell(self, ids: Iterable[int]) -> list[str]:
        return [await self.model.detokenize([token]) for token in ids]


async def check_tokens(
    environment: Environment, model: TokenModel, rows: Iterable[Row], *, seed: int = 0, budget: Budget | None = None
) -> TokenReport:
    """Play the *rows* of *environment* and return which calls keep their token ids.

    Raises:
        Failed: The model returns no token ids (`model_no_token_ids`).
        ModelLost: The model does not answer the first task.
    """
    recorders: list[_Recorder] = []
    failures: list[str] = []
    async with environment:
        async for recorder, failure in _play_all(environment, model, rows, seed, budget):
            recorders.append(recorder)
            failures += [failure] if failure else []
    return TokenReport(
        episodes=len(recorders),
        calls=sum(recorder.calls for recorder in recorders),
        continuations=[continuation for recorder in recorders for continuation in recorder.continuations],
        failures=failures,
    )


async def _play_all(
    environment: Environment, model: TokenModel, rows: Iterable[Row], seed: int, budget: Budget | None
) -> AsyncIterator[tuple[_Recorder, str]]:
    inputs = [
        build_input_row(row, environment=environment.name, task=task, sampling={}) for task, row in enumerate(rows)
    ]
    for job in iter_jobs(inputs):
        recorder = _Recorder(model, job.task)
        rollout = await play(environment, recorder, job.row, seed=job.compute_seed(seed), id=job.id, budget=budget)
        failure = rollout.failure
        if failure is not None and failure.kind == "model_no_token_ids":
            raise Failed(failure.message, kind=failure.kind)
        if failure is not None and failure.stage == "model" and job.task == 0 and not recorder.calls:
            # All other tasks would fail like this one.
            raise ModelLost(failure.message)
        yield recorder, f"task {job.task}: {failure.kind}: {failure.message}" if failure else ""
