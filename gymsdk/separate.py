"""Separate servers: each in a process of its own, supervised, at a port that is bound before any of them is told of."""

from __future__ import annotations

import asyncio
import secrets
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
from gymsdk.launch import SUPERVISOR
from gymsdk.servers.door.listener import bound, host_of, port_of
from gymsdk.servers.door.safety import Safety
from gymsdk.servers.nodes.fleet import Times
from gymsdk.servers.nodes.node import Node
from gymsdk.servers.nodes.reports import ITSELF, Exit
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


@asynccontextmanager
async def separated(
    blocks: Sequence[Block],
    words: Sequence[str],
    *,
    options: Options,
    safety: Safety,
    environment: Mapping[str, str] | None = None,
    bare: bool = False,
) -> AsyncIterator[Apart]:
    """Serve *blocks* in a process each for as long as the context is open, with a head unless *options* name one.

    A process is started by *words*, and told which server it is, at which socket, and where the head is; *environment*
    adds to its variables. What they write has their names before it, unless that is to be *bare*. Raises `UsageError`
    where a port is not to be had, `GymsdkError` where a server does not start.
    """
    with ExitStack() as sockets:
        at = None if options.head else sockets.enter_context(_head(options))
        head_url = options.head or (url(host_of(at, options.host), port_of(at), safety.scheme) if at else "")
        places = {each.name: sockets.enter_context(_socket(each, options)) for each in blocks}
        supervisor_id = secrets.token_hex(8)
        variables = {**(environment or {}), SUPERVISOR: supervisor_id}
        charges = [_charge(ITSELF, words, at, "head_server", variables)] if at else []
        charges += [_charge(name, [*words, "--head", head_url], one, name, variables) for name, one in places.items()]
        if safety.tls is not None:
            # Its servers are what this process speaks to, whoever their certificate is for.
            for one in [*([at] if at else []), *places.values()]:
                sockets.enter_context(trust.answering(one.getsockname()[0], safety.tls.certificate))
        ended = asyncio.Event()
        patience = _patience(options.times)
        supervisor = Supervisor(charges, seconds=patience, last=ITSELF, bare=bare, ended=ended.set)
        services = tuple(_service(each, places[each.name], options, safety) for each in blocks)
        node = Node(
            head_url,
            expected=list(places),
            exits=lambda: {name: _exit(supervisor, name) for name in supervisor.exits},
            restart=supervisor.restart,
            restarts=supervisor.pids,
            headers=partial(credentials.headers, safety.token),
            supervisor=supervisor_id,
            news=ended,
        )
        running = asyncio.ensure_future(supervisor.run())
        beating = Strand(node.what, node.run)
        try:
            named = ({ITSELF: at} if at else {}) | places
            await _up(running, named, supervisor, beating, options.times, safety)
            # It first spoke before they ran: now it can say which of them it could start anew.
            await node.beat()
            yield Apart(head_url, services, supervisor, running)
        finally:
            await beating.end(options.times.ending)
            running.cancel()
            await asyncio.wait({running})
    if not running.cancelled():
        running.result()


def _head(options: Options) -> socket.socket:
    return options.sockets.get("head_server") or bound(options.host, options.port, what="the head")


def _socket(block: Block, options: Options) -> socket.socket:
    return socket_of(block, options) or bound(block.host or options.host, block.port or 0, what=block.name)


def _charge(name: str, words: Sequence[str], at: socket.socket, only: str, environment: Mapping[str, str]) -> Charge:
    file = str(at.fileno())
    return Charge(
        name, [sys.executable, "-m", "gymsdk", *words, "--only", only, "--fd", file], at, environment, tries=TRIES
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


def _exit(supervisor: Supervisor, name: str) -> Exit:
    ended = supervisor.exits[name]
    return Exit(code=ended.code, at=ended.at, restarts=ended.restarts, pid=ended.pid)


def _patience(times: Times) -> float:
    """Seconds that a server may take to end: what its own bounds come to."""
    return times.grace + 2 * times.ending + 3.0
