"""Serve each server in its own supervised process; all ports are bound before the first process starts."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from gymsdk import credentials
from gymsdk.config.model import Deployment, ServerConfig, Times
from gymsdk.deploy.child import HEAD_SERVER
from gymsdk.deploy.node import Node
from gymsdk.deploy.plan import find_socket
from gymsdk.deploy.runner import BackgroundTask
from gymsdk.deploy.supervisor import ProcessSpec, Supervisor
from gymsdk.errors import GymsdkError
from gymsdk.http import tls
from gymsdk.servers.auth import Security
from gymsdk.servers.listener import bind_socket, socket_host, socket_port
from gymsdk.servers.reports import HEAD_NODE_ID, Service, build_url, check_status

MAX_START_ATTEMPTS = 3
"""How often a server may exit before it is ready for the first time."""

POLL_SECONDS = 0.05
"""Seconds between two requests to a server that does not answer yet."""


@dataclass(frozen=True, slots=True)
class SeparateServers:
    """Running servers and their supervisor."""

    head_url: str
    services: tuple[Service, ...]
    supervisor: Supervisor
    task: asyncio.Future[None] = field(repr=False)

    async def wait_for_end(self) -> None:
        """Wait until the servers end; raises `GymsdkError` if a server cannot be restarted."""
        await asyncio.shield(self.task)


@dataclass(frozen=True, slots=True)
class Sockets:
    """The bound sockets: that of the *head*, unless the head at *head_url* is another's, and those of the *servers*."""

    head_url: str
    head: socket.socket | None
    servers: Mapping[str, socket.socket]

    @property
    def by_name(self) -> dict[str, socket.socket]:
        """All sockets by name, the head's first."""
        return ({HEAD_NODE_ID: self.head} if self.head else {}) | dict(self.servers)


@asynccontextmanager
async def serve_separately(
    blocks: Sequence[ServerConfig],
    *,
    deployment: Deployment,
    sockets: Mapping[str, socket.socket],
    security: Security,
    prefix_lines: bool = True,
) -> AsyncIterator[SeparateServers]:
    """Serve each of *blocks* in its own process while the context is open, with a head unless there is one already.

    Args:
        blocks: The servers to run here.
        deployment: The deployment with all its servers; each process receives it on standard input (`deploy.child`).
        sockets: Sockets that are bound already, by the name of the server; `head_server` is the head.
        security: The security settings.
        prefix_lines: Whether to put the name of its server in front of each line of the output.

    Raises:
        UsageError: A port is not available.
        GymsdkError: A server does not start.
    """
    with ExitStack() as stack:
        sockets_by_role = bind_sockets(blocks, deployment, sockets, security, stack)
        ended = asyncio.Event()
        supervisor = Supervisor(
            _build_process_specs(sockets_by_role, deployment),
            seconds=compute_stop_seconds(deployment.times),
            last=HEAD_NODE_ID,
            prefix_lines=prefix_lines,
            ended=ended.set,
        )
        node = build_node(sockets_by_role, supervisor, deployment, security, ended)
        services = tuple(
            build_service(each, sockets_by_role.servers[each.name], deployment, security) for each in blocks
        )
        running = asyncio.ensure_future(supervisor.run())
        beating = BackgroundTask(node.description, node.run)
        try:
            await _wait_until_ready(running, sockets_by_role.by_name, supervisor, beating, deployment.times, security)
            # Sent again now that the processes run: the head learns which of them it can have restarted.
            await node.send_heartbeats()
            yield SeparateServers(sockets_by_role.head_url, services, supervisor, running)
        finally:
            await beating.stop(deployment.times.ending)
            running.cancel()
            await asyncio.wait({running})
    if not running.cancelled():
        running.result()


def bind_sockets(
    blocks: Sequence[ServerConfig],
    deployment: Deployment,
    bound: Mapping[str, socket.socket],
    security: Security,
    stack: ExitStack,
) -> Sockets:
    """Bind the sockets of all servers, and trust the servers' own certificate, while *stack* is open."""
    head: socket.socket | None = None
    head_url = deployment.head_url or ""
    if not head_url:
        head = bound.get(HEAD_SERVER) or bind_socket(deployment.host, deployment.port, what="the head")
        stack.enter_context(head)
        head_url = build_url(socket_host(head, deployment.host), socket_port(head), security.scheme)
    servers: dict[str, socket.socket] = {}
    for each in blocks:
        at = find_socket(each, deployment, bound)
        at = at or bind_socket(each.host or deployment.host, each.port or 0, what=each.name)
        servers[each.name] = stack.enter_context(at)
    sockets_by_role = Sockets(head_url, head, servers)
    if security.tls is not None:
        # The names in the certificate need not include the address by which this process reaches its servers.
        for one in sockets_by_role.by_name.values():
            stack.enter_context(tls.trust_own_certificate(one.getsockname()[0], security.tls.certificate))
    return sockets_by_role


