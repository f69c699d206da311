"""Many episodes at once: bounded, resumable, in the order they finish."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from gymsdk import lines
from gymsdk.episode import Budget, play
from gymsdk.folder import RunFolder
from gymsdk.jobs import Job, jobs, seed_of
from gymsdk.outcome import Rollout
from gymsdk.types import Model, Playable

PAUSE = 0.25
"""Seconds before a failed episode's second try, doubled before each further one."""


@dataclass(frozen=True, slots=True)
class Played:
    """A job's last rollout, and how many tries it took."""

    job: Job
    rollout: Rollout
    attempts: int


@dataclass(frozen=True, slots=True)
class Play:
    """How jobs are played: against which environments, by which model, within which bounds."""

    environments: Mapping[str, Playable]
    model: Model
    seed: int = 0
    budget: Budget = field(default_factory=Budget)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    attempts: int = 3

    async def __call__(self, job: Job) -> Played:
        """Play *job* until it has a reward, cannot have one, or has been tried often enough."""
        for attempt in range(1, self.attempts + 1):
            rollout = await self.once(job)
            last = rollout.failure is None or not rollout.failure.retryable or attempt == self.attempts
            if last:
                break
            await asyncio.sleep(PAUSE * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
        return Played(job, rollout, attempt)

    async def once(self, job: Job) -> Rollout:
        """Play *job* one time."""
        return await play(
            self.environments[job.environment],
            self.model,
            job.row,
            seed=seed_of(self.seed, job),
            repeat=job.repeat,
            id=job.id,
            budget=self.budget,
            sampling=self.sampling,
        )


async def collect(
    source: Iterable[Job], play: Callable[[Job], Awaitable[Played]], *, at_once: int = 64
) -> AsyncGenerator[Played, None]:
    """Play every job, *at_once* at a time, yielding each as it ends."""
    remaining = iter(source)
    running: set[asyncio.Future[Played]] = set()
    ended: asyncio.Queue[asyncio.Future[Played]] = asyncio.Queue()

    def fill() -> None:
        for job in islice(remaining, at_once - len(running)):
            started = asyncio.ensure_future(play(job))
            started.add_done_callback(ended.put_nowait)
            running.add(started)

    try:
        fill()
        while running:
            finished = await ended.get()
            running.discard(finished)
            fill()
            yield finished.result()
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def complete(
    folder: RunFolder, play: Play, *, repeats: int, at_once: int, told: Callable[[Played], None]
) -> None:
    """Play what *folder* still lacks: each finished rollout is on disk before *told* hears of it."""
    missing = jobs(folder.read_inputs(), repeats=repeats, done=folder.done())
    async with AsyncExitStack() as opened:
        for environment in play.environments.values():
            if isinstance(environment, AbstractAsyncContextManager):
                await opened.enter_async_context(environment)
        ends = collect(missing, play, at_once=at_once)
        opened.push_async_callback(ends.aclose)
        async for played in ends:
            keep(folder, played)
            told(played)


def keep(folder: RunFolder, played: Played) -> None:
    """Put a finished rollout on disk, among the scored or among the failures."""
    if played.rollout.outcome == "scored":
        folder.keep(lines.scored(played.rollout, played.job.key))
    else:
        folder.keep(lines.failed(played.rollout, played.job.key, attempts=played.attempts), failed=True)
