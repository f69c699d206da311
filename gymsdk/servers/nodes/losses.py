"""Losses: the nodes that are heard of no more though they did not leave, until what they had is there again."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
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
    """The node *id* with its *services*, when it was last *heard*, and how many of each name *were* there then.

    It is told of as lost since *since*.
    """

    id: str
    services: tuple[Service, ...]
    last_seen: float
    supervisor: str
    expected_counts: Mapping[str, int]
    since: float


class Losses:
    """The nodes that are lost, the last so many of them, each for a while."""

    def __init__(self) -> None:
        self._losses: OrderedDict[str, Loss] = OrderedDict()
        # When the number of servers of a name became which, the first entry being the one before all that matter.
        self._numbers: dict[str, list[tuple[float, int]]] = {}

    def __iter__(self) -> Iterator[Loss]:
        """Yield them, the first that was lost first."""
        return iter([*self._losses.values()])

    def record_change(self, gone: Iterable[Service], come: Iterable[Service], now: float) -> None:
        """Note that from *now* on the servers *come* are there, and those that are *gone* are not."""
        more = Counter(each.name for each in come)
        more.subtract(each.name for each in gone)
        for name, change in more.items():
            if change:
                numbers = self._numbers.setdefault(name, [(float("-inf"), 0)])
                numbers.append((now, numbers[-1][1] + change))

    def add(self, member: Member, now: float) -> None:
        """Remember *member*, which is lost *now*: those that came after it was heard may be in its place."""
        if not member.services:
            return
        # Those that were lost since then, and still are, have their own place to be filled.
        lost = _counts(each for each in self if each.since > member.last_seen and each.id != member.id)
        were = {name: self._count_at(name, member.last_seen) - lost[name] for name in _counts([member])}
        self.record_change(member.services, (), now)
        services = tuple(each.model_copy(update={"fields": {}}) for each in member.services)
        self._losses[member.id] = Loss(member.id, services, member.last_seen, member.registration.supervisor, were, now)
        if len(self._losses) > REMEMBERED:
            self._losses.popitem(last=False)

    def drop(self, id: str) -> None:
        """Forget the node *id*: it is back, or has left."""
        self._losses.pop(id, None)

    def record_exits(self, supervisor: str, exits: Mapping[str, Exit]) -> None:
        """Forget those whose processes ended, as their *supervisor* says: that is told of by itself."""
        for each in self:
            if each.supervisor == supervisor and any(ends(exits, one) for one in each.services):
                self.drop(each.id)

    def forget_replaced(self, members: Collection[Member], now: float) -> None:
        """Forget those of whose servers as many are there as when they were, and those lost long ago."""
        counts = _counts(members)
        for each in self:
            if now - each.last_seen > FORGOTTEN or all(counts[name] >= were for name, were in each.expected_counts.items()):
                self.drop(each.id)
        self._forget(min((each.last_seen for each in members), default=now))

    def _count_at(self, name: str, at: float) -> int:
        numbers = self._numbers[name]
        return numbers[bisect_right(numbers, (at, float("inf"))) - 1][1]

    def _forget(self, before: float) -> None:
        for name, numbers in [*self._numbers.items()]:
            del numbers[: bisect_right(numbers, (before, float("inf"))) - 1]
            if len(numbers) == 1 and not numbers[0][1]:
                del self._numbers[name]


def ends(exits: Mapping[str, Exit], service: Service) -> bool:
    """Whether one of *exits* was that of the process of *service*."""
    return service.name in exits and exits[service.name].is_exit_of(service)


def _counts(members: Iterable[Member | Loss]) -> Counter[str]:
    return Counter(service.name for member in members for service in member.services)
