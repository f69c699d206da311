"""Serve environments in this process, on one event loop, with a new head or registered with an existing one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

from gymsdk import credentials
from gymsdk.client import VERSION_KEY
from gymsdk.config.model import MODELS, POLICY_SERVER, Deployment, ModelServerConfig, ServerConfig
from gymsdk.deploy import plan
from gymsdk.deploy.build import ServerBuilder
from gymsdk.deploy.plan import (
    RESOURCES_REF,
    Options,
    get_agent_name,
    get_environment_server_name,
    get_head_url_for_servers,
    get_inherited_socket,
)
from gymsdk.deploy.runner import HeadConnection, ServerRunner
from gymsdk.environment import Environment
from gymsdk.errors import UsageError, format_suggestion
from gymsdk.http.tls import WILDCARD_HOSTS, redact_url
from gymsdk.models import registry as models
from gymsdk.servers.auth import Security
from gymsdk.servers.instances import ROUTES_KEY, bind_head, is_local_host
from gymsdk.servers.reports import Service, build_url
from gymsdk.testing.oracle import Oracle
from gymsdk.types import Model

__all__ = [
    "DEFAULT",
    "HEAD",
    "POLICY_SERVER",
    "Options",
    "RunningServers",
    "get_agent_name",
    "get_environment_server_name",
    "get_policy_name",
    "serve",
]

HEAD = 11000
"""The default port of a head."""

DEFAULT = "scripted/oracle"
"""The default model of the policy."""

RESERVED_KEYS = frozenset(
    {
        "head_server",
        "default_host",
        "policy_model_name",
        "observability_enabled",
        "model_call_capture_dir",
        VERSION_KEY,
        ROUTES_KEY,
    }
)
"""Keys of the head's configuration that are not names of servers."""


@dataclass(frozen=True, slots=True)
class RunningServers:
    """Running servers, in the order of the configuration, and their environments."""

    head_url: str
    services: tuple[Service, ...]
    environments: tuple[Environment, ...]
    model: Model | None
    task: asyncio.Task[None]

    @property
    def urls(self) -> dict[str, str]:
        """The URL of each server by name."""
        return {each.name: each.url for each in self.services}

    async def wait_for_end(self) -> None:
        """Wait until the servers end; raises `GymsdkError` if a server fails."""
        await asyncio.shield(self.task)


@asynccontextmanager
async def serve(
    environments: Iterable[str | Environment] = (),
    *,
    model: str | Model | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    options: Options | None = None,
    deployment: Deployment | None = None,
) -> AsyncIterator[RunningServers]:
    """Serve *environments* with *model* while the context is open.

    Args:
        environments: Names of installed environments, or `Environment` objects.
        model: The policy's model, or its name; by default the scripted oracle if there is no *deployment*.
        settings: Settings by environment.
        options: Addresses, limits, and which servers run in this process.
        deployment: Further servers, from the configuration files.

    Raises:
        UsageError: The servers cannot be served as requested; none has been started.
        GymsdkError: A server does not start. All others have been stopped.
    """
    options = options or Options()
    safety = options.get_security()
    options = await resolve_head(options, deployment, safety)
    listed = list(environments)
    blocks = plan_servers(listed, model, settings or {}, options, deployment)
    local_servers = select_servers_here(blocks, options, safety)
    assembly = ServerBuilder(
        blocks,
        local_servers,
        environments={each.name: each for each in listed if isinstance(each, Environment)},
        players=_choose_models(model, local_servers, options),
        ttl=options.ttl,
        sessions=options.sessions,
        budget=options.budget,
        token=safety.token,
        capture=options.capture,
    )
    expected = list_expected_services(local_servers if options.head else blocks, options, with_model=model is not None)
    runner = _build_runner(assembly, blocks, local_servers, options, safety, expected)
    # A separate task enters and exits all contexts: the caller may leave this context in another task.
    task = asyncio.ensure_future(runner.run())
    try:
        await runner.wait_until_up(task)
        served = tuple(assembly.environments.values())
        yield RunningServers(runner.head_url, tuple(runner.services), served, assembly.models.get(POLICY_SERVER), task)
    finally:
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()


