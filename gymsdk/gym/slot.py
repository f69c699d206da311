"""The seats at one table: an episode at each, their turns and resets all under way at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from math import nan
from typing import Any, TypeVar

import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.utils import seeding

from gymsdk.convert import chat
from gymsdk.environment import Environment
from gymsdk.episode import Budget, EpisodeRunner
from gymsdk.errors import EpisodeError, Failed, UsageError
from gymsdk.gym import actions
from gymsdk.gym.actions import UNREADABLE
from gymsdk.gym.codecs import Codec
from gymsdk.gym.config import Dealt, Table
from gymsdk.types import Episode, Item, Rollout, Task

Info = dict[str, Any]

Stepped = tuple[Any, float, bool, bool, Info]
"""Observation, reward, terminated, truncated, info."""

UNSPEAKABLE = "unspeakable"
"""The kind of failure of an episode in which the environment said what its codec cannot put into words."""


class Seat:
    """Where one policy sits: `reset` opens an episode, `step` takes its turns to the verdict.

    The budget's turns and tool calls bound an episode, its seconds each `reset` and each `step`: how long a policy
    outside thinks is not the environment's affair. An episode that cannot be scored, or whose words the codec has no
    form for, ends with a reward of nan, truncated, and `info["failure"]`; one that could not be opened ends so at its
    first step.
    """

    def __init__(self, environment: Environment, codec: Codec, budget: Budget) -> None:
        self.environment = environment
        self.codec = codec
        self.rollout: Rollout | None = None
        self._budget = budget
        self._sitting: EpisodeRunner | None = None
        self._turn = 0
        self._closed = True

    @property
    def episode(self) -> Episode | None:
        """The episode in hand, or the one that ended last; `None` before a reset and after `close`."""
        return self._sitting.episode if self._sitting else None

    @property
    def playing(self) -> bool:
        """Whether an episode is under way: opened, not over."""
        return self._sitting is not None and self.rollout is None

    async def reset(self, task: Task, *, seed: int, id: str = "") -> tuple[Any, Info]:
        """Open an episode of *task*, the one before closed; `info` has its tools, seed and task id."""
        await self.close()
        self._sitting = sitting = EpisodeRunner(self.environment, self._budget)
        self._turn, self._closed, self.rollout = 0, False, None
        info: Info = {"tools": [], "seed": seed, "task_id": id}
        try:
            seen, info["tools"] = await self._opened(sitting, task, seed, id)
        except EpisodeError as error:
            error.stage = error.stage or "reset"
            sitting.result = error
            return self._nothing(), info | {"failure": _failure(sitting.build_rollout())}
        except BaseException:
            await self.close()
            raise
        return seen, info

    def heard(self, action: Any) -> list[Item]:
        """Give the items of an *action* for `answer`; raises `ResetNeeded`, and `UsageError` for what is no action."""
        if not self.playing:
            raise ResetNeeded("no episode is open; call reset() before step()")
        return self.codec.said(action, turn=self._turn)

    async def answer(self, items: list[Item], *, last: bool = False) -> Stepped:
        """Answer the turn that was `heard`; at the end `info` has the outcome, why it ended, the verdict's parts.

        A turn that is to be the *last* one ends the episode as a spent turn budget does: it is judged.
        """
        sitting = self._sitting
        if sitting is None or self.rollout:
            raise ResetNeeded("the episode was closed meanwhile; call reset() before step()")
        self._turn += 1
        if last:
            sitting.limit_turns(self._turn)
        try:
            seen, paid = await self._answered(sitting, items)
            if sitting.is_over:
                self.rollout = await self._judged(sitting)
        except BaseException:
            await self.close()
            raise
        return self._ended(self.rollout, seen, paid) if self.rollout else (seen, paid, False, False, {})

    async def step(self, action: Any) -> Stepped:
        """Answer one turn, as `heard` and `answer` together."""
        return await self.answer(self.heard(action))

    async def close(self) -> None:
        """Close the episode in hand, if it is not over."""
        sitting, self._sitting = self._sitting, None
        if sitting is not None:
            await self._end(sitting)

    async def _opened(self, sitting: EpisodeRunner, task: Task, seed: int, id: str) -> tuple[Any, list[Item]]:
        episode = await sitting.open(task, seed=seed, id=id)
        sitting.pause_deadline()
        tools: list[Item] = chat.build_body({"input": [], "tools": episode.tools}).get("tools", [])
        with _shown():
            return self.codec.opened(episode.transcript.opening, episode.tools), deepcopy(tools)

    def _nothing(self) -> Any:
        """Give what is seen of an episode that could not be opened: where a turn begins, if that can be written."""
        try:
            with _shown():
                return self.codec.opened([], [])
        except Failed:
            return self.codec.answered([], over=True)

    async def _answered(self, sitting: EpisodeRunner, items: list[Item]) -> tuple[Any, float]:
        """Give what the policy sees next and what its turn paid; the sitting is over where anything failed."""
        if sitting.is_over:
            return self.codec.answered([], over=True), nan
        sitting.restart_deadline()
        try:
            taken = await sitting.apply_response(actions.response(items))
            with _shown():
                return self.codec.answered(taken.items, over=sitting.is_over), taken.reward
        except EpisodeError as error:
            error.stage = error.stage or "step"
            sitting.result = error
            return self.codec.answered([], over=True), nan
        finally:
            # Whoever asks `solve` for the next turn may do so long after this one: other seats may still be playing.
            sitting.pause_deadline()

    async def _judged(self, sitting: EpisodeRunner) -> Rollout:
        try:
            if sitting.result is None:
                await sitting.verify()
        except EpisodeError as error:
            sitting.result = error
        await self._end(sitting)
        return sitting.build_rollout()

    async def _end(self, sitting: EpisodeRunner) -> None:
        # Said before it is done: who interrupts a closing does not get a second one.
        closed, self._closed = self._closed, True
        if not closed:
            await sitting.close()

    def _ended(self, rollout: Rollout, seen: Any, paid: float) -> Stepped:
        info: Info = {"outcome": rollout.outcome, "ended": rollout.ended}
        if rollout.verdict is None:
            return seen, nan, False, True, info | {"failure": _failure(rollout)}
        info |= {"verdict": rollout.verdict.model_dump(mode="json"), "reward_components": dict(rollout.components)}
        done = rollout.ended == "done"
        return seen, paid + rollout.verdict.reward, done, not done, info


@contextmanager
def _shown() -> Iterator[None]:
    """Have what the codec cannot put into words fail the episode that said it, and nobody else's."""
    try:
        yield
    except UsageError as error:
        raise Failed(str(error), kind=UNSPEAKABLE) from error
    except UNREADABLE as error:
        advice = "a message has a `role`, and a `content` that is text or a list of parts"
        raise Failed(f"what the environment said cannot be read; {advice}", kind=UNSPEAKABLE) from error


