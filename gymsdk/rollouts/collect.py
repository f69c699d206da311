"""Many episodes at once: bounded, resumable, in the order they finish."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from itertools import islice

from gymsdk import usage
from gymsdk.episode import play
from gymsdk.errors import BadRow
from gymsdk.outcome import Failure, Rollout
from gymsdk.rollouts import lines
from gymsdk.rollouts.folder import RunFolder
from gymsdk.rollouts.jobs import Job, Key, jobs, seed_of
from gymsdk.sitting import Budget
from gymsdk.types import Model, Playable
from gymsdk.usage import Ledger

PAUSE = 0.25
"""Seconds before a failed episode's second try, doubled before each further one."""

LONGEST = 60.0
"""Seconds a try waits at most: an episode that is asked to wait longer is listed, for a resume."""

log = logging.getLogger("gymsdk")


@dataclass(frozen=True, slots=True)
class Played:
    """A job's last rollout, with the usage of all its tries, and how many those were."""

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
    attempts: int = 3

    async def __call__(self, job: Job) -> Played:
        """Play *job* until it has been judged, cannot be, or has been tried often enough."""
        attempt, used = 0, Ledger()
        while True:
            attempt += 1
            rollout = await self.once(job)
            used = usage.together(used, rollout.usage)
            wait = self._wait(rollout.failure, attempt)
            if wait is None:
                return Played(job, rollout.model_copy(update={"usage": used}), attempt)
            await asyncio.sleep(wait)

    def _wait(self, failure: Failure | None, attempt: int) -> float | None:
        """Give the seconds until the next try, `None` where there is to be none."""
        # Playing again what the grader failed on would draw answers until one suits it.
        if failure is None or not failure.retryable or failure.stage == "verify" or attempt >= self.attempts:
            return None
        if failure.retry_after is not None and failure.retry_after > LONGEST:
            return None
        return max(PAUSE * 2.0 ** (attempt - 1) * random.uniform(0.5, 1.5), failure.retry_after or 0.0)

    async def once(self, job: Job) -> Rollout:
        """Play *job* one time; whatever breaks it, even the host, breaks no other."""
        try:
            return await play(
                self.environments[job.environment],
                self.model,
                job.row,
                seed=seed_of(self.seed, job),
                repeat=job.repeat,
                id=job.id,
                budget=self.budget,
            )
        except BadRow as error:
            return self._lost(job, stage="reset", kind="bad_row", message=str(error))
        except Exception as error:
            log.exception("%s broke the host in rollout %s", type(error).__name__, job.id)
            return self._lost(
                job, stage="host", kind="host_broke", message=f"{type(error).__name__}: {error}", retryable=True
            )

    def _lost(self, job: Job, *, stage: str, kind: str, message: str, retryable: bool = False) -> Rollout:
        failure = Failure(stage=stage, kind=kind, message=message, retryable=retryable)
        return lost(job, seed_of(self.seed, job), failure)


def lost(job: Job, seed: int, failure: Failure, used: Ledger | None = None) -> Rollout:
    """Give the rollout of a job of which nothing is left but its failure and what it *used*."""
    return Rollout(
        id=job.id,
        environment=job.environment,
        row=job.row,
        seed=seed,
        repeat=job.repeat,
        outcome="failed",
        failure=failure,
        usage=used or {},
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
    folder: RunFolder,
    play: Play,
    *,
    repeats: int,
    done: Container[Key],
    at_once: int,
    told: Callable[[Played], None],
) -> None:
    """Play what *folder* still lacks: each finished rollout is on disk before *told* hears of it."""
    missing = jobs(folder.read_inputs(), repeats=repeats, done=done)
    async with AsyncExitStack() as opened:
        for environment in play.environments.values():
            if isinstance(environment, AbstractAsyncContextManager):
                await opened.enter_async_context(environment)
        ends = collect(missing, play, at_once=at_once)
        opened.push_async_callback(ends.aclose)
        async for played in ends:
            told(keep(folder, played))


def keep(folder: RunFolder, played: Played) -> Played:
    """Put a finished rollout on disk, among the scored or among the failures, and give it as it was put there."""
    try:
        _keep(folder, played)
    except (TypeError, ValueError, RecursionError) as error:
        # A verdict or a response may hold what JSON cannot; nothing of it has been written then.
        failure = Failure(stage="verify", kind="bad_answer", message=f"it cannot be written as JSON: {error}")
        left = lost(played.job, played.rollout.seed, failure, played.rollout.usage)
        played = Played(played.job, left, played.attempts)
        _keep(folder, played)
    return played


def _keep(folder: RunFolder, played: Played) -> None:
    key = played.job.key
    if played.rollout.failure is None:
        folder.keep(lines.scored(played.rollout, key, attempts=played.attempts))
    else:
        folder.keep(lines.failed(played.rollout, key, attempts=played.attempts), failed=True)
