"""A fleet: a head and the servers it tells of, on one event loop, which come up and end together."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from gymsdk import credentials
from gymsdk.deadlines import CANCEL_GRACE_SECONDS
from gymsdk.deploy.node import Node
from gymsdk.descriptors import raise_open_file_limit
from gymsdk.errors import GymsdkError
from gymsdk.observability.health import check_status
from gymsdk.servers import head
from gymsdk.servers.auth import NO_SECURITY, Security
from gymsdk.servers.listener import Listener, bind_socket, socket_host, socket_port
from gymsdk.servers.middleware import server_prefix
from gymsdk.servers.registry import NodeRegistry
from gymsdk.servers.reports import LEASE_SECONDS, Load
from gymsdk.servers.routing import App
from gymsdk.servers.service import Scheme, Service, build_url
from gymsdk.types import Item

Work: TypeAlias = Callable[[asyncio.Event, asyncio.Event], Coroutine[Any, Any, None]]
"""What runs: it sets the first event once it is up, and ends when the second is set."""

BLOCKED_SECONDS = 60.0
"""Seconds without a turn after which an event loop counts as blocked, and not only as busy."""

log = logging.getLogger("gymsdk")


class Strand:
    """*work* in a task of its own, as *what* it is called."""

    def __init__(self, what: str, work: Work) -> None:
        self.what = what
        self._up = asyncio.Event()
        self._over = asyncio.Event()
        self._told = False
        self.task = asyncio.ensure_future(work(self._up, self._over))

    async def up(self, seconds: float) -> None:
        """Wait until it is up; raises `GymsdkError` where it is not within *seconds*, or ends before it is."""
        risen = asyncio.ensure_future(self._up.wait())
        await asyncio.wait({self.task, risen}, timeout=seconds, return_when="FIRST_COMPLETED")
        risen.cancel()
        if self.task.done():
            raise self.broken()
        if not self._up.is_set():
            raise GymsdkError(f"{self.what} did not begin within {seconds:g} seconds; mend what it waits for")

    def broken(self) -> GymsdkError:
        """Give what to raise where it has ended by itself; whoever raises it tells of it."""
        self._told = True
        error = None if self.task.cancelled() else self.task.exception()
        if isinstance(error, GymsdkError):
            return error
        return GymsdkError(f"{self.what} ended by itself{f': {error}' if error else ''}")

    async def end(self, seconds: float) -> None:
        """Have it end within *seconds*; where it does not it is cancelled, and left behind where that does not help."""
        self._over.set()
        await asyncio.wait({self.task}, timeout=seconds)
        if not self.task.done():
            log.warning("%s did not end within %g seconds, and is left behind", self.what, seconds)
            self.task.cancel()
            await asyncio.wait({self.task}, timeout=CANCEL_GRACE_SECONDS)
            return
        if not self._told and not self.task.cancelled() and (error := self.task.exception()):
            log.warning("%s did not end well: %r", self.what, error)


def in_thread(work: Work, name: str) -> Work:
    """Return *work* as one that runs in its own thread, on its own event loop.

    Use it for what must happen in time however busy the caller's event loop is, such as heartbeats. Setting the second
    event ends the work, and cancelling the returned work cancels it.

    Args:
        work: What runs. It must not use anything that belongs to the caller's event loop.
        name: The name of the thread.
    """

    async def run(up: asyncio.Event, over: asyncio.Event) -> None:
        here, there = asyncio.get_running_loop(), asyncio.new_event_loop()
        there_over = asyncio.Event()
        task = there.create_task(_reporting(work, partial(_call, here, up.set), there_over))
        ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        target = partial(contextvars.copy_context().run, _run, there, task, ended)
        threading.Thread(target=target, name=name, daemon=True).start()
        waiting: asyncio.Future[Any] = asyncio.wrap_future(ended)
        ending: asyncio.Future[Any] = asyncio.ensure_future(over.wait())
        try:
            await asyncio.wait([waiting, ending], return_when="FIRST_COMPLETED")
            _call(there, there_over.set)
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            _call(there, task.cancel)
            raise
        finally:
            ending.cancel()

    return run


class Pulse:
    """Tells other threads whether this event loop still runs: a blocked one answers nobody, and may never again."""

    def __init__(self, limit: float = BLOCKED_SECONDS) -> None:
        self._limit = limit
        self._at = time.monotonic()

    def is_recent(self) -> bool:
        """Return whether the event loop has run within the limit."""
        return time.monotonic() - self._at < self._limit

    async def run(self, up: asyncio.Event, over: asyncio.Event) -> None:
        """Note each second that the event loop runs, until it is *over*."""
        up.set()
        while not over.is_set():
            self._at = time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await over.wait()


async def _reporting(work: Work, risen: Callable[[], None], over: asyncio.Event) -> None:
    """Run *work*, and call *risen* once it is up."""
    up = asyncio.Event()

    async def report() -> None:
        await up.wait()
        risen()

    reporting = asyncio.ensure_future(report())
    try:
        await work(up, over)
    finally:
        reporting.cancel()


def _run(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None], ended: concurrent.futures.Future[None]) -> None:
    """Run *task* on *loop* in this thread, close the loop, and report how the task ended."""
    try:
        try:
            loop.run_until_complete(task)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
    except BaseException as error:  # noqa: BLE001 - whoever waits in the other thread raises it
        ended.set_exception(error)
    else:
        ended.set_result(None)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    # A loop that has been closed needs no news.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


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


class Supply(Generic[P]):
    """What *wanted* gives for the servers *own* and those of *members*, made by *begun* into a server that runs.

    It is told, too, the names of those that members say are to be there. *begun* gives what runs, and what tells of it
    once it is up, *starting* seconds later at most; one that does not come up is told of once, and not tried again.
    Each ends within *patience* seconds.
    """

    def __init__(
        self,
        own: Sequence[Service],
        members: NodeRegistry,
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
    lease: float = LEASE_SECONDS
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
        safety: Security = NO_SECURITY,
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
        self._members = NodeRegistry(self.services, taken=about, lease=self._known.lease)
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
        raise_open_file_limit()
        with ExitStack() as sockets:
            # All are bound before any is told of.
            elsewhere = self._known.head_url
            at = None if elsewhere else sockets.enter_context(self._known.at or self._bound("the head", self._port))
            ports = [sockets.enter_context(self._socket(each)) for each in self._parts]
            self.services += [self._placed(each, one) for each, one in zip(self._parts, ports, strict=True)]
            self.head_url = elsewhere or (
                build_url(socket_host(at, self._host), socket_port(at), self._safety.scheme) if at else ""
            )
            try:
                await self._begin(at, ports)
                self._up.set()
                await self._last()
            finally:
                self._up.clear()
                await self._end()

    def _placed(self, part: Part, at: socket.socket) -> Service:
        told = {"host": self._told(part), "port": socket_port(at), "scheme": self._safety.scheme}
        return part.service.model_copy(update=told)

    def _socket(self, part: Part) -> socket.socket:
        return part.at or self._bound(part.service.name, part.service.port, part.host)

    def _bound(self, name: str, port: int, host: str | None = None) -> socket.socket:
        return bind_socket(self._host if host is None else host, port, what=name)

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
            times = {"starting": self._times.starting, "patience": self._times.grace + CANCEL_GRACE_SECONDS}
            supply = Supply(self.services, self._members, self._known.supplied, self._begun, **times)
            await self._started([Strand("what the head supplies", supply.run)])
        else:
            # Last, so that it is the first to end: nobody is sent to servers that are about to.
            carried, pulse = partial(credentials.resolve_auth_headers, self._safety.token), Pulse()
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
        return {HEAD: self.head_url} | {name: build_url(*near) for name, near in self._near().items()}

    def _head(self, at: socket.socket) -> App:
        return head.create_app(
            self.services,
            host=self._known.advertise or socket_host(at, self._host),
            port=socket_port(at),
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
        path = server_prefix(self._known.path, part.service.name if part else None)
        listener = Listener(app, at, grace=self._times.grace, host=host, also=also, safety=self._safety, path=path)
        return Strand(what, listener.run)

    async def _started(self, strands: list[Strand]) -> None:
        self._strands.append(strands)
        await asyncio.gather(*(each.up(self._times.starting) for each in strands))

    async def _asked(self) -> None:
        """Have each server say over its socket that it can be used."""
        # No shorter than a start may take: while an environment warms up, a loop may have no time for an answer.
        ready = partial(
            check_status,
            path="/readyz",
            seconds=self._times.starting,
            headers=credentials.build_auth_headers(self._safety.token),
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
        return self._times.grace + CANCEL_GRACE_SECONDS + self._times.ending


async def _kept(lasting: AbstractAsyncContextManager[Any], up: asyncio.Event, over: asyncio.Event) -> None:
    async with lasting:
        up.set()
        await over.wait()
