"""Losses: the nodes that are heard of no more though they did not leave, until what they had is there again."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from gymsdk.servers.nodes.member import Member
from gymsdk.servers.nodes.reports import Exit
from gymsdk.servers.nodes.service import Service

REMEMBERED = 100
"""How many lost nodes are remembered."""

FORGOTTEN = 600.0
"""Seconds after which a lost node is remembered no more."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The node *id* with its *services*, when it was last *heard*, and how many of each name *were* there then."""

    id: str
    services: tuple[Service, ...]
    heard: float
    supervisor: str
    were: Mapping[str, int]


class Losses:
    """The nodes that are lost, the last so many of them, each for a while."""

    def __init__(self) -> None:
        self._losses: OrderedDict[str, Loss] = OrderedDict()

    def __iter__(self) -> Iterator[Loss]:
        """Yield them, the first that was lost first."""
        return iter([*self._losses.values()])

    def add(self, member: Member, others: Iterable[Member]) -> None:
        """Remember *member*, which was there beside *others*; those that came when it was gone may be in its place."""
        if not member.services:
            return
        beside = [member, *(each for each in others if each.joined <= member.heard)]
        were = {name: count for name, count in _counts(beside).items() if name in _counts([member])}
        services = tuple(each.model_copy(update={"fields": {}}) for each in member.services)
        self._losses[member.id] = Loss(member.id, services, member.heard, member.said.supervisor, were)
        if len(self._losses) > REMEMBERED:
            self._losses.popitem(last=False)

    def drop(self, id: str) -> None:
        """Forget the node *id*: it is back, or has left."""
        self._losses.pop(id, None)

    def ended(self, supervisor: str, exits: Mapping[str, Exit]) -> None:
        """Forget those whose processes ended, as their *supervisor* says: that is told of by itself."""
        for each in self:
            if each.supervisor == supervisor and any(ends(exits, one) for one in each.services):
                self.drop(each.id)

    def look(self, members: Iterable[Member], now: float) -> None:
        """Forget those of whose servers as many are there as when they were, and those lost long ago."""
        counts = _counts(members)
        for each in self:
            if now - each.heard > FORGOTTEN or all(counts[name] >= were for name, were in each.were.items()):
                self.drop(each.id)


def ends(exits: Mapping[str, Exit], service: Service) -> bool:
    """Whether one of *exits* was that of the process of *service*."""
    return service.name in exits and exits[service.name].ends(service)


def _counts(members: Iterable[Member]) -> Counter[str]:
    return Counter(service.name for member in members for service in member.services)
