"""A place: one instance of a resources server, for as long as an episode is there."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from gymsdk.errors import Failed
from gymsdk.http import client
from gymsdk.servers import instances as waiting
from gymsdk.servers.instances import WATCH_SECONDS, InstanceDirectory, InstanceGone
from gymsdk.servers.remote import RemoteEnvironment, RemoteState
from gymsdk.servers.reports import Instance
from gymsdk.types import Action, Episode, Row, Step, Task, Verdict

T = TypeVar("T")

FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 30.0
"""Seconds for which an instance that is not reached is given nothing new: doubled each time."""

MAX_CHANGES = 1000
"""Changes that a tally tells apart: while a head is silent, they are more and more."""

UNREACHABLE_KIND = "server_unreachable"
"""What a failure is called where nobody is there any more."""


@dataclass(slots=True)
class InstanceTally:
    """What is known here of one instance: when episodes began (1) and ended (-1), until when it is left alone."""

    changes: deque[tuple[float, int]] = field(default_factory=deque)
    more: int = 0
    latest: int = 0
    pause: float = 0.0
    back: float = 0.0

    def record_change(self, change: int) -> None:
        """Note that an episode began or ended."""
        self.changes.append((time.monotonic(), change))
        self.more += change
        if len(self.changes) > MAX_CHANGES:
            _, oldest = self.changes.popleft()
            at, next_one = self.changes.popleft()
            self.changes.appendleft((at, oldest + next_one))

    def change_since(self, heard: float) -> int:
        """Give by how many the episodes are more than when the instance was *heard* of."""
        while self.changes and self.changes[0][0] < heard:
            self.more -= self.changes.popleft()[1]
        return self.more

    def suspend(self) -> bool:
        """Leave the instance alone for a while, and say whether that is new."""
        new, now = not self.pause, time.monotonic()
        if now >= self.back:
            self.pause = min(MAX_PAUSE_SECONDS, self.pause * 2) or FIRST_PAUSE_SECONDS
            self.back = now + self.pause
        return new

    def resume(self) -> None:
        """Have it be asked like any other again."""
        self.pause = self.back = 0.0

    @property
    def is_suspended(self) -> bool:
        """Whether the instance is left alone for now."""
        return time.monotonic() < self.back


class RemoteEpisode:
    """The environment at one *instance*, of those there are: where that is gone, what waits for it fails.

    A machine that lost its power says nothing: its connections would be waited for as long as an answer may take.
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
        """Open an episode of *row* here; raises `BadRow` where it does not fit, else `EpisodeError`."""
        self._tally.record_change(1)
        try:
            episode = await self._while_alive(
                self._remote.reset(row, seed=seed, id=id, repeat=repeat, deadline=deadline), "reset"
            )
        except BaseException:
            self._tally.record_change(-1)
            raise
        assert isinstance(episode.state, RemoteState), "an episode elsewhere is opened by its remote"
        # Another instance would do for an opening; from now on, none does.
        episode.state.line.retry = self._retry
        episode.environment = self
        return episode

    async def step(self, episode: Episode, action: Action) -> Step:
        """Answer one tool call or reply."""
        return await self._while_alive(self._remote.step(episode, action), "step")

    async def verify(self, episode: Episode) -> Verdict:
        """Give the verdict on the transcript; raises `EpisodeError`."""
        return await self._while_alive(self._remote.verify(episode), "verify")

    async def close(self, episode: Episode) -> None:
        """Close the session; of one that went with its instance nothing is left to close."""
        self._tally.record_change(-1)
        if not self._lost:
            await self._while_alive(self._remote.close(episode), "close")

    async def _while_alive(self, asked: Coroutine[Any, Any, T], stage: str) -> T:
        """Give what is answered to what was *asked*, for as long as the instance is there."""
        known = partial(self._instances.is_known, self._instance.id)
        try:
            return await waiting.wait_while_alive(asked, self._instance.url, known, watch=self._watch)
        except InstanceGone:
            self._lost = True
            raise self._gone_error(stage) from None
        except Failed as error:
            self._lost = self._lost or error.kind == UNREACHABLE_KIND
            raise

    def _gone_error(self, stage: str) -> Failed:
        message = f"{self.name!r} at {self._instance.url} is gone, and the episode with it; play the row again"
        return Failed(message, kind=UNREACHABLE_KIND, stage=stage, retryable=True)
