"""Separate servers: each in a process of its own, supervised, at a port that is bound before any of them is told of."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from gymsdk import credentials
from gymsdk.config.model import ServerConfig
from gymsdk.deploy.node import Node
from gymsdk.deploy.plan import Options, socket_of
from gymsdk.deploy.runner import Strand, Times
from gymsdk.deploy.supervisor import Charge, Supervisor
from gymsdk.errors import GymsdkError
from gymsdk.http import tls
from gymsdk.observability.health import check_status
from gymsdk.servers.auth import Security
from gymsdk.servers.listener import bind_socket, socket_host, socket_port
from gymsdk.servers.reports import HEAD_NODE_ID
from gymsdk.servers.service import Service, build_url

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
        return ({HEAD_NODE_ID: self.head} if self.head else {}) | dict(self.servers)


@asynccontextmanager
async def separated(
    blocks: Sequence[ServerConfig],
    words: Sequence[str],
    *,
    options: Options,
    safety: Security,
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
            last=HEAD_NODE_ID,
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


def _places(blocks: Sequence[ServerConfig], options: Options, safety: Security, sockets: ExitStack) -> Places:
    """Bind what all listen at, for as long as *sockets* are open, and trust what answers there."""
    at = None if options.head else sockets.enter_context(_head(options))
    head_url = options.head or (build_url(socket_host(at, options.host), socket_port(at), safety.scheme) if at else "")
    places = Places(head_url, at, {each.name: sockets.enter_context(_socket(each, options)) for each in blocks})
    if safety.tls is not None:
        # Its servers are what this process speaks to, whoever their certificate is for.
        for one in places.named.values():
            sockets.enter_context(tls.trust_own_certificate(one.getsockname()[0], safety.tls.certificate))
    return places


def _head(options: Options) -> socket.socket:
    return options.sockets.get("head_server") or bind_socket(options.host, options.port, what="the head")


def _socket(block: ServerConfig, options: Options) -> socket.socket:
    return socket_of(block, options) or bind_socket(block.host or options.host, block.port or 0, what=block.name)


def _charges(places: Places, words: Sequence[str], handed: bytes) -> list[Charge]:
    def charge(name: str, words: Sequence[str], at: socket.socket, only: str) -> Charge:
        whole = [sys.executable, "-m", "gymsdk", *words, "--only", only, "--fd", str(at.fileno())]
        return Charge(name, whole, at, handed, tries=TRIES)

    head = [charge(HEAD_NODE_ID, words, places.head, "head_server")] if places.head else []
    beside = [*words, "--head", places.head_url]
    return [*head, *(charge(name, beside, at, name) for name, at in places.servers.items())]


def _node(places: Places, supervisor: Supervisor, options: Options, safety: Security, news: asyncio.Event) -> Node:
    """Give what tells the head how the processes of *supervisor* end, and restarts them when it says so."""
    return Node(
        places.head_url,
        expected=list(places.servers),
        exits=lambda: dict(supervisor.exits),
        restart=supervisor.restart,
        restarts=supervisor.pids,
        headers=partial(credentials.build_auth_headers, safety.token),
        supervisor=options.supervisor,
        news=news,
    )


def _service(block: ServerConfig, at: socket.socket, options: Options, safety: Security) -> Service:
    host = block.advertise_host or options.advertise_host or block.host or options.host
    return Service(
        name=block.name,
        kind=block.kind,
        implementation=block.implementation,
        host=host,
        port=socket_port(at),
        scheme=safety.scheme,
    )


async def _up(
    running: asyncio.Future[None],
    sockets: Mapping[str, socket.socket],
    supervisor: Supervisor,
    beating: Strand,
    times: Times,
    safety: Security,
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
    sockets: Mapping[str, socket.socket], supervisor: Supervisor, beating: Strand, times: Times, safety: Security
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


async def _answers(at: socket.socket, seconds: float, safety: Security) -> None:
    headers = credentials.build_auth_headers(safety.token)
    host, port = at.getsockname()[:2]
    clock = asyncio.get_running_loop().time
    until = clock() + seconds
    while (left := until - clock()) > 0:
        told = await check_status(host, port, safety.scheme, path="/readyz", seconds=left, headers=headers)
        if told == "success":
            return
        await asyncio.sleep(LOOKING)
    raise GymsdkError(
        f"what is to answer at {build_url(host, port, safety.scheme)} does not within {seconds:g} seconds"
    )


def _patience(times: Times) -> float:
    """Seconds that a server may take to end: what its own bounds come to."""
    return times.grace + 2 * times.ending + 3.0
