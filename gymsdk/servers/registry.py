"""Admission: which servers of a node a head takes in, by how they are reached."""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from gymsdk.errors import format_suggestion
from gymsdk.http.tls import is_loopback
from gymsdk.servers.app import RequestRejected
from gymsdk.servers.instances import ROUTES_KEY
from gymsdk.servers.reports import HEAD_NODE_ID, LEASE_SECONDS, Exit, Registration
from gymsdk.servers.service import Service


@dataclass(slots=True)
class RestartOrder:
    """To start the process *pid* anew, which has the *instances* of these ids.

    Once its turn has come its sessions have *drain* seconds to end in, which is *until* then.
    """

    pid: int
    drain: float
    instances: tuple[str, ...] = ()
    until: float | None = None


@dataclass(slots=True)
class Node:
    """One node: what it said last, its services as they are reached, since when it is there, when it was last heard.

    *orders* say what it is to start anew, by the names of its servers.
    """

    id: str
    registration: Registration
    services: tuple[Service, ...]
    joined: float
    last_seen: float
    lease: float
    orders: dict[str, RestartOrder] = field(default_factory=dict)


MAX_LOST_NODES = 100
"""How many lost nodes are remembered."""

LOST_NODE_SECONDS = 600.0
"""Seconds after which a lost node is remembered no more."""


@dataclass(frozen=True, slots=True)
class LostNode:
    """The node *id* with its *services*, when it was last *heard*, and how many of each name *were* there then.

    It is told of as lost since *since*.
    """

    id: str
    services: tuple[Service, ...]
    last_seen: float
    supervisor: str
    expected_counts: Mapping[str, int]
    since: float


class LostNodes:
    """The nodes that are lost, the last so many of them, each for a while."""

    def __init__(self) -> None:
        self._losses: OrderedDict[str, LostNode] = OrderedDict()
        # When the number of servers of a name became which, the first entry being the one before all that matter.
        self._numbers: dict[str, list[tuple[float, int]]] = {}

    def __iter__(self) -> Iterator[LostNode]:
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

    def add(self, member: Node, now: float) -> None:
        """Remember *member*, which is lost *now*: those that came after it was heard may be in its place."""
        if not member.services:
            return
        # Those that were lost since then, and still are, have their own place to be filled.
        lost = _count_services(each for each in self if each.since > member.last_seen and each.id != member.id)
        were = {name: self._count_at(name, member.last_seen) - lost[name] for name in _count_services([member])}
        self.record_change(member.services, (), now)
        services = tuple(each.model_copy(update={"fields": {}}) for each in member.services)
        self._losses[member.id] = LostNode(
            member.id, services, member.last_seen, member.registration.supervisor, were, now
        )
        if len(self._losses) > MAX_LOST_NODES:
            self._losses.popitem(last=False)

    def drop(self, id: str) -> None:
        """Forget the node *id*: it is back, or has left."""
        self._losses.pop(id, None)

    def record_exits(self, supervisor: str, exits: Mapping[str, Exit]) -> None:
        """Forget those whose processes ended, as their *supervisor* says: that is told of by itself."""
        for each in self:
            if each.supervisor == supervisor and any(is_exit_of(exits, one) for one in each.services):
                self.drop(each.id)

    def forget_replaced(self, members: Collection[Node], now: float) -> None:
        """Forget those of whose servers as many are there as when they were, and those lost long ago."""
        counts = _count_services(members)
        for each in self:
            if now - each.last_seen > LOST_NODE_SECONDS or all(
                counts[name] >= were for name, were in each.expected_counts.items()
            ):
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


def is_exit_of(exits: Mapping[str, Exit], service: Service) -> bool:
    """Whether one of *exits* was that of the process of *service*."""
    return service.name in exits and exits[service.name].is_exit_of(service)


def _count_services(members: Iterable[Node | LostNode]) -> Counter[str]:
    return Counter(service.name for member in members for service in member.services)


RESTART_LAPSE_SECONDS = 600.0
"""Seconds after its time to drain in which a server has to be there again: if not, no other of its name is ended."""

log = logging.getLogger("gymsdk")


def order_restarts(members: Sequence[Node], name: str, drain: float) -> list[RestartOrder]:
    """Give the orders to start every process of the server *name* anew, each within *drain* seconds of its turn."""
    told = [each for each in members if name in each.registration.restarts]
    for each in told:
        pid = each.registration.restarts[name]
        each.orders[name] = RestartOrder(pid, drain, tuple(_instances_of_process(members, each, name, pid)))
    return [each.orders[name] for each in told]


