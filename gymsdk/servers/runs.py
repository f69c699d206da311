"""Runs: rows played for whoever asks over HTTP, each by the one loop, so many at once."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

from gymsdk import wire
from gymsdk.episode import play
from gymsdk.errors import EpisodeError, Failed, Unscorable
from gymsdk.metrics import ROLLOUT_INDEX, TASK_INDEX
from gymsdk.outcome import Failure, Rollout
from gymsdk.rollouts import lines
from gymsdk.servers.app import Refused, written
from gymsdk.servers.intake import Given
from gymsdk.servers.once import Once
from gymsdk.sitting import Budget
from gymsdk.transcript import Item
from gymsdk.types import Model, Playable, Row

AT_ONCE = 4096
"""Episodes that one server plays at once where it is not told otherwise: clients of NeMo Gym send all rows at once."""

PAUSE = 5.0
"""Seconds a client is asked to wait where there is no place for another episode."""

UNMASKED: Item = {"mask_sample": False, "failure_kind": None, "failure_reason": None}
"""What NeMo Gym 0.7 writes beside a reward that counts."""

NUMBERED = re.compile(r"\d+-\d+(-a\d+)?")
"""What clients of NeMo Gym call a rollout that nobody has named: its indices, which the next run has again."""

INDICES = (TASK_INDEX, ROLLOUT_INDEX)


class Lost(Exception):
    """A rollout that has no reward."""

    def __init__(self, rollout: Rollout, failure: Failure) -> None:
        super().__init__(failure.message)
        self.rollout = rollout
        self.failure = failure

    def error(self) -> EpisodeError:
        """Give it as the error it comes from."""
        into = Unscorable if self.rollout.outcome == "unscorable" else Failed
        return into(
            self.failure.message,
            kind=self.failure.kind,
            retryable=self.failure.retryable,
            stage=self.failure.stage,
            retry_after=(self.failure.retry_after or 1.0) if self.failure.retryable else None,
        )


class Runs:
    """Plays rows of *environment* with *model*: *at_once* at most, within *budget* where a row has none of its own."""

    def __init__(
        self, environment: Playable, model: Model, *, budget: Budget | None = None, at_once: int = AT_ONCE
    ) -> None:
        self.environment = environment
        self.model = model
        self.budget = budget or Budget()
        self._at_once = at_once
        self._playing = 0
        self._once = Once()

    def __len__(self) -> int:
        """Give how many are being played."""
        return self._playing

    def open(self) -> AbstractAsyncContextManager[Any]:
        """Give what holds the environment open, where it is one of this process."""
        environment = self.environment
        return environment if isinstance(environment, AbstractAsyncContextManager) else nullcontext()

    async def answered(self, given: Given, shape: Callable[[Row], object] = dict) -> bytes:
        """Give the line of the *given* row's rollout, in this *shape*, as JSON.

        Raises `Lost` where it has no reward, `BadRow` where the row does not fit, `Refused` where there is no place.
        """
        row = {key: value for key, value in given.row.items() if key not in UNMASKED}
        stamps = {key: row.pop(key) for key in INDICES if key in row}
        async with self.place():
            rollout = await play(
                self.environment,
                self.model,
                row,
                seed=given.seed,
                repeat=given.repeat,
                id=given.id or _id(stamps),
                budget=given.budget or self.budget,
            )
        if rollout.failure is not None:
            raise Lost(rollout, rollout.failure)
        try:
            return written(shape(_line(rollout) | stamps))
        except (TypeError, ValueError, RecursionError) as error:
            failure = Failure(stage="verify", kind="bad_answer", message=f"it cannot be written as JSON: {error}")
            raise Lost(rollout, failure) from error

    async def once(self, given: Given, body: Row, shape: Callable[[Row], object] = dict) -> bytes:
        """Give what `answered` gives; a *body* that names its rollout is played once, however often it comes."""
        key = _key(given, body)
        if key is None:
            return await self.answered(given, shape)
        return await self._once(key, lambda: self.answered(given, shape))

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Take one of the places; raises `Refused` where all are taken."""
        if self._playing >= self._at_once:
            sentence = f"all {self._at_once} places are taken by episodes; come back, or send fewer at once"
            raise Refused(503, sentence, retry_after=PAUSE, stage="admission", kind="too_many", retryable=True)
        self._playing += 1
        try:
            yield
        finally:
            self._playing -= 1


def _key(given: Given, body: Row) -> str | None:
    """Give the key under which *body* is played once, `None` where its client has not named the rollout.

    Another row under the same id, or another attempt at it, is something else.
    """
    if not given.id or NUMBERED.fullmatch(given.id):
        return None
    return f"{given.id}:{hashlib.sha256(written(body)).hexdigest()}"


def _id(stamps: Row) -> str:
    task, repeat = stamps.get(TASK_INDEX), stamps.get(ROLLOUT_INDEX) or 0
    return wire.fresh("rollout") if task is None else f"{task}:{repeat}"


def _line(rollout: Rollout) -> Row:
    line = lines.scored(rollout, (0, rollout.repeat))
    return {name: value for name, value in line.items() if name not in INDICES} | UNMASKED
