"""A model an environment asked for: bounded in time and in calls at once, its tokens noted by role."""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from gymsdk import usage
from gymsdk.errors import Failed
from gymsdk.types import Episode, Item, Model


class Metered:
    """*model* in the role of the config field *role*: at most *at_once* calls, *seconds* for each."""

    def __init__(self, model: Model, *, role: str, seconds: float = 120.0, at_once: int = 64) -> None:
        self.model = model
        self.role = role
        self._seconds = seconds
        self._at_once = at_once
        self._free: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"{self.role}={self.model!r}"

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Answer *request*; raises `Failed` where the model does not answer in time."""
        try:
            async with self._slots(), asyncio.timeout(self._seconds):
                response = await self.model.respond(request, episode=episode)
        except TimeoutError:
            message = f"the {self.role} model did not answer within {self._seconds:g} s"
            raise Failed(message, kind="model_timeout", retryable=True) from None
        usage.note(self.role, response)
        return response

    def _slots(self) -> asyncio.Semaphore:
        # A semaphore belongs to one loop, and an environment may be played on several, one after another.
        return self._free.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._at_once))