def find_due_restarts(member: Node, members: Sequence[Node], now: float) -> list[str]:
    """Give which servers *member* is to start anew: it is told until it says that it has, for an answer may be lost."""
    mine = [(name, order) for name, (whose, order) in _find_turns(members, now).items() if whose is member]
    running = [(name, order) for name, order in mine if member.registration.restarts.get(name) == order.pid]
    return sorted(name for name, order in running if _may_restart(members, member, name, order, now))


def find_draining(members: Sequence[Node], now: float) -> set[str]:
    """Give the ids of the instances that are to be given nothing new, as their process is about to end."""
    turns = _find_turns(members, now).items()
    return {one for name, (whose, order) in turns for one in _instances_of_process(members, whose, name, order.pid)}


def _find_turns(members: Sequence[Node], now: float) -> dict[str, tuple[Node, RestartOrder]]:
    """Give whose turn it is, by name; an order is over once another process has its server."""
    turns: dict[str, tuple[Node, RestartOrder]] = {}
    for member in members:
        for name, order in [*member.orders.items()]:
            if _has_restarted(members, member, name, order):
                del member.orders[name]
            elif name not in turns:
                order.until = now + order.drain if order.until is None else order.until
                turns[name] = member, order
    for name, (_, order) in [*turns.items()]:
        if order.until is not None and now >= order.until + RESTART_LAPSE_SECONDS:
            _drop_lapsed(members, name, order)
            del turns[name]
    return turns


def _drop_lapsed(members: Sequence[Node], name: str, order: RestartOrder) -> None:
    """Drop every order of *name*, as whoever had this *order* is not there again: nobody expects the others later."""
    dropped = [each.orders.pop(name) for each in members if name in each.orders]
    log.warning(
        "the restart of %r is given up: what was to come after its process %d is not there %g s later; "
        "of its processes, %d are left as they are: restart it again once that one is mended",
        name,
        order.pid,
        order.drain + RESTART_LAPSE_SECONDS,
        len(dropped) - 1,
    )


def _has_restarted(members: Sequence[Node], member: Node, name: str, order: RestartOrder) -> bool:
    pid = member.registration.restarts.get(name)
    return pid is not None and pid != order.pid and bool(_instances_of_process(members, member, name, pid))


def _may_restart(members: Sequence[Node], member: Node, name: str, order: RestartOrder, now: float) -> bool:
    having = _nodes_with_process(members, member, name, order.pid)
    sessions = sum(each.registration.loads[name].sessions for each in having if name in each.registration.loads)
    return not sessions or (order.until is not None and now >= order.until)


def _instances_of_process(members: Sequence[Node], member: Node, name: str, pid: int) -> list[str]:
    having = _nodes_with_process(members, member, name, pid)
    return [one.id for each in having for one in each.services if (one.name, one.pid) == (name, pid)]


def _nodes_with_process(members: Sequence[Node], member: Node, name: str, pid: int) -> list[Node]:
    # Another machine's processes, and another container's, have the same numbers.
    beside = [each for each in members if each.registration.supervisor == member.registration.supervisor]
    return [each for each in beside if any((one.name, one.pid) == (name, pid) for one in each.services)]


MAX_NODES = 1000
"""Nodes that one head knows."""

CLOCK_TICK_SECONDS, CLOCK_LATE_SECONDS = 0.1, 0.2
"""How often a head looks at its clock, and how late the look shows that it is overloaded, in parts of a lease.

Reading a heartbeat takes a few passes of the event loop, each of which may be as long as the delay of the look.
"""


