"""A subject: the environment a check looks at, made anew whenever a check needs one that nobody has touched."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

from gymsdk.environment import Environment
from gymsdk.episode import play
from gymsdk.models.scripted import Choose, Scripted, build
from gymsdk.outcome import Rollout
from gymsdk.plugins.registry import Entry, installed, load
from gymsdk.sitting import Budget
from gymsdk.types import Model, Task

SECONDS = 20.0
"""Seconds one episode of a check may take."""


@dataclass
class Subject:
    """One environment under check: *make* gives a new `Environment` each time, with the settings asked for.

    *count* tasks of each split, or of the one *split*, are looked at, drawn with *seed*; *given* ones instead, where
    there are any. *entry* is how it is installed, `None` where not, *settings* what it is loaded with.
    """

    name: str
    make: Callable[[], Environment]
    entry: Entry | None = None
    seed: int = 0
    count: int = 8
    split: str | None = None
    given: Sequence[Task] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    budget: Budget = field(default_factory=lambda: Budget(turns=16, tools=64, seconds=SECONDS))

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

    @asynccontextmanager
    async def fresh(self) -> AsyncIterator[Environment]:
        """Enter a new environment."""
        async with self.make() as environment:
            yield environment

    async def oracle(self, environment: Environment, task: Task, *, seed: int | None = None) -> Rollout:
        """Play *task* as its `solve` says."""
        return await self.play(environment, build("oracle"), task, seed=seed)

    async def told(self, environment: Environment, choose: Choose, task: Task, *, seed: int | None = None) -> Rollout:
        """Play *task* with a policy that *choose* scripts."""
        return await self.play(environment, Scripted("told", choose), task, seed=seed)

    async def play(self, environment: Environment, model: Model, task: Task, *, seed: int | None = None) -> Rollout:
        """Play *task* once, bounded."""
        return await play(environment, model, task, seed=self.seed if seed is None else seed, budget=self.budget)


def named(
    name: str, settings: Mapping[str, Any], *, seed: int = 0, count: int = 8, split: str | None = None
) -> Subject:
    """Give the installed environment *name* as a subject; raises `UnknownEnvironment`."""
    entry = installed().get(name)
    if entry is None:
        load(name)
    return Subject(name, lambda: load(name, **settings), entry, seed, count, split, settings=settings)
