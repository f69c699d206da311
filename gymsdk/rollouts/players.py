"""Play jobs: what plays them in this process, and how many of them play at the same time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from gymsdk.concurrency import yield_regularly
from gymsdk.environment import Environment
from gymsdk.episode import play
from gymsdk.memory import EpisodeCounter, collect_rarely
from gymsdk.models.scripted import ScriptedModel
from gymsdk.rollouts.jobs import Job, PlayedJob, catch_errors, play_with_retries
from gymsdk.types import Budget, Model, Playable, Rollout


class Player(Protocol):
    """Plays jobs while it is open, in this process or on servers."""

    def open(self) -> AbstractAsyncContextManager[None]:
        """Open the resources that the jobs need."""

    async def __call__(self, job: Job) -> PlayedJob:
        """Play *job* until its result is final. A failure does not raise: it is part of the result."""

    @property
    def connections(self) -> int:
        """The most connections that this process needs for one job in flight."""


@dataclass(frozen=True, slots=True)
class LocalPlayer:
    """Plays jobs in this process.

    Attributes:
        environments: The environments by name.
        model: The policy's model.
        seed: The seed of the run.
        budget: The limits of an episode.
        attempts: The most attempts per job.
    """

    environments: Mapping[str, Playable]
    model: Model
    seed: int = 0
    budget: Budget = field(default_factory=Budget)
    attempts: int = 3

    @property
    def connections(self) -> int:
        """One connection for the policy, if it is asked over the network, and one for a judge if there is one."""
        has_judge = any(
            environment.has_models for environment in self.environments.values() if isinstance(environment, Environment)
        )
        return 1 if isinstance(self.model, ScriptedModel) or not has_judge else 2

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Enter the environments that are context managers."""
        async with AsyncExitStack() as opened:
            for environment in self.environments.values():
                if isinstance(environment, AbstractAsyncContextManager):
                    await opened.enter_async_context(environment)
            yield

    async def __call__(self, job: Job) -> PlayedJob:
        """Play *job* until it is scored, cannot be scored, or has no attempts left."""
        return await play_with_retries(job, self.play_once, attempts=self.attempts)

    async def play_once(self, job: Job, _attempt: int = 0) -> Rollout:
        """Play *job* once."""
        return await catch_errors(job, job.compute_seed(self.seed), self._play(job))

    async def _play(self, job: Job) -> Rollout:
        return await play(
            self.environments[job.environment],
            self.model,
            job.row,
            seed=job.compute_seed(self.seed),
            repeat=job.repeat,
            id=job.id,
            budget=self.budget,
        )


MAX_STARTS_PER_PASS = 8
"""How many jobs start in one pass of the event loop, so that a pass stays short when many are to start at once."""


async def collect(
    source: Iterable[Job] | AsyncIterable[Job],
    play: Callable[[Job], Awaitable[PlayedJob]],
    *,
    concurrency: int = 64,
) -> AsyncGenerator[PlayedJob, None]:
    """Play every job, *concurrency* concurrently, and yield each result as it arrives.

    Jobs are taken from *source* when they start. At most `MAX_STARTS_PER_PASS` start, and at most as many results are
    yielded, in one pass of the event loop.
    """
    remaining = source if isinstance(source, AsyncIterable) else yield_regularly(source)
    running: set[asyncio.Future[PlayedJob]] = set()
    # `asyncio.wait` would add and remove a callback of each running job for every result.
    ended: asyncio.Queue[asyncio.Future[Any]] = asyncio.Queue()
    slots = asyncio.Semaphore(concurrency)
    counter = EpisodeCounter()

    async def start_jobs() -> None:
        jobs = aiter(remaining)
        for number in itertools.count(1):
            await slots.acquire()
            job = await anext(jobs, None)
            if job is None:
                return
            started = asyncio.ensure_future(play(job))
            started.add_done_callback(ended.put_nowait)
            running.add(started)
            counter.begin()
            if number % MAX_STARTS_PER_PASS == 0:
                await asyncio.sleep(0)

    with collect_rarely():
        starting = asyncio.ensure_future(start_jobs())
        starting.add_done_callback(ended.put_nowait)
        try:
            is_starting = True
            while running or is_starting:
                # The tasks that have become ready run first, so that many results at once do not delay their timers.
                await asyncio.sleep(0)
                for _ in range(min(max(ended.qsize(), 1), MAX_STARTS_PER_PASS)):
                    finished = await ended.get()
                    if finished is starting:
                        is_starting = False
                        starting.result()
                        continue
                    running.discard(finished)
                    slots.release()
                    counter.end()
                    yield finished.result()
        finally:
            starting.cancel()
            for task in running:
                task.cancel()
            try:
                await asyncio.gather(starting, *running, return_exceptions=True)
            finally:
                # The counter belongs to the process, which may play further runs.
                for _ in running:
                    counter.end()