class NodeRegistry:
    """The nodes beside the servers *own* of the head's process: *most* at most, each for *lease* seconds from its word.

    A member's server may not be called like one of the configuration's keys *taken*. While `run` runs, nobody is lost
    for this process having stood still.
    """

    def __init__(
        self,
        own: Sequence[Service] = (),
        *,
        taken: Iterable[str] = (),
        lease: float = LEASE_SECONDS,
        most: int = MAX_NODES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lease = lease
        self._own = own
        self._taken = frozenset({"head_server", "default_host", ROUTES_KEY, *taken})
        self._most = most
        self._clock = clock
        self._since = clock()
        self._members: dict[str, Node] = {}
        self._left: OrderedDict[str, None] = OrderedDict()
        self._losses = LostNodes()
        self._awake: float | None = None

    def __len__(self) -> int:
        """Give how many there are."""
        return len(self._live_nodes())

    def __iter__(self) -> Iterator[Node]:
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
                    await asyncio.wait_for(over.wait(), CLOCK_TICK_SECONDS * self.lease)
        finally:
            self._awake = None

    @property
    def is_settled(self) -> bool:
        """Whether every node that was there before this head, or before it stood still, has had time to be heard of."""
        self._live_nodes()
        return self._clock() - self._since >= self.lease

    def age(self, member: Node | LostNode) -> float:
        """Give the seconds since *member* was heard of."""
        return self._clock() - member.last_seen

    def nodes_settled_for(self, seconds: float) -> list[Node]:
        """Give those that have been there for some *seconds*."""
        return [each for each in self if self._clock() - each.joined >= seconds]

    def register(self, id: str, said: Registration, address: str) -> float:
        """Keep what the node *id* at *address* says of itself, and give for how many seconds; raises `Refused`."""
        there = self._live_nodes()
        if id in self._left:
            raise RequestRejected(410, f"node {id!r} has left; join as another")
        if id not in there and len(there) >= self._most:
            raise RequestRejected(
                503, f"this head has {self._most} nodes by now; let some leave", retry_after=self.lease
            )
        for each in said.services:
            self._check_service(each, said.services, but=id)
        exits = {**self.exits_by_supervisor.get(said.supervisor, {}), **said.exits} if said.supervisor else {}
        if any(is_exit_of(exits, each) for each in said.services):
            self.leave(id)
            raise RequestRejected(410, f"the process of node {id!r} has ended, as its supervisor says; join as another")
        now, known = self._clock(), there.get(id)
        services = tuple(each.as_reached_at(address) for each in said.services)
        lease = min(self.lease, said.seconds)
        joined, orders = (known.joined, known.orders) if known else (now, {})
        self._members[id] = Node(id, said, services, joined, now, lease, orders)
        self._losses.drop(id)
        self._losses.record_change(known.services if known else (), services, now)
        self._drop_exited(said.supervisor, exits)
        self._losses.forget_replaced(self._members.values(), now)
        return lease

    def restart(self, name: str, drain: float = 0.0) -> list[RestartOrder]:
        """Give the orders to start the processes of the server *name* anew; raises `Refused` where nobody can.

        One after the other, each is given nothing new, and ends once its sessions have, or *drain* seconds are over.
        """
        if found := order_restarts([*self], name, drain):
            return found
        alone = f"nobody is there who could start {name!r} again: serve it with --separate"
        unknown = f"there is no server {name!r}{format_suggestion(name, sorted(self._names()))}"
        raise RequestRejected(409, alone if name in self._names() else unknown)

    def due_restarts(self, id: str) -> list[str]:
        """Give which servers the node *id* is to start anew by now."""
        members = [*self]
        return [name for each in members if each.id == id for name in find_due_restarts(each, members, self._clock())]

    def _drop_exited(self, supervisor: str, exits: Mapping[str, Exit]) -> None:
        """Have those be gone whose processes ended: the *supervisor* knows that before their lease is over."""
        for each in [each for each in self._members.values() if exits and each.registration.supervisor == supervisor]:
            if any(is_exit_of(exits, one) for one in each.services):
                self.leave(each.id)
        self._losses.record_exits(supervisor, exits)

    def _names(self) -> set[str]:
        return {HEAD_NODE_ID, *(each.name for each in (*self._own, *self.services)), *self.expected_servers}

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
        return leaving | find_draining([*self], self._clock())

    @property
    def lost_nodes(self) -> list[LostNode]:
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

    def _live_nodes(self) -> dict[str, Node]:
        now = self._clock()
        if self._awake is not None and now - self._awake > CLOCK_LATE_SECONDS * self.lease:
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
            raise RequestRejected(
                409, f"a server may not be called {service.name!r}: that is a key of the configuration"
            )
        others = [*self._own, *(each for member in self if member.id != but for each in member.services)]
        for other in others:
            if other.name == service.name and _service_identity(other) != _service_identity(service):
                there, here = "/".join(_service_identity(other)), "/".join(_service_identity(service))
                raise RequestRejected(
                    409, f"{service.name!r} is {there} here, and cannot be {here}; give it another name"
                )
        if [each.id for each in (*others, *beside)].count(service.id) > 1:
            raise RequestRejected(409, f"the id {service.id} of {service.name!r} is another instance's; start it anew")


def _service_identity(service: Service) -> tuple[str, str]:
    return service.kind, service.implementation


def check_services(services: Sequence[Service], address: str, *, own: str, scheme: str) -> None:
    """Refuse a node at *address* whose *services* nobody else would reach, or whom a token would be told in the clear.

    The head was asked at its *own* address, by *scheme*. Raises `Refused`.
    """
    for each in services:
        if is_loopback(each.host) and not is_loopback(address) and address != own:
            nowhere = f"{each.name!r} listens at {each.host}, where only the machine {address} reaches it"
            raise RequestRejected(
                422, f"{nowhere}; serve it with --host 0.0.0.0, or tell where it is with --advertise-host"
            )
        if scheme == "https" and each.scheme != "https":
            plain = (
                f"{each.name!r} speaks plain HTTP, and this head TLS: its clients would send their token in the clear"
            )
            raise RequestRejected(422, f"{plain}; serve it with --tls-cert and --tls-key")
