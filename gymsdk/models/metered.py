"""A model an environment asked for: bounded in time and in calls at once, its tokens noted by role."""

from __future__ import annotations

import asyncio

from gymsdk import deadlines, responses, usage
from gymsdk.deadlines import waiting
from gymsdk.errors import Failed, recast
from gymsdk.transcript import Item
from gymsdk.types import Episode, Model
from gymsdk.workers.threads import Permits


class Metered:
    """*model* in the role of the config field *role*: at most *at_once* calls, *seconds* for each."""

    def __init__(self, model: Model, *, role: str, seconds: float = 120.0, at_once: int = 64) -> None:
        self.model = model
        self.role = role
        self._seconds = seconds
        self._free = Permits(at_once)

    def __repr__(self) -> str:
        return f"{self.role}={self.model!r}"

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Answer *request*; raises `Failed`, its kind beginning with `model_`, where no answer can be had."""
        with waiting():
            await self._free.acquire()
            try:
                response = await self._asked(request, episode)
            except Failed as error:
                if error.kind.startswith("model_"):
                    raise
                raise recast(error, Failed, kind=f"model_{error.kind}") from error
            finally:
                self._free.release()
        usage.note(self.role, response)
        return response

    async def _asked(self, request: Item, episode: Episode | None) -> Item:
        who = f"the {self.role} model"
        try:
            async with asyncio.timeout(self._seconds):
                return await responses.asked(self.model, request, episode=episode, label=who)
        except TimeoutError:
            message = f"{who} did not answer within {self._seconds:g} s"
            raise Failed(message, kind="model_timeout", retryable=True) from None
        except asyncio.CancelledError as error:
            if deadlines.current().get_remaining_seconds():
                raise
            # The hook that waits for this model ran out of time: the model is to blame, not the hook or the policy.
            message = f"{who} did not answer before the deadline of the hook or tool that asked it"
            raise Failed(message, kind="model_timeout", retryable=True) from error