async def resolve_head(options: Options, deployment: Deployment | None, security: Security) -> Options:
    """Return *options* with the head that *deployment* names: its URL if it answers, else a socket to serve it here.

    Raises:
        GymsdkError: The head is on another machine, and does not answer in time.
    """
    if deployment is None or not deployment.head.given or options.head or "head_server" in options.sockets:
        return options
    host, port = deployment.head.host, deployment.head.port
    if not port or options.role == "head":
        return options
    if is_local_host(host):
        options.check(security.token, host)
    headers = partial(credentials.build_auth_headers, security.token)
    # A head with a fixed address listens only there, unless the servers listen on all interfaces.
    listen = options.host if options.host in WILDCARD_HOSTS else None
    at = await bind_head(host, port, scheme=security.scheme, listen=listen, headers=headers)
    if at is None:
        return options.model_copy(update={"head": build_url(host, port, security.scheme)})
    return options.model_copy(update={"sockets": {**options.sockets, "head_server": at}})


def select_servers_here(
    blocks: Iterable[ServerConfig], options: Options, security: Security
) -> tuple[ServerConfig, ...]:
    """Return the *blocks* that run in this process; raises `UsageError` if a server would be insecure."""
    local_servers = plan.select_local(blocks, role=options.role, only=options.only)
    options.check(security.token, *(each.host for each in local_servers if each.host is not None))
    return local_servers


def plan_servers(
    environments: Iterable[str | Environment],
    model: str | Model | None,
    settings: Mapping[str, Mapping[str, Any]],
    options: Options,
    deployment: Deployment | None,
) -> tuple[ServerConfig, ...]:
    """Return all servers of the deployment, in this process or another, with their ports; raises `UsageError`."""
    added = [_build_resources_server(each, settings, options) for each in environments]
    if deployment is not None and options.mcp:
        deployment = deployment.model_copy(update={"servers": tuple(map(plan.enable_mcp, deployment.servers))})
    player = _build_model_server(
        model, joined=options.head is not None or options.role is not None, deployment=deployment
    )
    blocks = plan.complete_servers(deployment or Deployment(), *added, player=player)
    names = [each.name for each in blocks]
    for name in names:
        if names.count(name) > 1 or name in RESERVED_KEYS:
            raise UsageError(f"two servers would be named {name!r}; leave out one of the environments of that name")
    if options.role == "model" and not any(each.kind == MODELS for each in blocks):
        raise UsageError("--role model has no model to serve; add one with --model, as in --model scripted/oracle")
    for name in options.ports:
        if name not in names:
            raise UsageError(
                f"no server {name!r} to give a port{format_suggestion(name, names, f'there are {_list_names(names)}')}"
            )
    if options.only is not None and options.only not in names:
        raise UsageError(f"no server {options.only!r}; the servers are {_list_names(names)}")
    return tuple(_set_port(each, options) for each in blocks)


def list_expected_services(blocks: Iterable[ServerConfig], options: Options, *, with_model: bool) -> list[str]:
    """Return the names of the servers without which *blocks* cannot produce rollouts."""
    # An agent in the same process as its model needs no model server.
    spared = {POLICY_SERVER} if with_model and options.role == "agent" else set()
    return [name for name in plan.list_referenced_servers(blocks) if name not in spared]


def get_policy_name(model: Model) -> str:
    """Return the name of *model*: the one by which it was created, or that of its type."""
    return redact_url(str(getattr(model, "name", type(model).__name__)))


