"""Refuse a deployment that cannot be served, before a process, vLLM or a Ray cluster starts for it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack

from gymsdk.cluster.shared_memory import MAX_PAUSES
from gymsdk.config.model import MODELS, Deployment, ServerConfig
from gymsdk.config.read import find_port_errors
from gymsdk.deploy import plan, vllm_command
from gymsdk.deploy.build import ServerBuilder
from gymsdk.deploy.child import HEAD_SERVER
from gymsdk.deploy.process import choose_models, plan_servers, select_servers_here
from gymsdk.deploy.programs import split_programs
from gymsdk.edge.addresses import bind_socket
from gymsdk.errors import UsageError

FUTURE_ENGINE_URL = "http://127.0.0.1:9/v1"
"""A placeholder for the address of a vLLM server before its start."""


def check_deployment(deployment: Deployment, *, bound: Collection[str] = ()) -> None:
    """Check the servers of *deployment* as far as possible before they start.

    Args:
        deployment: The deployment, as the command line and the files name it.
        bound: The names of the servers with bound sockets.

    Raises:
        UsageError: The servers cannot be served as requested.
        BrokenEnvironment: An installed environment cannot be loaded.
    """
    security = plan.get_security(deployment)
    if deployment.vllm_flags is not None:
        deployment = _check_engine(deployment)
    served, _ = split_programs(deployment)
    servers = plan_servers(served, served.environments)
    local_servers = select_servers_here(servers, served, security)
    _check_workers(servers, served)
    _check_ports(local_servers, served, bound)
    # Only for its checks: it loads the environments and the models, and resolves their references.
    ServerBuilder(
        servers,
        local_servers,
        environments={},
        existing_models=choose_models(None, served.model, local_servers, served),
        deployment=served,
        token=security.token,
    )


def _check_engine(deployment: Deployment) -> Deployment:
    """Check the vLLM server to start, and return *deployment* with an address in place of the server's."""
    assert deployment.model is not None, "the command line names the model that vLLM serves"
    vllm_command.check_launch(vllm_command.build_launch(deployment))
    vllm_command.find_program()
    options = {**deployment.model.options, "base_url": FUTURE_ENGINE_URL}
    return deployment.model_copy(update={"model": deployment.model.model_copy(update={"options": options})})


def _check_workers(servers: Sequence[ServerConfig], deployment: Deployment) -> None:
    count = sum(server.kind == MODELS for server in servers)
    if deployment.workers is not None and count > MAX_PAUSES:
        raise UsageError(f"--workers can serve at most {MAX_PAUSES} models, and there are {count}")


def _check_ports(local_servers: Sequence[ServerConfig], deployment: Deployment, bound: Collection[str]) -> None:
    """Raise `UsageError` if two servers have one port, or another process listens there."""
    ports = [(name, host, port) for name, host, port in _list_ports(local_servers, deployment) if name not in bound]
    named = ((*listed_port, None) for listed_port in _list_ports(local_servers, deployment))
    for _, message in find_port_errors(named, deployment.port_range.disallowed):
        raise UsageError(message)
    with ExitStack() as stack:
        for name, host, port in ports:
            stack.enter_context(bind_socket(host, port, what="the head" if name == HEAD_SERVER else name))


def _list_ports(local_servers: Sequence[ServerConfig], deployment: Deployment) -> Iterator[tuple[str, str, int]]:
    """Yield name, host and port of the servers with a port; a head that may run elsewhere already is not among them."""
    if deployment.port and not deployment.head_url and deployment.head_host is None:
        yield HEAD_SERVER, deployment.host, deployment.port
    for server in local_servers:
        if server.port:
            yield server.name, server.host or deployment.host, server.port