def _failure(rollout: Rollout) -> Item | None:
    return rollout.failure.model_dump() if rollout.failure else None


T = TypeVar("T")

NEW = 0.0, False, False
"""What a seat earns with a reset, and how far that ends an episode."""


class Seats:
    """As many seats at *table* as *generators*, each drawing from its own: `None` is made when it is needed.

    *finished* are the last rollouts. `played` and `clear` are coroutines of the background loop.
    """

    def __init__(self, table: Table, generators: list[tuple[np.random.Generator, int] | None]) -> None:
        self.table = table
        self.generators = generators
        self.seats = [Seat(table.environment, table.codec(), table.budget) for _ in generators]
        self.finished: list[Rollout | None] = [None] * len(generators)

    def generator(self, index: int, seed: int | None = None) -> tuple[np.random.Generator, int]:
        """Give the generator of a seat and what it was seeded with, seeded anew where a *seed* is given."""
        found = self.generators[index]
        if seed is not None or found is None:
            found = self.generators[index] = seeding.np_random(seed)
        return found

    def deal(self, index: int, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Dealt:
        """Give what the next episode of a seat is opened with; raises `UsageError`."""
        return self.table.deal(self.generator(index, seed)[0], seed=seed, options=options)

    def over(self) -> list[int]:
        """Give the seats whose episode is over."""
        return [index for index, seat in enumerate(self.seats) if seat.rollout]

    def heard(self, actions: Mapping[int, Any]) -> dict[int, list[Item]]:
        """Give what each action says, nothing played yet; raises `ResetNeeded`, and `UsageError` where one is none."""
        if idle := [str(index) for index in actions if not self.seats[index].playing]:
            raise ResetNeeded(f"no episode is under way at seat {', '.join(idle)}; reset it before the next step()")
        return {index: self._heard(index, action) for index, action in actions.items()}

    async def played(self, said: Mapping[int, list[Item]], dealt: Mapping[int, Dealt]) -> dict[int, Stepped]:
        """Give what came of the turns *said* and of the episodes *dealt*, all of them under way at once."""
        await self.table.enter()
        turns = [self.seats[index].answer(items) for index, items in said.items()]
        resets = [_opened(self.seats[index], each) for index, each in dealt.items()]
        try:
            played = await _together([*turns, *resets])
        finally:
            for index in said:
                self.finished[index] = self.seats[index].rollout or self.finished[index]
        return dict(zip([*said, *dealt], played, strict=True))

    async def clear(self) -> None:
        """Close every episode in hand and leave the environment."""
        try:
            await _together(seat.close() for seat in self.seats)
        finally:
            await self.table.leave()

    def _heard(self, index: int, action: Any) -> list[Item]:
        try:
            return self.seats[index].heard(action)
        except UsageError as error:
            raise UsageError(f"seat {index}: {error}") from None


async def _opened(seat: Seat, dealt: Dealt) -> Stepped:
    seen, info = await seat.reset(dealt.task, seed=dealt.seed, id=dealt.id)
    return seen, *NEW, info


async def _together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Give what all of them give; where one raises, the others end first, and so they do when they are cancelled."""
    ended = await asyncio.gather(*coroutines, return_exceptions=True)
    results = [each for each in ended if not isinstance(each, BaseException)]
    for each in ended:
        if isinstance(each, BaseException):
            raise each
    return results
