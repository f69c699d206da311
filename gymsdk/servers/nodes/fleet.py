"""A fleet: a head and the servers it tells of, on one event loop, which come up and end together."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gymsdk import credentials
from gymsdk.bounds import GRACE
from gymsdk.descriptors import raise_limit
from gymsdk.errors import GymsdkError
from gymsdk.servers import head
from gymsdk.servers.door.listener import Listener, bound, host_of, port_of
from gymsdk.servers.door.prefix import beneath
from gymsdk.servers.door.routing import App
from gymsdk.servers.door.safety import OPEN, Safety
from gymsdk.servers.nodes.members import Members
from gymsdk.servers.nodes.node import Node
from gymsdk.servers.nodes.reports import LEASE, Load
from gymsdk.servers.nodes.service import Scheme, Service, url
from gymsdk.servers.nodes.strand import Pulse, Strand, in_thread
from gymsdk.servers.nodes.supply import Supply
from gymsdk.servers.watching.health import status
from gymsdk.transcript import Item

HEAD = "head_server"
"""The name of the head among the URLs that an app is made of."""


class Times(BaseModel):
    """Seconds: for the *starting*, for what is under way at the end (*grace*), for all that is then released."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    starting: float = Field(600.0, gt=0)
    grace: float = Field(3.0, ge=0)
    ending: float = Field(3.0, gt=0)


@dataclass(frozen=True, slots=True)
class Part:
    """One server to be: the service it is once it has a port, and its app, made of the URLs of all and of the head.

    It listens at *host*, or at the socket *at* that is there by now, and is told of at *advertise*, where they differ
    from the fleet's.
    """

    service: Service
    app: Callable[[Mapping[str, str]], App]
    host: str | None = None
    advertise: str | None = None
    at: socket.socket | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """How a fleet is known: by a head of its own, or to the one at *head_url*, as a node that joins it.

    Its servers are told of at the host *advertise*, if that is another than they listen at; *loads* says what they have
    to do, *expected* names the servers there are to be, if those are more than its own. Who joins a head, this fleet or
    others its own, is gone from it *lease* seconds after it was last heard of. The head listens at the socket *at*,
    where that is there by now. A head of its own begins here what *supplied* gives for the servers there are, and the
    names of those on their way. A proxy shows the head at *path*, and each server beneath that. *supervisor* is whose
    processes it is one of.
    """

    head_url: str | None = None
    advertise: str | None = None
    loads: Callable[[], Mapping[str, Load]] = dict
    lease: float = LEASE
    expected: Sequence[str] = ()
    at: socket.socket | None = None
    supplied: Callable[[Sequence[Service], Collection[str]], Sequence[Part]] = lambda _, __: ()
    path: str = ""
    supervisor: str = ""


