"""Members: the nodes that a head knows, each for as long as it is heard of."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from gymsdk.errors import suggestion
from gymsdk.servers.app import Refused
from gymsdk.servers.nodes import restarts
from gymsdk.servers.nodes.choice import ROUTES
from gymsdk.servers.nodes.losses import Loss, Losses, ends
from gymsdk.servers.nodes.member import Member, Order
from gymsdk.servers.nodes.reports import ITSELF, LEASE, Exit, Registration
from gymsdk.servers.nodes.service import Service

MOST = 1000
"""Nodes that one head knows."""

TICK, LATE = 0.1, 0.2
"""How often a head looks at its clock, and how late the look shows that it is overloaded, in parts of a lease.

Reading a heartbeat takes a few passes of the event loop, each of which may be as long as the delay of the look.
"""


class Members:
    """The nodes beside the servers *own* of the head's process: *most* at most, each for *lease* seconds from its word.

    A member's server may not be called like one of the configuration's keys *taken*. While `run` runs, nobody is lost
    for this process having stood still.
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
        self._losses = Losses()
        self._awake: float | None = None

    def __len__(self) -> int:
        """Give how many there are."""
        return len(self._live_nodes())

    def __iter__(self) -> Iterator[Member]:
        """Yield those that are there, the first that came first."""
        return iter(list(self._live_nodes().values()))

    async def run(self, up: asyncio.Event, over: asyncio.Event) -> None:
        """Set *up*, and know until it is *over* when this process stood still: then everybody has another lease."""
        up.set()
        try:
            while not over.is_set():
                self._live_nodes()
                self._awake = self._clock()
                with suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), TICK * self.lease)
        finally:
            self._awake = None

    @property
    def is_settled(self) -> bool:
        """Whether every node that was there before this head, or before it stood still, has had time to be heard of."""
        self._live_nodes()
        return self._clock() - self._since >= self.lease

    def age(self, member: Member | Loss) -> float:
        """Give the seconds since *member* was heard of."""
        return self._clock() - member.last_seen

    def nodes_settled_for(self, seconds: float) -> list[Member]:
        """Give those that have been there for some *seconds*."""
        return [each for each in self if self._clock() - each.joined >= seconds]

    def register(self, id: str, said: Registration, address: str) -> float:
        """Keep what the node *id* at *address* says of itself, and give for how many seconds; raises `Refused`."""
        there = self._live_nodes()
        if id in self._left:
            raise Refused(410, f"node {id!r} has left; join as another")
        if id not in there and len(there) >= self._most:
            raise Refused(503, f"this head has {self._most} nodes by now; let some leave", retry_after=self.lease)
        for each in said.services:
            self._check_service(each, said.services, but=id)
        exits = {**self.exits_by_supervisor.get(said.supervisor, {}), **said.exits} if said.supervisor else {}
        if any(ends(exits, each) for each in said.services):
            self.leave(id)
            raise Refused(410, f"the process of node {id!r} has ended, as its supervisor says; join as another")
        now, known = self._clock(), there.get(id)
        services = tuple(each.as_reached_at(address) for each in said.services)
        lease = min(self.lease, said.seconds)
        joined, orders = (known.joined, known.orders) if known else (now, {})
        self._members[id] = Member(id, said, services, joined, now, lease, orders)
        self._losses.drop(id)
        self._losses.record_change(known.services if known else (), services, now)
        self._drop_exited(said.supervisor, exits)
        self._losses.forget_replaced(self._members.values(), now)
        return lease

    def restart(self, name: str, drain: float = 0.0) -> list[Order]:
        """Give the orders to start the processes of the server *name* anew; raises `Refused` where nobody can.

        One after the other, each is given nothing new, and ends once its sessions have, or *drain* seconds are over.
        """
        if found := restarts.ordered([*self], name, drain):
            return found
        alone = f"nobody is there who could start {name!r} again: serve it with --separate"
        unknown = f"there is no server {name!r}{suggestion(name, sorted(self._names()))}"
        raise Refused(409, alone if name in self._names() else unknown)

    def due_restarts(self, id: str) -> list[str]:
        """Give which servers the node *id* is to start anew by now."""
        members = [*self]
        return [name for each in members if each.id == id for name in restarts.due(each, members, self._clock())]

    def _drop_exited(self, supervisor: str, exits: Mapping[str, Exit]) -> None:
        """Have those be gone whose processes ended: the *supervisor* knows that before their lease is over."""
        for each in [each for each in self._members.values() if exits and each.registration.supervisor == supervisor]:
            if any(ends(exits, one) for one in each.services):
                self.leave(each.id)
        self._losses.record_exits(supervisor, exits)

    def _names(self) -> set[str]:
        return {ITSELF, *(each.name for each in (*self._own, *self.services)), *self.expected_servers}

    def leave(self, id: str) -> None:
        """Have the node *id* be gone; what it said before and comes later counts no more."""
        if there := self._members.pop(id, None):
            self._losses.record_change(there.services, (), self._clock())
        self._losses.drop(id)
        self._left[id] = None
        if len(self._left) > self._most:
            self._left.popitem(last=False)

    @property
    def services(self) -> list[Service]:
        """Every server of every member."""
        return [service for member in self for service in member.services]

    @property
    def draining_instances(self) -> set[str]:
        """The ids of the instances that are to be given nothing new."""
        leaving = {service.id for member in self if member.registration.draining for service in member.services}
        return leaving | restarts.draining([*self], self._clock())

    @property
    def lost_nodes(self) -> list[Loss]:
        """The nodes that are heard of no more though they did not leave, and whose servers are not all there again."""
        self._losses.forget_replaced(self._live_nodes().values(), self._clock())
        return [*self._losses]

    @property
    def expected_servers(self) -> list[str]:
        """The names of the servers that members say are to be there."""
        return list(dict.fromkeys(name for member in self for name in member.registration.expected))

    @property
    def exits_by_supervisor(self) -> dict[str, dict[str, Exit]]:
        """How servers ended last, by name, for each supervisor."""
        found: dict[str, dict[str, Exit]] = {}
        for member in self:
            if member.registration.supervisor:
                found.setdefault(member.registration.supervisor, {}).update(member.registration.exits)
        return found

    @property
    def exits(self) -> dict[str, Exit]:
        """How servers of members ended last, by name; where there are several, the last that went wrong."""
        found: dict[str, Exit] = {}
        for member in self:
            for name, ended in member.registration.exits.items():
                found[name] = max(found.get(name, ended), ended, key=lambda each: (each.code != 0, each.at))
        return found

    def _live_nodes(self) -> dict[str, Member]:
        now = self._clock()
        if self._awake is not None and now - self._awake > LATE * self.lease:
            # This process was too busy to read the heartbeats that arrived meanwhile: nobody is lost before it has.
            self._since = self._awake = now
        for each in [*self._members.values()]:
            if now - max(each.last_seen, self._since) > each.lease:
                del self._members[each.id]
                self._losses.add(each, now)
        return self._members

    def _check_service(self, service: Service, beside: Sequence[Service], *, but: str) -> None:
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
