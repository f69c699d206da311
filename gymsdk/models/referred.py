"""A model that an environment names by the model server that stands before it."""

from __future__ import annotations

from collections.abc import Callable

from gymsdk.transcript import Item
from gymsdk.types import Episode, Model


class Referred:
    """The model of the model server *name*, which *find* returns on the first call.

    An environment is loaded before the models that it asks, and the servers of those may run in other processes.
    """

    def __init__(self, name: str, find: Callable[[], Model]) -> None:
        self.name = name
        self._find = find
        self._model: Model | None = None

    def __repr__(self) -> str:
        return f"<Referred {self.name!r}>"

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Return the model's response to *request*; raises `Failed` where there is none."""
        if self._model is None:
            self._model = self._find()
        return await self._model.respond(request, episode=episode)
