"""Deadlines: the time by which an author's code must have answered, as its stage sets it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

LONGEST = 600.0
"""Seconds a stage may take that has no deadline of its own."""


class Deadline:
    """A time of the event loop's clock; a *patient* one moves on while its code waits for something bounded itself.

    A verdict's is patient: an answer queued behind other answers' graders, or a slow judge, is no slow verifier.
    """

    def __init__(self, at: float, *, pausable: bool = False) -> None:
        self._at = at
        self._patient = pausable
        self._waiting = 0
        self._since = 0.0

    def get_remaining_seconds(self) -> float:
        """Give the seconds left, 0 where it has passed."""
        now = self._since if self._waiting else asyncio.get_running_loop().time()
        return max(0.0, self._at - now)

    @property
    def at(self) -> float:
        """The time it stands at now."""
        return asyncio.get_running_loop().time() + self.get_remaining_seconds()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let it move on with the clock inside the block, where it is patient."""
        if not self._patient:
            yield
            return
        loop = asyncio.get_running_loop()
        if not self._waiting:
            self._since = loop.time()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._at += loop.time() - self._since


_current: ContextVar[Deadline | None] = ContextVar("gymsdk_deadline", default=None)


def current() -> Deadline:
    """Give the deadline of the stage that runs; outside of any, `LONGEST` from now."""
    return _current.get() or Deadline(from_now(LONGEST))


@contextmanager
def until(deadline: Deadline) -> Iterator[None]:
    """Put what runs inside under *deadline*."""
    token = _current.set(deadline)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def waiting() -> Iterator[None]:
    """Wait, inside the block, for something that has a bound of its own: a patient deadline does not count it."""
    deadline = _current.get()
    if deadline is None:
        yield
        return
    with deadline.pause():
        yield


def from_now(seconds: float) -> float:
    """Give the time of the loop's clock *seconds* from now."""
    return asyncio.get_running_loop().time() + seconds
