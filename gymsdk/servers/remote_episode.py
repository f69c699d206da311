"""An episode at one instance of a resources server, which fails when the instance is gone."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from gymsdk.errors import Failed
from gymsdk.http import client
from gymsdk.servers.instances import WATCH_SECONDS, InstanceDirectory, InstanceGone, wait_while_alive
from gymsdk.servers.remote import RemoteEnvironment, RemoteState
from gymsdk.servers.reports import Instance
from gymsdk.types import Action, Episode, Row, Step, Task, Verdict

T = TypeVar("T")

FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 30.0
"""First and longest pause for an unreachable instance, in seconds; each pause is twice as long as the previous one."""

MAX_CHANGES = 1000
"""Largest number of changes that a tally keeps apart; they accumulate while the head does not answer."""

UNREACHABLE_KIND = "server_unreachable"
"""Failure kind when an instance is unreachable."""


@dataclass(slots=True)
class InstanceTally:
    """What this process knows about the load and availability of one instance.

    Attributes:
        changes: The times when episodes began (1) and ended (-1).
        total_change: The sum of the changes.
        last_request: Ordinal of the last request to the instance.
        pause: The current pause in seconds.
        resumes_at: When the pause ends.
    """

    changes: deque[tuple[float, int]] = field(default_factory=deque)
    total_change: int = 0
    last_request: int = 0
    pause: float = 0.0
    resumes_at: float = 0.0

    def record_change(self, change: int) -> None:
        """Record that an episode began (1) or ended (-1)."""
        self.changes.append((time.monotonic(), change))
        self.total_change += change
        if len(self.changes) > MAX_CHANGES:
            _, oldest = self.changes.popleft()
            at, next_one = self.changes.popleft()
            self.changes.appendleft((at, oldest + next_one))

    def change_since(self, moment: float) -> int:
        """Return by how many the episodes have grown since the time `moment`."""
        while self.changes and self.changes[0][0] < moment:
            self.total_change -= self.changes.popleft()[1]
        return self.total_change

    def suspend(self) -> bool:
        """Pause an unreachable instance; return whether it was available before."""
        was_available, now = not self.pause, time.monotonic()
        if now >= self.resumes_at:
            self.pause = min(MAX_PAUSE_SECONDS, self.pause * 2) or FIRST_PAUSE_SECONDS
            self.resumes_at = now + self.pause
        return was_available

    def resume(self) -> None:
        """End the pause of an instance that answered."""
        self.pause = self.resumes_at = 0.0

    @property
    def is_suspended(self) -> bool:
        """Whether the instance is paused."""
        return time.monotonic() < self.resumes_at


class RemoteEpisode:
    """An environment at one instance; its calls fail as soon as the instance is gone.

    Args:
        instance: The instance.
        remote: The client of the instance.
        instances: Reports whether the instance is alive.
        tally: The instance's load.
        retry: Retries of calls in an open episode.
        watch: Seconds between two checks that the instance is alive.
    """

    def __init__(
        self,
        instance: Instance,
        remote: RemoteEnvironment,
        instances: InstanceDirectory,
        tally: InstanceTally,
        *,
        retry: client.Retry = client.DEFAULT_RETRY,
        watch: float = WATCH_SECONDS,
    ) -> None:
        self.name = remote.name
        self._instance = instance
        self._remote = remote
        self._instances = instances
        self._tally = tally
        self._retry = retry
        self._watch = watch
        self._lost = False

    async def reset(
        self, row: Row | Task, *, seed: int = 0, id: str = "", repeat: int = 0, deadline: float | None = None
    ) -> Episode:
        """Open an episode of `row` at the instance.

        Raises:
            BadRow: The row does not fit the environment.
            EpisodeError: The instance failed or is gone.
        """
        self._tally.record_change(1)
        try:
            episode = await self._while_alive(
                self._remote.reset(row, seed=seed, id=id, repeat=repeat, deadline=deadline), "reset"
            )
        except BaseException:
            self._tally.record_change(-1)
            raise
        assert isinstance(episode.state, RemoteState), "the remote environment opens the episode"
        # An opening can move to another instance, but an open episode can only retry here.
        episode.state.connection.retry = self._retry
        episode.environment = self
        return episode

    async def step(self, episode: Episode, action: Action) -> Step:
        """Answer one tool call or reply."""
        return await self._while_alive(self._remote.step(episode, action), "step")

    async def verify(self, episode: Episode) -> Verdict:
        """Return the verdict on the transcript."""
        return await self._while_alive(self._remote.verify(episode), "verify")

    async def close(self, episode: Episode) -> None:
        """Close the session, unless it was lost with its instance."""
        self._tally.record_change(-1)
        if not self._lost:
            await self._while_alive(self._remote.close(episode), "close")

    async def _while_alive(self, exchange: Coroutine[Any, Any, T], stage: str) -> T:
        """Await `exchange` while the instance is alive."""
        is_known = partial(self._instances.is_known, self._instance.id)
        try:
            return await wait_while_alive(exchange, self._instance.url, is_known, watch=self._watch)
        except InstanceGone:
            self._lost = True
            raise self._gone_error(stage) from None
        except Failed as error:
            self._lost = self._lost or error.kind == UNREACHABLE_KIND
            raise

    def _gone_error(self, stage: str) -> Failed:
        message = f"{self.name!r} at {self._instance.url} is gone, and the episode with it; play the row again"
        return Failed(message, kind=UNREACHABLE_KIND, stage=stage, retryable=True)