def _build_process_specs(sockets_by_role: Sockets, deployment: Deployment) -> list[ProcessSpec]:
    def build_spec(name: str, only: str, at: socket.socket, head_url: str | None) -> ProcessSpec:
        command = [sys.executable, "-m", "gymsdk", "serve", "--only", only, "--fd", str(at.fileno())]
        # The head of a child is decided: `head_url`, or the child itself.
        child = deployment.model_copy(update={"only": only, "head_url": head_url, "head_host": None})
        return ProcessSpec(name, command, at, child.dump_for_child(), max_start_attempts=MAX_START_ATTEMPTS)

    head = [build_spec(HEAD_NODE_ID, HEAD_SERVER, sockets_by_role.head, None)] if sockets_by_role.head else []
    return [
        *head,
        *(build_spec(name, name, at, sockets_by_role.head_url) for name, at in sockets_by_role.servers.items()),
    ]


def build_node(
    sockets_by_role: Sockets, supervisor: Supervisor, deployment: Deployment, security: Security, wake: asyncio.Event
) -> Node:
    """Return the node that reports exits to the head, and restarts servers at the head's request."""
    return Node(
        sockets_by_role.head_url,
        expected=list(sockets_by_role.servers),
        exits=lambda: dict(supervisor.exits),
        restart=supervisor.restart,
        restarts=supervisor.pids,
        headers=partial(credentials.build_auth_headers, security.token),
        supervisor=deployment.supervisor,
        wake=wake,
    )


def build_service(block: ServerConfig, at: socket.socket, deployment: Deployment, security: Security) -> Service:
    host = block.advertise_host or deployment.advertise_host or block.host or deployment.host
    return Service(
        name=block.name,
        kind=block.kind,
        implementation=block.implementation,
        host=host,
        port=socket_port(at),
        scheme=security.scheme,
    )


async def _wait_until_ready(
    running: asyncio.Future[None],
    sockets: Mapping[str, socket.socket],
    supervisor: Supervisor,
    beating: BackgroundTask,
    times: Times,
    security: Security,
) -> None:
    """Wait until every server answers and the head knows all; raises the supervisor's error if it ends before."""
    rising = asyncio.ensure_future(_wait_for_all(sockets, supervisor, beating, times, security))
    await asyncio.wait({running, rising}, return_when="FIRST_COMPLETED")
    if running.done():
        rising.cancel()
        await asyncio.wait({rising})
        running.result()
        raise GymsdkError("the servers ended while they started; their output says why")
    rising.result()


async def _wait_for_all(
    sockets: Mapping[str, socket.socket],
    supervisor: Supervisor,
    beating: BackgroundTask,
    times: Times,
    security: Security,
) -> None:
    async def rise(name: str, at: socket.socket) -> None:
        await wait_for_answer(at, times.starting, security)
        supervisor.mark_ready(name)

    rising = [asyncio.ensure_future(rise(name, at)) for name, at in sockets.items()]
    rising.append(asyncio.ensure_future(beating.wait_until_up(times.starting)))
    try:
        await asyncio.gather(*rising)
    finally:
        for each in rising:
            each.cancel()


async def wait_for_answer(at: socket.socket, seconds: float, security: Security) -> None:
    headers = credentials.build_auth_headers(security.token)
    host, port = at.getsockname()[:2]
    clock = asyncio.get_running_loop().time
    until = clock() + seconds
    while (left := until - clock()) > 0:
        status = await check_status(host, port, security.scheme, path="/readyz", seconds=left, headers=headers)
        if status == "success":
            return
        await asyncio.sleep(POLL_SECONDS)
    raise GymsdkError(
        f"the server at {build_url(host, port, security.scheme)} did not answer within {seconds:g} seconds"
    )


def compute_stop_seconds(times: Times) -> float:
    """Return the seconds that a server may take to stop: the sum of the time limits of its stages."""
    return times.grace + 2 * times.ending + 3.0
