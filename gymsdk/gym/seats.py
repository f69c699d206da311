"""The seats at one table: an episode at each, their turns and resets all under way at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.utils import seeding

from gymsdk.errors import UsageError
from gymsdk.gym.seat import Seat, Stepped
from gymsdk.gym.table import Dealt, Table
from gymsdk.outcome import Rollout
from gymsdk.transcript import Item

T = TypeVar("T")

NEW = 0.0, False, False
"""What a seat earns with a reset, and how far that ends an episode."""


class Seats:
    """As many seats at *table* as *generators*, each drawing from its own: `None` is made when it is needed.

    *finished* are the last rollouts. `played` and `clear` are coroutines of the background loop.
    """

    def __init__(self, table: Table, generators: list[tuple[np.random.Generator, int] | None]) -> None:
        self.table = table
        self.generators = generators
        self.seats = [Seat(table.environment, table.codec(), table.budget) for _ in generators]
        self.finished: list[Rollout | None] = [None] * len(generators)

    def generator(self, index: int, seed: int | None = None) -> tuple[np.random.Generator, int]:
        """Give the generator of a seat and what it was seeded with, seeded anew where a *seed* is given."""
        found = self.generators[index]
        if seed is not None or found is None:
            found = self.generators[index] = seeding.np_random(seed)
        return found

    def deal(self, index: int, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Dealt:
        """Give what the next episode of a seat is opened with; raises `UsageError`."""
        return self.table.deal(self.generator(index, seed)[0], seed=seed, options=options)

    def over(self) -> list[int]:
        """Give the seats whose episode is over."""
        return [index for index, seat in enumerate(self.seats) if seat.rollout]

    def heard(self, actions: Mapping[int, Any]) -> dict[int, list[Item]]:
        """Give what each action says, nothing played yet; raises `ResetNeeded`, and `UsageError` where one is none."""
        if idle := [str(index) for index in actions if not self.seats[index].playing]:
            raise ResetNeeded(f"no episode is under way at seat {', '.join(idle)}; reset it before the next step()")
        return {index: self._heard(index, action) for index, action in actions.items()}

    async def played(self, said: Mapping[int, list[Item]], dealt: Mapping[int, Dealt]) -> dict[int, Stepped]:
        """Give what came of the turns *said* and of the episodes *dealt*, all of them under way at once."""
        await self.table.enter()
        turns = [self.seats[index].answer(items) for index, items in said.items()]
        resets = [_opened(self.seats[index], each) for index, each in dealt.items()]
        try:
            played = await _together([*turns, *resets])
        finally:
            for index in said:
                self.finished[index] = self.seats[index].rollout or self.finished[index]
        return dict(zip([*said, *dealt], played, strict=True))

    async def clear(self) -> None:
        """Close every episode in hand and leave the environment."""
        try:
            await _together(seat.close() for seat in self.seats)
        finally:
            await self.table.leave()

    def _heard(self, index: int, action: Any) -> list[Item]:
        try:
            return self.seats[index].heard(action)
        except UsageError as error:
            raise UsageError(f"seat {index}: {error}") from None


async def _opened(seat: Seat, dealt: Dealt) -> Stepped:
    seen, info = await seat.reset(dealt.task, seed=dealt.seed, id=dealt.id)
    return seen, *NEW, info


async def _together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Give what all of them give; where one raises, the others end first, and so they do when they are cancelled."""
    ended = await asyncio.gather(*coroutines, return_exceptions=True)
    results = [each for each in ended if not isinstance(each, BaseException)]
    for each in ended:
        if isinstance(each, BaseException):
            raise each
    return results