def _list_names(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _build_resources_server(
    environment: str | Environment, settings: Mapping[str, Mapping[str, Any]], options: Options
) -> ServerConfig:
    name = environment if isinstance(environment, str) else environment.name
    return plan.build_resources_server(name, settings.get(name), mcp=options.mcp)


def _build_model_server(
    model: str | Model | None, *, joined: bool, deployment: Deployment | None
) -> ModelServerConfig | None:
    """Return the policy's model, or `None` if another process may serve it."""
    if model is not None:
        return ModelServerConfig(name=model if isinstance(model, str) else get_policy_name(model))
    return None if joined or leaves_model_to_others(deployment) else ModelServerConfig(name=DEFAULT)


def leaves_model_to_others(deployment: Deployment | None) -> bool:
    """Return whether *deployment* decides which models there are: settings alone do not."""
    return deployment is not None and bool(deployment.servers or deployment.head.given)


def _choose_models(
    model: str | Model | None, local_servers: Iterable[ServerConfig], options: Options
) -> dict[str, Model]:
    """Return the policy's model if its server runs in this process, or an agent here uses it directly."""
    if model is None or not (options.role == "agent" or any(each.name == POLICY_SERVER for each in local_servers)):
        return {}
    return {POLICY_SERVER: models.model(model) if isinstance(model, str) else model}


def _set_port(block: ServerConfig, options: Options) -> ServerConfig:
    port = options.ports.get(block.name, block.port or 0)
    return block.model_copy(update={"port": port})


def _build_runner(
    assembly: ServerBuilder,
    blocks: Sequence[ServerConfig],
    local_servers: Sequence[ServerConfig],
    options: Options,
    security: Security,
    expected: Sequence[str],
) -> ServerRunner:
    lasting: dict[str, AbstractAsyncContextManager[Any]] = {
        f"the lifespan of environment {name!r}": each for name, each in assembly.environments.items()
    }
    lasting |= {f"the oracle of {name!r}": each for name, each in assembly.models.items() if isinstance(each, Oracle)}
    known = HeadConnection(
        head_url=options.head,
        advertise=options.advertise_host,
        loads=assembly.get_loads,
        expected=expected,
        at=options.sockets.get("head_server"),
        supplied=partial(
            assembly.build_supplied,
            place=partial(get_inherited_socket, options=options),
            host=get_head_url_for_servers(options),
        ),
        path=options.root_path,
        supervisor=options.supervisor,
    )
    return ServerRunner(
        assembly.build_specs(
            {each.name: at for each in local_servers if (at := get_inherited_socket(each, options)) is not None}
        ),
        host=options.host,
        port=options.port,
        contexts=lasting,
        extra_config=_describe_head(assembly, blocks) | _describe_capture(options),
        times=options.times,
        security=security,
        connection=known,
    )


def _describe_head(assembly: ServerBuilder, blocks: Sequence[ServerConfig]) -> dict[str, Any]:
    """Return the entries of the head's configuration that are not servers."""
    playing = assembly.models.get(POLICY_SERVER)
    # OmegaConf would read these character sequences as a missing value or a reference.
    name = re.sub(r"\?\?\?|\$\{", "", get_policy_name(playing) if playing is not None else _get_model_name(blocks))
    servers = (each for each in blocks if each.kind == "environment_servers" and RESOURCES_REF in each.refers)
    routes = {each.refers[RESOURCES_REF]: each.name for each in servers}
    return ({"policy_model_name": name} if name else {}) | {VERSION_KEY: version("gymsdk"), ROUTES_KEY: routes}


def _describe_capture(options: Options) -> dict[str, Any]:
    """Return where NeMo Gym's collector finds the captured model calls."""
    if options.capture is None:
        return {}
    return {"observability_enabled": True, "model_call_capture_dir": str(options.capture.absolute())}


def _get_model_name(blocks: Sequence[ServerConfig]) -> str:
    parts = [each.part for each in blocks if each.kind == MODELS and each.name == POLICY_SERVER]
    return redact_url(parts[0].name) if parts and isinstance(parts[0], ModelServerConfig) else ""
