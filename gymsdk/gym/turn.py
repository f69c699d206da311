"""A turn: what a model said when it was asked once, as an action of Gymnasium's faces."""

from __future__ import annotations

from copy import deepcopy
from typing import Self

from gymsdk import wire
from gymsdk.errors import EpisodeError
from gymsdk.transcript import Item


class Turn(list[Item]):
    """The output items of a model's *response*, or none of them and the *failure* that says why.

    To everybody else a list of items, it tells the environment what a list cannot: that the model ran out of tokens,
    what it used, that it broke. A turn with a failure ends its episode as failed.
    """

    def __init__(self, response: Item | None = None, *, failure: EpisodeError | None = None) -> None:
        super().__init__(response["output"] if response else ())
        self.response = response
        self.failure = failure

    def copied(self) -> Self:
        """Give the same turn, its items nobody else's."""
        copied = type(self)(self.response, failure=self.failure)
        copied[:] = deepcopy(list(self))
        return copied


def response(items: list[Item]) -> Item:
    """Give the Response that an action's *items* came in; raises `EpisodeError` where its model broke."""
    if not isinstance(items, Turn):
        return wire.response(items, model="policy")
    if items.failure:
        raise items.failure
    return (items.response or wire.response([], model="policy")) | {"output": list(items)}
