"""Separate servers: each in a process of its own, supervised, at a port that is bound before any of them is told of."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from gymsdk import credentials, trust
from gymsdk.configuration.deployment import Block
from gymsdk.errors import GymsdkError
from gymsdk.hosting import Options, socket_of
from gymsdk.servers.door.listener import bound, host_of, port_of
from gymsdk.servers.door.safety import Safety
from gymsdk.servers.nodes.fleet import Times
from gymsdk.servers.nodes.node import Node
from gymsdk.servers.nodes.reports import ITSELF
from gymsdk.servers.nodes.service import Service, url
from gymsdk.servers.nodes.strand import Strand
from gymsdk.servers.watching.health import status
from gymsdk.supervisor import Charge, Supervisor

TRIES = 3
"""How often a server may end before it has answered once."""

LOOKING = 0.05
"""Seconds between two looks whether a server is there that listens, and does not answer yet."""


@dataclass(frozen=True, slots=True)
class Apart:
    """Supervised servers that answer, and what runs them."""

    head_url: str
    services: tuple[Service, ...]
    supervisor: Supervisor
    task: asyncio.Future[None] = field(repr=False)

    async def ended(self) -> None:
        """Wait for as long as they run; raises `GymsdkError` where one of them cannot be started again."""
        await asyncio.shield(self.task)


@dataclass(frozen=True, slots=True)
class Places:
    """What all listen at: the *head*, unless that is another's at *head_url*, and the *servers* by name."""

    head_url: str
    head: socket.socket | None
    servers: Mapping[str, socket.socket]

    @property
    def named(self) -> dict[str, socket.socket]:
        """All of them, the head first."""
        return ({ITSELF: self.head} if self.head else {}) | dict(self.servers)


@asynccontextmanager
async def separated(
    blocks: Sequence[Block],
    words: Sequence[str],
    *,
    options: Options,
    safety: Safety,
    handed: bytes = b"",
    bare: bool = False,
) -> AsyncIterator[Apart]:
    """Serve *blocks* in a process each for as long as the context is open, with a head unless *options* name one.

    A process is started by *words*, and told which server it is, at which socket, and where the head is; the rest is
    *handed* down to it, where nobody else reads it. What they write has their names before it, unless that is to be
    *bare*. Raises `UsageError` where a port is not to be had, `GymsdkError` where a server does not start.
    """
    with ExitStack() as sockets:
        places = _places(blocks, options, safety, sockets)
        ended = asyncio.Event()
        supervisor = Supervisor(
            _charges(places, words, handed),
            seconds=_patience(options.times),
            last=ITSELF,
            bare=bare,
            ended=ended.set,
        )
        node = _node(places, supervisor, options, safety, ended)
        services = tuple(_service(each, places.servers[each.name], options, safety) for each in blocks)
        running = asyncio.ensure_future(supervisor.run())
        beating = Strand(node.what, node.run)
        try:
            await _up(running, places.named, supervisor, beating, options.times, safety)
            # It first spoke before they ran: now it can say which of them it could start anew.
            await node.beat()
            yield Apart(places.head_url, services, supervisor, running)
        finally:
            await beating.end(options.times.ending)
            running.cancel()
            await asyncio.wait({running})
    if not running.cancelled():
        running.result()


def _places(blocks: Sequence[Block], options: Options, safety: Safety, sockets: ExitStack) -> Places:
    """Bind what all listen at, for as long as *sockets* are open, and trust what answers there."""
    at = None if options.head else sockets.enter_context(_head(options))
    head_url = options.head or (url(host_of(at, options.host), port_of(at), safety.scheme) if at else "")
    places = Places(head_url, at, {each.name: sockets.enter_context(_socket(each, options)) for each in blocks})
    if safety.tls is not None:
        # Its servers are what this process speaks to, whoever their certificate is for.
        for one in places.named.values():
            sockets.enter_context(trust.answering(one.getsockname()[0], safety.tls.certificate))
    return places


def _head(options: Options) -> socket.socket:
    return options.sockets.get("head_server") or bound(options.host, options.port, what="the head")


def _socket(block: Block, options: Options) -> socket.socket:
    return socket_of(block, options) or bound(block.host or options.host, block.port or 0, what=block.name)


def _charges(places: Places, words: Sequence[str], handed: bytes) -> list[Charge]:
    def charge(name: str, words: Sequence[str], at: socket.socket, only: str) -> Charge:
        whole = [sys.executable, "-m", "gymsdk", *words, "--only", only, "--fd", str(at.fileno())]
        return Charge(name, whole, at, handed, tries=TRIES)

    head = [charge(ITSELF, words, places.head, "head_server")] if places.head else []
    beside = [*words, "--head", places.head_url]
    return [*head, *(charge(name, beside, at, name) for name, at in places.servers.items())]


def _node(places: Places, supervisor: Supervisor, options: Options, safety: Safety, news: asyncio.Event) -> Node:
    """Give what tells the head how the processes of *supervisor* end, and restarts them when it says so."""
    return Node(
        places.head_url,
        expected=list(places.servers),
        exits=lambda: dict(supervisor.exits),
        restart=supervisor.restart,
        restarts=supervisor.pids,
        headers=partial(credentials.headers, safety.token),
        supervisor=options.supervisor,
        news=news,
    )


def _service(block: Block, at: socket.socket, options: Options, safety: Safety) -> Service:
    host = block.advertise_host or options.advertise_host or block.host or options.host
    return Service(
        name=block.name,
        kind=block.kind,
        implementation=block.implementation,
        host=host,
        port=port_of(at),
        scheme=safety.scheme,
    )


async def _up(
    running: asyncio.Future[None],
    sockets: Mapping[str, socket.socket],
    supervisor: Supervisor,
    beating: Strand,
    times: Times,
    safety: Safety,
) -> None:
    """Wait until every server answers and the head knows of all; raises what *running* ends with before."""
    rising = asyncio.ensure_future(_risen(sockets, supervisor, beating, times, safety))
    await asyncio.wait({running, rising}, return_when="FIRST_COMPLETED")
    if running.done():
        rising.cancel()
        await asyncio.wait({rising})
        running.result()
        raise GymsdkError("the servers ended as they began; what they wrote says why")
    rising.result()


async def _risen(
    sockets: Mapping[str, socket.socket], supervisor: Supervisor, beating: Strand, times: Times, safety: Safety
) -> None:
    async def rise(name: str, at: socket.socket) -> None:
        await _answers(at, times.starting, safety)
        supervisor.ready(name)

    rising = [asyncio.ensure_future(rise(name, at)) for name, at in sockets.items()]
    rising.append(asyncio.ensure_future(beating.up(times.starting)))
    try:
        await asyncio.gather(*rising)
    finally:
        for each in rising:
            each.cancel()


async def _answers(at: socket.socket, seconds: float, safety: Safety) -> None:
    headers = credentials.headers(safety.token)
    host, port = at.getsockname()[:2]
    clock = asyncio.get_running_loop().time
    until = clock() + seconds
    while (left := until - clock()) > 0:
        told = await status(host, port, safety.scheme, path="/readyz", seconds=left, headers=headers)
        if told == "success":
            return
        await asyncio.sleep(LOOKING)
    raise GymsdkError(f"what is to answer at {url(host, port, safety.scheme)} does not within {seconds:g} seconds")


def _patience(times: Times) -> float:
    """Seconds that a server may take to end: what its own bounds come to."""
    return times.grace + 2 * times.ending + 3.0