class Fleet:
    """The servers *parts* and their head, which listens at *host* and *port*; *lasting* outlasts them all.

    *about* goes into the head's configuration, *safety* is that of each of them; *known* says where the head is, if it
    is elsewhere. `services`, `head_url` and, where it joins, `node` are there once it is up.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        host: str,
        port: int,
        lasting: Mapping[str, AbstractAsyncContextManager[Any]],
        about: Item,
        times: Times,
        safety: Safety = OPEN,
        known: Known | None = None,
    ) -> None:
        self._parts = [*parts]
        self._host = host
        self._port = port
        self._lasting = lasting
        self._about = about
        self._times = times
        self._safety = safety
        self._known = known or Known()
        self._up = asyncio.Event()
        self._strands: list[list[Strand]] = []
        self.services: list[Service] = []
        self.supplied: list[Service] = []
        self._members = Members(self.services, taken=about, lease=self._known.lease)
        self.head_url = ""
        self.node: Node | None = None

    async def up(self, running: asyncio.Task[None]) -> None:
        """Wait until all of them answer; raises what *running* ended with before."""
        rising = asyncio.ensure_future(self._up.wait())
        await asyncio.wait({running, rising}, return_when="FIRST_COMPLETED")
        rising.cancel()
        if running.done():
            running.result()

    async def run(self) -> None:
        """Run until cancelled; raises `UsageError` where a port is not to be had, `GymsdkError` where a part ends."""
        raise_limit()
        with ExitStack() as sockets:
            # All are bound before any is told of.
            elsewhere = self._known.head_url
            at = None if elsewhere else sockets.enter_context(self._known.at or self._bound("the head", self._port))
            ports = [sockets.enter_context(self._socket(each)) for each in self._parts]
            self.services += [self._placed(each, one) for each, one in zip(self._parts, ports, strict=True)]
            self.head_url = elsewhere or (url(host_of(at, self._host), port_of(at), self._safety.scheme) if at else "")
            try:
                await self._begin(at, ports)
                self._up.set()
                await self._last()
            finally:
                self._up.clear()
                await self._end()

    def _placed(self, part: Part, at: socket.socket) -> Service:
        told = {"host": self._told(part), "port": port_of(at), "scheme": self._safety.scheme}
        return part.service.model_copy(update=told)

    def _socket(self, part: Part) -> socket.socket:
        return part.at or self._bound(part.service.name, part.service.port, part.host)

    def _bound(self, name: str, port: int, host: str | None = None) -> socket.socket:
        return bound(self._host if host is None else host, port, what=name)

    def _told(self, part: Part) -> str:
        return part.advertise or self._known.advertise or part.host or self._host

    async def _begin(self, at: socket.socket | None, ports: Sequence[socket.socket]) -> None:
        if at is not None:
            members = Strand("what the head knows of nodes", self._members.run)
            await self._started([self._listening("the head", self._head(at), at), members])
        # First, and each in a task of its own: what the servers share outlasts them, wherever it began.
        await self._started([Strand(what, partial(_kept, each)) for what, each in self._lasting.items()])
        urls = self._urls()
        await self._started(
            [
                self._listening(f"the server {part.service.name!r}", part.app(urls), one, part)
                for part, one in zip(self._parts, ports, strict=True)
            ]
        )
        await self._asked()
        if at is not None:
            times = {"starting": self._times.starting, "patience": self._times.grace + GRACE}
            supply = Supply(self.services, self._members, self._known.supplied, self._begun, **times)
            await self._started([Strand("what the head supplies", supply.run)])
        else:
            # Last, so that it is the first to end: nobody is sent to servers that are about to.
            carried, pulse = partial(credentials.carried, self._safety.token), Pulse()
            self.node = Node(
                self.head_url,
                self.services,
                self._known.loads,
                expected=self._known.expected,
                headers=carried,
                lease=self._known.lease,
                supervisor=self._known.supervisor,
                alive=pulse.is_recent,
            )
            await self._started([Strand("the pulse of the event loop", pulse.run)])
            # However busy this loop is, the head hears of the node within its lease.
            await self._started([Strand(self.node.what, in_thread(self.node.run, "heartbeat"))])

    def _begun(self, part: Part) -> tuple[Strand, Callable[[], None]]:
        """Begin a server while the others run, and give what tells of it."""
        with ExitStack() as sockets:
            at = sockets.enter_context(self._socket(part))
            strand = self._listening(f"the server {part.service.name!r}", part.app(self._urls()), at, part)
            sockets.pop_all()
        return strand, partial(self._tell, part, at)

    def _tell(self, part: Part, at: socket.socket) -> None:
        self.supplied.append(self._placed(part, at))
        self._parts.append(part)
        self.services.append(self.supplied[-1])

    def _urls(self) -> dict[str, str]:
        return {HEAD: self.head_url} | {name: url(*near) for name, near in self._near().items()}

    def _head(self, at: socket.socket) -> App:
        return head.app(
            self.services,
            host=self._known.advertise or host_of(at, self._host),
            port=port_of(at),
            about=self._about,
            ready=self._up.is_set,
            members=self._members,
            supplied=self.supplied,
            loads=self._known.loads,
            expected=[*(self._known.expected or (each.service.name for each in self._parts))],
        )

    def _near(self) -> dict[str, tuple[str, int, Scheme]]:
        """Give where this process reaches its servers, wherever others do."""
        return {
            service.name: (self._host if part.host is None else part.host, service.port, service.scheme)
            for part, service in zip(self._parts, self.services, strict=True)
        }

    def _listening(self, what: str, app: App, at: socket.socket, part: Part | None = None) -> Strand:
        host = part.host if part and part.host is not None else self._host
        also = [name for name in (part.advertise if part else None, self._known.advertise) if name]
        path = beneath(self._known.path, part.service.name if part else None)
        listener = Listener(app, at, grace=self._times.grace, host=host, also=also, safety=self._safety, path=path)
        return Strand(what, listener.run)

    async def _started(self, strands: list[Strand]) -> None:
        self._strands.append(strands)
        await asyncio.gather(*(each.up(self._times.starting) for each in strands))

    async def _asked(self) -> None:
        """Have each server say over its socket that it can be used."""
        # No shorter than a start may take: while an environment warms up, a loop may have no time for an answer.
        ready = partial(
            status,
            path="/readyz",
            seconds=self._times.starting,
            headers=credentials.headers(self._safety.token),
        )
        answers = await asyncio.gather(*(ready(*near) for near in self._near().values()))
        for service, said in zip(self.services, answers, strict=True):
            if said != "success":
                raise GymsdkError(f"the server {service.name!r} at {service.url} does not answer ({said})")

    async def _last(self) -> None:
        strands = {each.task: each for group in self._strands for each in group}
        ended, _ = await asyncio.wait(strands, return_when="FIRST_COMPLETED")
        raise strands[ended.pop()].broken()

    async def _end(self) -> None:
        """End what began last first: the servers, what they share, the head."""
        for group in reversed(self._strands):
            await asyncio.gather(*(each.end(self._patience(each)) for each in group))

    def _patience(self, strand: Strand) -> float:
        if strand.what in self._lasting:
            return self._times.ending
        return self._times.grace + GRACE + self._times.ending


async def _kept(lasting: AbstractAsyncContextManager[Any], up: asyncio.Event, over: asyncio.Event) -> None:
    async with lasting:
        up.set()
        await over.wait()
