"""A subject: the environment a check looks at, made anew whenever a check needs one that nobody has touched."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import Any

from gymsdk.checks.process import put_back
from gymsdk.environment import Environment
from gymsdk.episode import play
from gymsdk.models.scripted import Choose, Scripted, build
from gymsdk.outcome import Rollout
from gymsdk.plugins.registry import Entry, installed, load
from gymsdk.sitting import Budget
from gymsdk.transcript import Item
from gymsdk.types import Episode, Model, Task

SECONDS = 20.0
"""Seconds one episode of a policy that understands nothing may take."""

BRIEF = 16
"""Turns such a policy is let play."""

PATIENCE = 30.0
"""Seconds that the episodes of one check should take together."""

QUICK = 0.2
"""Seconds of an episode that is measured once: a slower one may only have been the first."""


SHARE = 0.8
"""The share of a check's time that what is planned may take."""


class TooSlow(Exception):
    """Episodes take so long that a check cannot play enough of them; the message says what it would have needed."""


class Recorded:
    """A *model* whose *turns* are written down: where a step says nothing, a transcript does not tell two apart."""

    def __init__(self, model: Model) -> None:
        self.turns: list[list[Item]] = []
        self._model = model

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Answer as the model does."""
        response = await self._model.respond(request, episode=episode)
        self.turns.append(response["output"])
        return response


@dataclass(frozen=True, slots=True)
class Play:
    """How one task was played: the *turns* that were taken, and the *rollout* that came of them."""

    turns: tuple[list[Item], ...]
    rollout: Rollout


@dataclass
class Subject:
    """One environment under check: *make* gives a new `Environment` each time, with the settings asked for.

    *count* tasks of each split, or of the one *split*, are looked at, drawn with *seed*; *given* ones instead, where
    there are any. *entry* is how it is installed, `None` where not, *settings* what it is loaded with. *budget* is
    that of the best plays, *patience* how many seconds the episodes of a check should take, *ends* when the check that
    looks has to be over, on the clock of `time.monotonic`.
    """

    name: str
    make: Callable[[], Environment]
    entry: Entry | None = None
    seed: int = 0
    count: int = 8
    split: str | None = None
    given: Sequence[Task] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    check_seconds: float = PATIENCE
    deadline: float = math.inf
    episode_seconds: float | None = None

    @cached_property
    def environment(self) -> Environment:
        """An environment for questions that leave no trace: splits, tasks, schemas, claims."""
        return self.make()

    @property
    def splits(self) -> Sequence[str]:
        """The splits that are looked at."""
        return self.environment.splits if self.split is None else [self.split]

    @cached_property
    def tasks(self) -> list[Task]:
        """The tasks that are looked at: *count* of each split, or those given."""
        if self.given is not None:
            return list(self.given)
        return [
            task for split in self.splits for task in islice(self.environment.tasks(split, seed=self.seed), self.count)
        ]

    @cached_property
    def brief_budget(self) -> Budget:
        """What a policy that understands nothing may use."""
        own = self.budget
        return Budget(turns=min(BRIEF, own.turns), tools=min(4 * BRIEF, own.tools), seconds=min(SECONDS, own.seconds))

    @property
    def seconds_left(self) -> float:
        """Seconds that the check has left."""
        return self.deadline - time.monotonic()

    async def count_affordable(self, environment: Environment, wanted: int, *, each: float, least: int = 1) -> int:
        """Give how many of *wanted* rounds of *each* so many episodes there is time for; raises `TooSlow`."""
        if self.episode_seconds is None:
            self.episode_seconds = await self._measure_episode(environment)
        cost = max(self.episode_seconds * each, 1e-9)
        least = min(least, wanted)
        if cost * least > SHARE * self.seconds_left:
            raise TooSlow(
                f"an episode takes {self.episode_seconds:.1f} s, so the {math.ceil(each * least)} it needs at least take about"
                f" {cost * least:.0f} s; it had {max(self.seconds_left, 0):.0f} s"
            )
        return min(wanted, max(least, int(self.check_seconds / cost)))

    async def _measure_episode(self, environment: Environment) -> float:
        """Give the seconds of an episode, one that says nothing or one played well, whichever takes longer."""
        if not self.tasks:
            return 0.0
        policies = (build("null"), build("oracle"))
        first = max([await self._time_episode(environment, policy) for policy in policies])
        if first < QUICK:
            return first
        return max([await self._time_episode(environment, policy) for policy in policies])

    async def _time_episode(self, environment: Environment, policy: Model) -> float:
        started = time.perf_counter()
        # A verifier may change the task it is given; that is for another check to find.
        await self.play(environment, policy, self.tasks[0].model_copy(deep=True))
        return time.perf_counter() - started

    @asynccontextmanager
    async def enter_environment(self) -> AsyncIterator[Environment]:
        """Enter a new environment; what playing it changes in the process is put back."""
        environment = self.make()
        with put_back():
            async with environment:
                yield environment

    async def play_oracle(self, environment: Environment, task: Task) -> Play:
        """Play *task* as its `solve` says."""
        model = Recorded(build("oracle"))
        rollout = await self.play(environment, model, task)
        return Play(tuple(model.turns), rollout)

    async def play_script(self, environment: Environment, choose: Choose, task: Task, *, turns: int = 0) -> Rollout:
        """Play *task* with a policy that *choose* scripts, briefly, though at least so many *turns*."""
        brief = self.brief_budget.model_copy(update={"turns": max(self.brief_budget.turns, turns)})
        return await self.play(environment, Scripted("told", choose), task, budget=brief)

    async def play(
        self, environment: Environment, model: Model, task: Task, *, budget: Budget | None = None
    ) -> Rollout:
        """Play *task* once, bounded."""
        return await play(environment, model, task, seed=self.seed, budget=budget or self.budget)


def named(
    name: str,
    settings: Mapping[str, Any],
    *,
    seed: int = 0,
    count: int = 8,
    split: str | None = None,
    budget: Budget | None = None,
) -> Subject:
    """Give the installed environment *name* as a subject; raises `UnknownEnvironment`."""
    entry = installed().get(name)
    if entry is None:
        load(name)
    made = partial(load, name, **settings)
    return Subject(name, made, entry, seed, count, split, settings=settings, budget=budget or Budget())
