"""A supply: servers that a head begins itself, while it runs, for want of any among its members."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Generic, TypeVar

from gymsdk.servers.nodes.members import Members
from gymsdk.servers.nodes.service import Service
from gymsdk.servers.nodes.strand import Strand

P = TypeVar("P")

LOOKING = 0.5
"""Seconds between two looks for what is wanted."""

SETTLING = 2.0
"""Seconds that a member has been there before it counts: what is wanted may be on its way with another."""

log = logging.getLogger("gymsdk")


class Supply(Generic[P]):
    """What *wanted* gives for the servers *own* and those of *members*, made by *begun* into a server that runs.

    It is told, too, the names of those that members say are to be there. Each ends within *patience* seconds.
    """

    def __init__(
        self,
        own: Sequence[Service],
        members: Members,
        wanted: Callable[[Sequence[Service], Collection[str]], Sequence[P]],
        begun: Callable[[P], Awaitable[Strand]],
        *,
        patience: float,
    ) -> None:
        self._own = own
        self._members = members
        self._wanted = wanted
        self._begun = begun
        self._patience = patience
        self._strands: list[Strand] = []

    async def run(self, up: asyncio.Event, over: asyncio.Event) -> None:
        """Set *up*, begin what is wanted until it is *over*, and end that; raises where it ends by itself."""
        up.set()
        try:
            while not over.is_set():
                await self._look()
                await self._passed(over)
        finally:
            await asyncio.gather(*(each.end(self._patience) for each in self._strands))

    async def _look(self) -> None:
        there = [each for member in self._members.settled_for(SETTLING) for each in member.services]
        for part in self._wanted([*self._own, *there], self._members.expected) if there else ():
            strand = await self._begun(part)
            log.warning("%s runs in the head's process: no node has one", strand.what)
            self._strands.append(strand)

    async def _passed(self, over: asyncio.Event) -> None:
        ending = asyncio.ensure_future(over.wait())
        try:
            await asyncio.wait(
                {ending, *(each.task for each in self._strands)}, timeout=LOOKING, return_when="FIRST_COMPLETED"
            )
        finally:
            ending.cancel()
        broken = [each for each in self._strands if each.task.done()]
        if broken and not over.is_set():
            raise broken[0].broken()
