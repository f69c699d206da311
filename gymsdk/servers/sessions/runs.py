"""Runs: rows played for whoever asks over HTTP, each by the one loop, so many at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from fastapi import Request

from gymsdk import wire
from gymsdk.environment import Environment
from gymsdk.episode import play
from gymsdk.errors import EpisodeError, Failed, Unscorable
from gymsdk.metrics import ROLLOUT_INDEX, TASK_INDEX
from gymsdk.outcome import Failure, Rollout
from gymsdk.rollouts import lines
from gymsdk.servers.app import Refused
from gymsdk.servers.door.presence import while_there
from gymsdk.servers.sessions.admission import Admission
from gymsdk.servers.sessions.aggregates import aggregated
from gymsdk.servers.sessions.identity import digest
from gymsdk.servers.sessions.intake import NUMBERED_ROLLOUT, Given, tolerant, within
from gymsdk.servers.sessions.once import Once
from gymsdk.sitting import Budget
from gymsdk.transcript import Item
from gymsdk.types import UNMASKED, Model, Playable, Row
from gymsdk.values import written

T = TypeVar("T")

Shape: TypeAlias = Callable[[Row, Rollout], object]
"""Makes the body of an answer out of a rollout's line and the rollout."""

AT_ONCE = 4096
"""Episodes that one server plays at once where it is not told otherwise: clients of NeMo Gym send all rows at once."""

QUEUE = 3 * AT_ONCE
"""Episodes that may wait for a place."""

INDICES = (TASK_INDEX, ROLLOUT_INDEX)


@runtime_checkable
class Figured(Protocol):
    """An environment elsewhere that makes its own figures."""

    async def aggregate(self, body: Row) -> Item:
        """Give the figures over the verified rows in *body*; raises `Refused`."""


class Lost(Exception):
    """A rollout that has no reward."""

    def __init__(self, rollout: Rollout, failure: Failure) -> None:
        super().__init__(failure.message)
        self.rollout = rollout
        self.failure = failure

    def to_error(self) -> EpisodeError:
        """Give it as the error it comes from."""
        into = Unscorable if self.rollout.outcome == "unscorable" else Failed
        return into(
            self.failure.message,
            kind=self.failure.kind,
            retryable=self.failure.retryable,
            stage=self.failure.stage,
            retry_after=(self.failure.retry_after or 1.0) if self.failure.retryable else None,
        )


def plain(line: Row, _: Rollout) -> object:
    """Return a rollout's *line* as it is."""
    return line


class Runs:
    """Plays rows of *environment* with *model*: *at_once* at most, within *budget*, whatever a row says.

    *queue* more rows may wait for a place.
    """

    def __init__(
        self,
        environment: Playable,
        model: Model,
        *,
        budget: Budget | None = None,
        at_once: int = AT_ONCE,
        queue: int = QUEUE,
    ) -> None:
        self.environment = environment
        self.model = model
        self.budget = budget or Budget()
        self.admission = Admission(at_once, queue)
        self._once = Once()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Hold the environment open, where it is one of this process: what is being played ends before it does."""
        environment = self.environment
        async with environment if isinstance(environment, AbstractAsyncContextManager) else nullcontext():
            try:
                yield
            finally:
                await self._once.aclose()

    async def play_to_json(self, given: Given, shape: Shape = plain) -> bytes:
        """Give the line of the *given* row's rollout, in this *shape*, as JSON.

        Raises `Lost` where it has no reward, `BadRow` where the row does not fit, `Overloaded` where there is no place.
        """
        row = {key: value for key, value in given.row.items() if key not in UNMASKED}
        stamps = {key: row.pop(key) for key in INDICES if key in row}
        async with self.admission.place():
            rollout = await tolerant(row, lambda each: self._play_row(given, each, given.id or _id(stamps)))
        if rollout.failure is not None:
            raise Lost(rollout, rollout.failure)
        try:
            return written(shape(_line(rollout) | stamps, rollout))
        except (TypeError, ValueError, RecursionError) as error:
            failure = Failure(stage="verify", kind="bad_answer", message=f"it cannot be written as JSON: {error}")
            raise Lost(rollout, failure) from error

    async def _play_row(self, given: Given, row: Row, id: str) -> Rollout:
        budget = within(given.budget, self.budget)
        return await play(self.environment, self.model, row, seed=given.seed, repeat=given.repeat, id=id, budget=budget)

    async def play_once(self, given: Given, body: Row, shape: Shape = plain) -> bytes:
        """Give what `answered` gives; a *body* that names its rollout is played once, however often it comes.

        Another row under the same id, or another attempt at it, is something else.
        """
        if not given.id:
            return await self.play_to_json(given, shape)
        key = f"{given.id}:{digest(body)}"
        keep = not NUMBERED_ROLLOUT.fullmatch(given.id)
        return await self._once(key, lambda: self.play_to_json(given, shape), keep=keep)

    async def aggregate(self, body: Row) -> Item:
        """Give the figures over the verified rows in *body*; raises `Refused`."""
        if isinstance(self.environment, Figured):
            return await self.environment.aggregate(body)
        if not isinstance(self.environment, Environment):
            raise Refused(422, "the environment is served elsewhere: POST this to its resources server")
        return await aggregated(self.environment, body)


async def told(request: Request, playing: Coroutine[Any, Any, T]) -> T:
    """Give what comes of *playing* as long as the client of *request* waits for it.

    A lost rollout is raised as the error it comes from.
    """
    try:
        return await while_there(request, playing)
    except Lost as lost:
        raise lost.to_error() from None


def _id(stamps: Row) -> str:
    task, repeat = stamps.get(TASK_INDEX), stamps.get(ROLLOUT_INDEX) or 0
    return wire.fresh("rollout") if task is None else f"{task}:{repeat}"


def _line(rollout: Rollout) -> Row:
    line = lines.scored(rollout, (0, rollout.repeat))
    told = {name: value for name, value in line.items() if name not in INDICES}
    return told | {name: value for name, value in UNMASKED.items() if name not in told}
