"""Serve all servers in several worker processes behind the same ports."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from gymsdk.cluster.reports import HEAD_NODE_ID
from gymsdk.cluster.shared_memory import create_shared_file
from gymsdk.config.model import WORKER_PREFIX, Deployment, Limits, ServerConfig, WorkerConfig
from gymsdk.deploy.distributor import ConnectionDistributor, WorkerChannel
from gymsdk.deploy.supervised import (
    Sockets,
    SupervisedServers,
    WaitUntilReady,
    bind_sockets,
    build_head_spec,
    build_spec,
    supervise,
    wait_for_answer,
)
from gymsdk.deploy.supervisor import ProcessSpec
from gymsdk.edge.addresses import socket_port
from gymsdk.edge.auth import Security
from gymsdk.edge.request import default_body_budget
from gymsdk.errors import GymsdkError, UsageError
from gymsdk.sockets import raise_open_file_limit


@dataclass(frozen=True, slots=True)
class _Plan:
    """The bound sockets of the servers, the channels to the workers, and the file that the workers share."""

    sockets: Sockets
    channels: list[WorkerChannel]
    shared_file: int


def check_workers(deployment: Deployment, *, separate: bool) -> None:
    """Raise `UsageError` if the workers of *deployment* contradict another option."""
    if deployment.workers is None:
        return
    option = f"--workers {deployment.workers}"
    if separate:
        raise UsageError(f"{option} and --separate: each worker runs all servers in one process; leave out one option")
    if deployment.replicas:
        raise UsageError(f"{option} and --replicas: Ray starts a process for each replica; leave out one option")
    if deployment.role == "head":
        raise UsageError(f"{option} and --role head: a head is one process; leave out --workers")


@asynccontextmanager
async def serve_with_workers(
    servers: Sequence[ServerConfig],
    *,
    deployment: Deployment,
    sockets: Mapping[str, socket.socket],
    security: Security,
    prefix_lines: bool = True,
) -> AsyncIterator[SupervisedServers]:
    """Serve *servers* in each worker of *deployment* while the context is open, with a head unless there is one.

    Args:
        servers: The servers that each worker runs.
        deployment: The deployment with all its servers; each process receives it on standard input (`deploy.child`).
        sockets: Sockets that are bound already, by the name of the server; `head_server` is the head.
        security: The security settings.
        prefix_lines: Whether to put the name of its process in front of each line of the output.

    Raises:
        UsageError: A port is not available.
        GymsdkError: A server does not start.
    """
    raise_open_file_limit()
    with ExitStack() as stack:
        plan = _open_plan(servers, deployment, sockets, security, stack)
        head = [build_head_spec(plan.sockets.head, deployment)] if plan.sockets.head else []
        workers = [_build_worker_spec(plan, number, deployment) for number in range(len(plan.channels))]
        async with supervise(
            head + workers,
            _build_readiness(plan, deployment.times.starting, security),
            servers,
            plan.sockets,
            deployment=deployment,
            security=security,
            prefix_lines=prefix_lines,
            build_distributor=partial(ConnectionDistributor, plan.sockets.servers, plan.channels),
        ) as running:
            yield running


def _open_plan(
    servers: Sequence[ServerConfig],
    deployment: Deployment,
    bound: Mapping[str, socket.socket],
    security: Security,
    stack: ExitStack,
) -> _Plan:
    sockets = bind_sockets(servers, deployment, bound, security, stack)
    channels = []
    for number in range(1, (deployment.workers or 1) + 1):
        channel = WorkerChannel.open(f"{WORKER_PREFIX}{number}")
        stack.callback(channel.close)
        channels.append(channel)
    shared_file = create_shared_file()
    stack.callback(os.close, shared_file)
    return _Plan(sockets, channels, shared_file)


def _build_worker_spec(plan: _Plan, index: int, deployment: Deployment) -> ProcessSpec:
    channel = plan.channels[index]
    worker = WorkerConfig(
        number=index + 1,
        count=len(plan.channels),
        channel=channel.theirs.fileno(),
        shared_file=plan.shared_file,
        ports={name: socket_port(sock) for name, sock in plan.sockets.servers.items()},
    )
    # A worker also listens at ports that it does not share, at which other workers reach its sessions.
    own_ports = tuple(server.model_copy(update={"port": 0}) for server in deployment.servers)
    child = deployment.model_copy(
        update={
            "worker": worker,
            "workers": None,
            "servers": own_ports,
            "server_ports": {},
            "head_url": plan.sockets.head_url,
            "head_host": None,
            "limits": _divide_memory(deployment.limits, len(plan.channels)),
        }
    )
    return build_spec(channel.name, channel.name, channel.theirs, child, files=(plan.shared_file,))


def _divide_memory(limits: Limits, count: int) -> Limits:
    """Return the limits of one worker: its share of the memory for large bodies, and the same limits otherwise."""
    share = (limits.bodies or default_body_budget()) // count
    # With many workers, the share must still hold a small body.
    return limits.model_copy(update={"bodies": max(share, 1024)})


def _build_readiness(plan: _Plan, seconds: float, security: Security) -> dict[str, WaitUntilReady]:
    """Return how to wait, at most *seconds*, until the head answers, and until each worker takes connections."""

    async def wait_for_worker(channel: WorkerChannel) -> None:
        try:
            await asyncio.wait_for(channel.ready.wait(), seconds)
        except TimeoutError:
            raise GymsdkError(f"the process {channel.name!r} was not ready within {seconds:g} seconds") from None

    readiness: dict[str, WaitUntilReady] = {
        channel.name: partial(wait_for_worker, channel) for channel in plan.channels
    }
    if plan.sockets.head is not None:
        readiness[HEAD_NODE_ID] = partial(wait_for_answer, plan.sockets.head, seconds, security)
    return readiness
