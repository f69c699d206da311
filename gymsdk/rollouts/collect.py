"""Many episodes at once: bounded, resumable, in the order they finish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Container, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from gymsdk.episode import play
from gymsdk.models.scripted import Scripted
from gymsdk.outcome import Failure, Rollout
from gymsdk.rollouts import lines
from gymsdk.rollouts.folder import RunFolder
from gymsdk.rollouts.jobs import Job, Key, jobs, seed_of
from gymsdk.rollouts.trajectory import task_name, trajectory
from gymsdk.rollouts.tries import Played, guarded, lost, settled
from gymsdk.sitting import Budget
from gymsdk.types import Model, Playable


class Player(Protocol):
    """Whoever plays jobs, as long as it is open: in this process, or by servers."""

    def opened(self) -> AbstractAsyncContextManager[None]:
        """Open what the jobs are played with."""

    async def __call__(self, job: Job) -> Played:
        """Play *job* until it is settled; whatever becomes of it, it raises nothing of its own."""

    @property
    def connections(self) -> int:
        """How many connections a job in flight may need from this process."""


@dataclass(frozen=True, slots=True)
class Play:
    """How jobs are played in this process: against which environments, by which model, within which bounds."""

    environments: Mapping[str, Playable]
    model: Model
    seed: int = 0
    budget: Budget = field(default_factory=Budget)
    attempts: int = 3

    @property
    def connections(self) -> int:
        """Count one for the policy, where it is asked over the network, and one for a judge or a tool."""
        return 1 if isinstance(self.model, Scripted) else 2

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Enter the environments that are entered."""
        async with AsyncExitStack() as opened:
            for environment in self.environments.values():
                if isinstance(environment, AbstractAsyncContextManager):
                    await opened.enter_async_context(environment)
            yield

    async def __call__(self, job: Job) -> Played:
        """Play *job* until it has been judged, cannot be, or has been tried often enough."""
        return await settled(job, self.once, attempts=self.attempts)

    async def once(self, job: Job, _attempt: int = 0) -> Rollout:
        """Play *job* one time."""
        return await guarded(job, seed_of(self.seed, job), self._played(job))

    async def _played(self, job: Job) -> Rollout:
        return await play(
            self.environments[job.environment],
            self.model,
            job.row,
            seed=seed_of(self.seed, job),
            repeat=job.repeat,
            id=job.id,
            budget=self.budget,
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
    player: Player,
    *,
    done: Container[Key],
    at_once: int,
    told: Callable[[Played], None],
    trajectories: bool = False,
) -> None:
    """Play the rollouts that *folder* still lacks.

    Args:
        folder: The run's folder.
        player: Plays the jobs.
        done: The keys of the rollouts that are finished.
        at_once: The number of episodes in flight.
        told: Is called with each finished rollout, after its line is on disk.
        trajectories: Whether each line gets NeMo Gym's `ng_trajectory`.
    """
    missing = jobs(folder.read_inputs(), done=done)
    async with player.opened(), aclosing(collect(missing, player, at_once=at_once)) as ends:
        async for played in ends:
            told(keep(folder, played, trajectories=trajectories))


def keep(folder: RunFolder, played: Played, *, trajectories: bool = False) -> Played:
    """Put a finished rollout on disk, among the scored or among the failures, and give it as it was put there."""
    try:
        _keep(folder, played, trajectories=trajectories)
    except (TypeError, ValueError, RecursionError) as error:
        # A verdict or a response may hold what JSON cannot; nothing of it has been written then.
        failure = Failure(stage="verify", kind="bad_answer", message=f"it cannot be written as JSON: {error}")
        left = lost(played.job, played.rollout.seed, failure, played.rollout.usage)
        played = Played(played.job, left, played.attempts)
        _keep(folder, played)
    return played


def _keep(folder: RunFolder, played: Played, *, trajectories: bool = False) -> None:
    key, rollout = played.job.key, played.rollout
    if rollout.failure is None:
        line = lines.scored(rollout, key, attempts=played.attempts)
        if trajectories:
            name = task_name(rollout.row, key[0])
            line[lines.TRAJECTORY] = trajectory(rollout, task_id=name, rollout_id=f"{key[0]}-{key[1]}")
        folder.keep(line)
    else:
        folder.keep(lines.failed(played.rollout, key, attempts=played.attempts), failed=True)
