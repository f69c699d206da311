"""Serve all servers in several processes behind the same ports: workers, a head, and what keeps them running."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

from gymsdk.concurrency import raise_open_file_limit
from gymsdk.config.model import Deployment, Limits, ServerConfig, WorkerConfig
from gymsdk.deploy.child import HEAD_SERVER
from gymsdk.deploy.distributor import ConnectionDistributor, WorkerChannel
from gymsdk.deploy.runner import BackgroundTask
from gymsdk.deploy.separate import (
    MAX_START_ATTEMPTS,
    SeparateServers,
    Sockets,
    bind_sockets,
    build_node,
    build_service,
    compute_stop_seconds,
    wait_for_answer,
)
from gymsdk.deploy.supervisor import ProcessSpec, Supervisor
from gymsdk.errors import GymsdkError, UsageError
from gymsdk.servers.auth import Security
from gymsdk.servers.limits import default_body_budget
from gymsdk.servers.listener import socket_port
from gymsdk.servers.reports import HEAD_NODE_ID
from gymsdk.servers.shared_memory import create_shared_file


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
        raise UsageError(f"{option} and --separate: each worker runs all servers in one process; leave one of them out")
    if deployment.replicas:
        raise UsageError(
            f"{option} and --replicas: Ray places replicas as processes of their own; leave one of them out"
        )
    if deployment.role == "head":
        raise UsageError(f"{option} and --role head: a head is one process; leave out --workers")


@asynccontextmanager
async def serve_with_workers(
    blocks: Sequence[ServerConfig],
    *,
    deployment: Deployment,
    sockets: Mapping[str, socket.socket],
    security: Security,
    prefix_lines: bool = True,
) -> AsyncIterator[SeparateServers]:
    """Serve *blocks* in each of the workers of *deployment* while the context is open, with a head unless there is one.

    Args:
        blocks: The servers that each worker runs.
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
        plan = _open_plan(blocks, deployment, sockets, security, stack)
        ended = asyncio.Event()

        def report_exit() -> None:
            distributor.reclaim()
            ended.set()

        supervisor = Supervisor(
            _build_process_specs(plan, deployment),
            seconds=compute_stop_seconds(deployment.times),
            last=HEAD_NODE_ID,
            prefix_lines=prefix_lines,
            ended=report_exit,
        )
        distributor = ConnectionDistributor(plan.sockets.servers, plan.channels, supervisor.pid)
        node = build_node(plan.sockets, supervisor, deployment, security, ended)
        services = tuple(build_service(each, plan.sockets.servers[each.name], deployment, security) for each in blocks)
        running = asyncio.ensure_future(supervisor.run())
        distributor.start()
        beating = BackgroundTask(node.description, node.run)
        try:
            rising = asyncio.ensure_future(_wait_until_ready(plan, supervisor, beating, deployment, security))
            await asyncio.wait({running, rising}, return_when="FIRST_COMPLETED")
            if running.done():
                rising.cancel()
                await asyncio.wait({rising})
                running.result()
                raise GymsdkError("the workers ended while they started; their output says why")
            rising.result()
            # Sent again now that the processes run: the head learns which of them it can have restarted.
            await node.send_heartbeats()
            yield SeparateServers(plan.sockets.head_url, services, supervisor, running)
        finally:
            distributor.stop()
            await beating.stop(deployment.times.ending)
            running.cancel()
            await asyncio.wait({running})
    if not running.cancelled():
        running.result()


def _open_plan(
    blocks: Sequence[ServerConfig],
    deployment: Deployment,
    bound: Mapping[str, socket.socket],
    security: Security,
    stack: ExitStack,
) -> _Plan:
    sockets = bind_sockets(blocks, deployment, bound, security, stack)
    channels = []
    for number in range(1, (deployment.workers or 1) + 1):
        channel = WorkerChannel.open(f"worker-{number}")
        stack.callback(channel.close)
        channels.append(channel)
    shared_file = create_shared_file()
    stack.callback(os.close, shared_file)
    return _Plan(sockets, channels, shared_file)


def _build_process_specs(plan: _Plan, deployment: Deployment) -> list[ProcessSpec]:
    specs = []
    if (head := plan.sockets.head) is not None:
        child = deployment.model_copy(
            update={"only": HEAD_SERVER, "workers": None, "head_url": None, "head_host": None}
        )
        command = _build_command(HEAD_SERVER, head.fileno())
        specs.append(
            ProcessSpec(
                HEAD_NODE_ID, command, head, stdin_line=child.dump_for_child(), max_start_attempts=MAX_START_ATTEMPTS
            )
        )
    return specs + [_build_worker_spec(plan, number, deployment) for number in range(len(plan.channels))]


def _build_worker_spec(plan: _Plan, index: int, deployment: Deployment) -> ProcessSpec:
    channel = plan.channels[index]
    worker = WorkerConfig(
        number=index + 1,
        count=len(plan.channels),
        channel=channel.theirs.fileno(),
        shared_file=plan.shared_file,
        ports={name: socket_port(at) for name, at in plan.sockets.servers.items()},
    )
    # Beside the shared ports, a worker listens at ports of its own, by which others reach its sessions.
    own_ports = tuple(each.model_copy(update={"port": 0}) for each in deployment.servers)
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
    return ProcessSpec(
        channel.name,
        _build_command(channel.name, channel.theirs.fileno()),
        channel.theirs,
        files=(plan.shared_file,),
        stdin_line=child.dump_for_child(),
        max_start_attempts=MAX_START_ATTEMPTS,
    )


def _build_command(name: str, file: int) -> list[str]:
    return [sys.executable, "-m", "gymsdk", "serve", "--only", name, "--fd", str(file)]


def _divide_memory(limits: Limits, count: int) -> Limits:
    """Return the limits of one worker: its share of the memory for large bodies, and the same limits otherwise."""
    share = (limits.bodies or default_body_budget()) // count
    return limits.model_copy(update={"bodies": max(share, 1024)})


async def _wait_until_ready(
    plan: _Plan, supervisor: Supervisor, beating: BackgroundTask, deployment: Deployment, security: Security
) -> None:
    """Wait until the head answers and knows the supervisor, and every worker takes connections."""
    seconds = deployment.times.starting

    async def wait_for_head(at: socket.socket) -> None:
        await wait_for_answer(at, seconds, security)
        supervisor.mark_ready(HEAD_NODE_ID)

    async def wait_for_worker(channel: WorkerChannel) -> None:
        try:
            await asyncio.wait_for(channel.ready.wait(), seconds)
        except TimeoutError:
            raise GymsdkError(f"the process {channel.name!r} was not ready within {seconds:g} seconds") from None
        supervisor.mark_ready(channel.name)

    async with asyncio.TaskGroup() as group:
        if plan.sockets.head is not None:
            group.create_task(wait_for_head(plan.sockets.head))
        group.create_task(beating.wait_until_up(seconds))
        for each in plan.channels:
            group.create_task(wait_for_worker(each))
