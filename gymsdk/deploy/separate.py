"""Serve each server in its own supervised process; all ports are bound before the first process starts."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial

from gymsdk.config.model import Deployment, ServerConfig
from gymsdk.deploy.supervised import (
    SupervisedServers,
    bind_sockets,
    build_head_spec,
    build_spec,
    supervise,
    wait_for_answer,
)
from gymsdk.edge.auth import Security


@asynccontextmanager
async def serve_separately(
    servers: Sequence[ServerConfig],
    *,
    deployment: Deployment,
    sockets: Mapping[str, socket.socket],
    security: Security,
    prefix_lines: bool = True,
) -> AsyncIterator[SupervisedServers]:
    """Serve each of *servers* in its own process while the context is open, with a head unless there is one already.

    Args:
        servers: The servers to run here.
        deployment: The deployment with all its servers; each process receives it on standard input (`deploy.child`).
        sockets: Sockets that are bound already, by the name of the server; `head_server` is the head.
        security: The security settings.
        prefix_lines: Whether to put the name of its server in front of each line of the output.

    Raises:
        UsageError: A port is not available.
        GymsdkError: A server does not start.
    """
    with ExitStack() as stack:
        bound = bind_sockets(servers, deployment, sockets, security, stack)
        specs = [build_head_spec(bound.head, deployment)] if bound.head else []
        for name, sock in bound.servers.items():
            # The head of a child is decided.
            child = deployment.model_copy(update={"only": name, "head_url": bound.head_url, "head_host": None})
            specs.append(build_spec(name, name, sock, child))
        readiness = {
            name: partial(wait_for_answer, sock, deployment.times.starting, security)
            for name, sock in bound.by_name.items()
        }
        async with supervise(
            specs, readiness, servers, bound, deployment=deployment, security=security, prefix_lines=prefix_lines
        ) as running:
            yield running
