"""Members: the nodes that a head knows, each for as long as it is heard of."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gymsdk.errors import suggestion
from gymsdk.servers.app import Refused
from gymsdk.servers.nodes.choice import ROUTES
from gymsdk.servers.nodes.reports import ITSELF, LEASE, Exit, Registration
from gymsdk.servers.nodes.service import Service

REMEMBERED = 100
"""How many lost nodes are remembered."""

MOST = 1000
"""Nodes that one head knows."""


@dataclass(slots=True)
class Member:
    """One node: what it said last, its services as they are reached, since when it is there, when it was last heard.

    *restarts* are the processes that it is to start anew, each with the time at which that is to be at the latest.
    """

    id: str
    said: Registration
    services: tuple[Service, ...]
    joined: float
    heard: float
    lease: float
    restarts: dict[tuple[str, int], float] = field(default_factory=dict)


class Members:
    """The nodes beside the servers *own* of the head's process: *most* at most, each for *lease* seconds from its word.

    A member's server may not be called like one of the configuration's keys *taken*.
    """

    def __init__(
        self,
        own: Sequence[Service] = (),
        *,
        taken: Iterable[str] = (),
        lease: float = LEASE,
        most: int = MOST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lease = lease
        self._own = own
        self._taken = frozenset({"head_server", "default_host", ROUTES, *taken})
        self._most = most
        self._clock = clock
        self._since = clock()
        self._members: dict[str, Member] = {}
        self._left: OrderedDict[str, None] = OrderedDict()
        self._lost: OrderedDict[str, Member] = OrderedDict()

    def __len__(self) -> int:
        """Give how many there are."""
        return len(self._there())

    def __iter__(self) -> Iterator[Member]:
        """Yield those that are there, the first that came first."""
        return iter(list(self._there().values()))

    @property
    def settled(self) -> bool:
        """Whether every node that was there before this head has had the time to be heard of."""
        return self._clock() - self._since >= self.lease

    def age(self, member: Member) -> float:
        """Give the seconds since *member* was heard of."""
        return self._clock() - member.heard

    def settled_for(self, seconds: float) -> list[Member]:
        """Give those that have been there for some *seconds*."""
        return [each for each in self if self._clock() - each.joined >= seconds]

    def put(self, id: str, said: Registration, address: str) -> float:
        """Keep what the node *id* at *address* says of itself, and give for how many seconds; raises `Refused`."""
        there = self._there()
        if id in self._left:
            raise Refused(410, f"node {id!r} has left; join as another")
        if id not in there and len(there) >= self._most:
            raise Refused(503, f"this head has {self._most} nodes by now; let some leave", retry_after=self.lease)
        for each in said.services:
            self._check(each, said.services, but=id)
        now, known = self._clock(), there.get(id)
        services = tuple(each.reached(address) for each in said.services)
        lease = min(self.lease, said.seconds)
        self._lost.pop(id, None)
        member = Member(id, said, services, known.joined if known else now, now, lease)
        member.restarts |= known.restarts if known else {}
        self._members[id] = member
        if said.supervisor:
            self._end(said.supervisor)
        return lease

    def restart(self, name: str, drain: float = 0.0) -> list[int]:
        """Give the processes of the server *name*, which are to be started anew; raises `Refused` where nobody can.

        Each is given nothing new, and ends once its sessions have, or *drain* seconds are over.
        """
        told = {each.id: each for each in self if name in each.said.restarts}
        if not told:
            alone = f"nobody is there who could start {name!r} again: serve it with --separate"
            unknown = f"there is no server {name!r}{suggestion(name, sorted(self._names()))}"
            raise Refused(409, alone if name in self._names() else unknown)
        for each in told.values():
            each.restarts[name, each.said.restarts[name]] = self._clock() + drain
        return [each.said.restarts[name] for each in told.values()]

    def restarting(self, id: str) -> list[str]:
        """Give which servers the node *id* is to start anew by now, and take that for told."""
        member, now = self._members[id], self._clock()
        over = [one for one, until in member.restarts.items() if now >= until or not self._sessions(*one)]
        for one in over:
            del member.restarts[one]
        return sorted(name for name, pid in over if member.said.restarts.get(name) == pid)

    def _end(self, supervisor: str) -> None:
        """Have those be gone whose processes ended: the *supervisor* knows that before their lease is over."""
        beside = [each for each in self._members.values() if each.said.supervisor == supervisor]
        exits = {name: ended for each in beside for name, ended in each.said.exits.items()}
        for each in beside:
            if any(one.name in exits and exits[one.name].ends(one) for one in each.services):
                self.leave(each.id)

    def _sessions(self, name: str, pid: int) -> int:
        having = [each for each in self if (name, pid) in {(one.name, one.pid) for one in each.services}]
        loads = [each.said.loads.get(name) for each in having]
        return sum(load.sessions for load in loads if load)

    def _names(self) -> set[str]:
        return {ITSELF, *(each.name for each in (*self._own, *self.services)), *self.expected}

    def leave(self, id: str) -> None:
        """Have the node *id* be gone; what it said before and comes later counts no more."""
        if self._members.pop(id, None) is not None:
            self._left[id] = None
        if len(self._left) > self._most:
            self._left.popitem(last=False)

    @property
    def services(self) -> list[Service]:
        """Every server of every member."""
        return [service for member in self for service in member.services]

    @property
    def draining(self) -> set[str]:
        """The ids of the instances that are to be given nothing new."""
        ending = {one for member in self for one in member.restarts}
        return {
            service.id
            for member in self
            for service in member.services
            if member.said.draining or (service.name, service.pid) in ending
        }

    @property
    def lost(self) -> list[Member]:
        """The nodes that are heard of no more, though they did not leave."""
        self._there()
        return list(self._lost.values())

    @property
    def expected(self) -> list[str]:
        """The names of the servers that members say are to be there."""
        return list(dict.fromkeys(name for member in self for name in member.said.expected))

    @property
    def supervised(self) -> dict[str, dict[str, Exit]]:
        """How servers ended last, by name, for each supervisor."""
        found: dict[str, dict[str, Exit]] = {}
        for member in self:
            if member.said.supervisor:
                found.setdefault(member.said.supervisor, {}).update(member.said.exits)
        return found

    @property
    def exits(self) -> dict[str, Exit]:
        """How servers of members ended last, by name."""
        return {name: ended for member in self for name, ended in member.said.exits.items()}

    def _there(self) -> dict[str, Member]:
        now = self._clock()
        for each in [each for each in self._members.values() if now - each.heard > each.lease]:
            self._lost[each.id] = self._members.pop(each.id)
        while len(self._lost) > REMEMBERED:
            self._lost.popitem(last=False)
        return self._members

    def _check(self, service: Service, beside: Sequence[Service], *, but: str) -> None:
        """Refuse a *service* that contradicts another of its name, or has the id of one of those, or *beside* it."""
        if service.name in self._taken:
            raise Refused(409, f"a server may not be called {service.name!r}: that is a key of the configuration")
        others = [*self._own, *(each for member in self if member.id != but for each in member.services)]
        for other in others:
            if other.name == service.name and _is(other) != _is(service):
                there, here = "/".join(_is(other)), "/".join(_is(service))
                raise Refused(409, f"{service.name!r} is {there} here, and cannot be {here}; give it another name")
        if [each.id for each in (*others, *beside)].count(service.id) > 1:
            raise Refused(409, f"the id {service.id} of {service.name!r} is another instance's; start it anew")


def _is(service: Service) -> tuple[str, str]:
    return service.kind, service.implementation
