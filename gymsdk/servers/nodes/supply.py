"""A supply: servers that a head begins itself, while it runs, for want of any among its members."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Generic, Protocol, TypeVar

from gymsdk.errors import GymsdkError
from gymsdk.servers.nodes.members import Members
from gymsdk.servers.nodes.service import Service
from gymsdk.servers.nodes.strand import Strand


class Wanted(Protocol):
    """What is wanted: a server to be."""

    @property
    def service(self) -> Service:
        """What it is to others."""


P = TypeVar("P", bound=Wanted)

LOOKING = 0.5
"""Seconds between two looks for what is wanted."""

SETTLING = 2.0
"""Seconds that a member has been there before it counts: what is wanted may be on its way with another."""

log = logging.getLogger("gymsdk")


class Supply(Generic[P]):
    """What *wanted* gives for the servers *own* and those of *members*, made by *begun* into a server that runs.

    It is told, too, the names of those that members say are to be there. *begun* gives what runs, and what tells of it
    once it is up, *starting* seconds later at most; one that does not come up is told of once, and not tried again.
    Each ends within *patience* seconds.
    """

    def __init__(
        self,
        own: Sequence[Service],
        members: Members,
        wanted: Callable[[Sequence[Service], Collection[str]], Sequence[P]],
        begun: Callable[[P], tuple[Strand, Callable[[], None]]],
        *,
        starting: float,
        patience: float,
    ) -> None:
        self._own = own
        self._members = members
        self._wanted = wanted
        self._begun = begun
        self._starting = starting
        self._patience = patience
        self._failed: set[str] = set()
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
        there = [each for member in self._members.nodes_settled_for(SETTLING) for each in member.services]
        coming = {*self._members.expected_servers, *self._failed}
        for part in self._wanted([*self._own, *there], coming) if there else ():
            try:
                await self._begin(part)
            except GymsdkError as error:
                # What nodes say is no reason for the head to end.
                self._failed.add(part.service.name)
                log.warning("no node has the server %r, and it cannot run here: %s", part.service.name, error)

    async def _begin(self, part: P) -> None:
        strand, tell = self._begun(part)
        self._strands.append(strand)
        try:
            await strand.up(self._starting)
        except GymsdkError:
            self._strands.remove(strand)
            await strand.end(self._patience)
            raise
        tell()
        log.warning("%s runs in the head's process: no node has one", strand.what)

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
