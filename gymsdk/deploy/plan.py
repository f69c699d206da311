"""Hosting: which servers run here, where they listen, what they may hold, and who may ask them."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

from gymsdk import credentials
from gymsdk.config.model import (
    AGENTS,
    ENVIRONMENTS,
    MODELS,
    POLICY_SERVER,
    RESOURCES,
    AgentServerConfig,
    Deployment,
    ModelServerConfig,
    ResourcesServerConfig,
    ServerConfig,
    ServerKind,
)
from gymsdk.config.read import find_judge_servers
from gymsdk.config.yaml import DEFAULT_PLACE
from gymsdk.deploy.runner import Times
from gymsdk.episode import Budget
from gymsdk.http.tls import is_loopback
from gymsdk.servers import auth, resources
from gymsdk.servers.auth import Limits, Security, Tls
from gymsdk.servers.environment import NAME_SUFFIX
from gymsdk.servers.listener import bind_socket_in_range
from gymsdk.servers.middleware import parse_prefix
from gymsdk.servers.service import Service
from gymsdk.types import AGENT_SUFFIX

Role: TypeAlias = Literal["head", "resources", "agent", "model"]
"""What a node may be there for alone."""

ROLES: Mapping[Role, frozenset[ServerKind]] = {
    "head": frozenset(),
    "resources": frozenset({RESOURCES}),
    "agent": frozenset({AGENTS, ENVIRONMENTS}),
    "model": frozenset({MODELS}),
}

RESOURCES_REF, MODEL_REF, AGENT_REF = "resources_server", "model_server", "agent_server"
"""The keys by which servers refer to others."""


def agent_of(resources: str) -> str:
    """Give the name of the agent of a resources server, where nobody says otherwise."""
    return resources + AGENT_SUFFIX


def server_of(resources: str) -> str:
    """Give the name of the environment server of a resources server, where nobody says otherwise."""
    return resources + NAME_SUFFIX


def topology_resources(name: str, settings: Mapping[str, Any] | None = None, *, mcp: bool = False) -> ServerConfig:
    """Give the resources server of the environment *name*."""
    part = ResourcesServerConfig(environment=name, mcp=mcp)
    return ServerConfig(name=name, kind=RESOURCES, implementation=name, part=part, settings=settings or {})


def with_mcp(block: ServerConfig) -> ServerConfig:
    """Give *block* with its tools offered over MCP too, where it has any."""
    if not isinstance(block.part, ResourcesServerConfig):
        return block
    return block.model_copy(update={"part": block.part.model_copy(update={"mcp": True})})


def model(player: ModelServerConfig) -> ServerConfig:
    """Give the model server of the policy, where *player* plays."""
    return ServerConfig(name=POLICY_SERVER, kind=MODELS, implementation="gymsdk_model", part=player)


def whole(
    deployment: Deployment, *blocks: ServerConfig, player: ModelServerConfig | None = None
) -> tuple[ServerConfig, ...]:
    """Give every server of *deployment* and *blocks*: with an agent and an environment server for each environment.

    Where there is a *player*, it is the policy's model server that plays, whatever the deployment says of that.
    """
    named = [*deployment.servers, *blocks]
    if player is not None:
        named = [*(each for each in named if (each.kind, each.name) != (MODELS, POLICY_SERVER)), model(player)]
    policy = _policy(named)
    agents = [_agent(each, policy) for each in named if each.kind == RESOURCES and not _has_agent(each, named)]
    named += agents
    named += [_server(each) for each in named if each.kind == AGENTS and not _has_server(each, named)]
    return tuple(sorted(named, key=_order(named)))


def needed(blocks: Iterable[ServerConfig]) -> list[str]:
    """Give the names of *blocks* and of all that they refer to: with none of those missing, they make rollouts.

    Beside blocks that somebody wrote, those that merely follow from them refer to nothing that has to be there: a file
    with resources servers alone is for those who bring a model of their own.
    """
    listed = list(blocks)
    asking = [each for each in listed if each.place != DEFAULT_PLACE] or listed
    return list(
        dict.fromkeys([*(each.name for each in listed), *(its for each in asking for its in each.refers.values())])
    )


def lacking(services: Iterable[Service], coming: Collection[str] = ()) -> tuple[ServerConfig, ...]:
    """Give the agents and environment servers that are wanted where *services* are, and none of which is *coming*."""
    there = [_known(each) for each in services]
    names = {*coming, *(each.name for each in there)}
    return tuple(each for each in whole(Deployment(servers=tuple(there))) if each.name not in names)


def _known(service: Service) -> ServerConfig:
    """Give the block of a server elsewhere, as far as others have to know it."""
    told = {key: service.fields.get(key) for key in (RESOURCES_REF, MODEL_REF, AGENT_REF)}
    refers = {key: str(value["name"]) for key, value in told.items() if isinstance(value, dict) and "name" in value}
    parts = {
        RESOURCES: ResourcesServerConfig(environment=service.implementation),
        MODELS: ModelServerConfig(name=service.name),
    }
    part = parts.get(service.kind, AgentServerConfig())
    place = {"name": service.name, "kind": service.kind, "implementation": service.implementation}
    return ServerConfig.model_validate({**place, "part": part, "refers": refers})


def here(
    blocks: Iterable[ServerConfig], *, role: Role | None = None, only: str | None = None
) -> tuple[ServerConfig, ...]:
    """Give those of *blocks* that run in this process: those of a *role*, the one called *only*, or all."""
    kept = [each for each in blocks if only is None or each.name == only]
    return tuple(each for each in kept if role is None or each.kind in ROLES[role])


def _policy(blocks: Iterable[ServerConfig]) -> str:
    """The model server that agents ask who name none: that of the policy, or else the only one that may be meant."""
    listed = list(blocks)
    judges = find_judge_servers(listed) - {POLICY_SERVER}
    models = [each.name for each in listed if each.kind == MODELS and each.name not in judges]
    return models[0] if len(models) == 1 else POLICY_SERVER


def _has_agent(resources: ServerConfig, blocks: Iterable[ServerConfig]) -> bool:
    return any(each.kind == AGENTS and each.refers.get(RESOURCES_REF) == resources.name for each in blocks)


def _has_server(agent: ServerConfig, blocks: Iterable[ServerConfig]) -> bool:
    return any(each.kind == ENVIRONMENTS and each.refers.get(AGENT_REF) == agent.name for each in blocks)


def _agent(resources: ServerConfig, policy: str) -> ServerConfig:
    refers = {RESOURCES_REF: resources.name, MODEL_REF: policy}
    return ServerConfig(
        name=agent_of(resources.name),
        kind=AGENTS,
        implementation="simple_agent",
        part=AgentServerConfig(),
        refers=refers,
    )


def _server(agent: ServerConfig) -> ServerConfig:
    its = agent.refers.get(RESOURCES_REF)
    name = server_of(its) if its and agent.name == agent_of(its) else server_of(agent.name)
    refers = {AGENT_REF: agent.name} | ({RESOURCES_REF: its} if its else {})
    return ServerConfig(
        name=name,
        kind=ENVIRONMENTS,
        implementation="single_agent_turn",
        part=agent.part,
        refers={**refers, **_model(agent)},
    )


def _model(agent: ServerConfig) -> dict[str, str]:
    asked = agent.refers.get(MODEL_REF)
    return {MODEL_REF: asked} if asked else {}


def _order(blocks: Iterable[ServerConfig]) -> Any:
    """The order of the configuration: the servers of each environment together, as they were named, then the models."""
    places: dict[str, int] = {}
    for number, each in enumerate(blocks):
        if each.kind == RESOURCES:
            places[each.name] = number

    def key(block: ServerConfig) -> tuple[bool, int, int]:
        its = block.name if block.kind == RESOURCES else block.refers.get(RESOURCES_REF, "")
        return (
            block.kind == MODELS,
            places.get(its, len(places)),
            (RESOURCES, AGENTS, ENVIRONMENTS, MODELS).index(block.kind),
        )

    return key


class Options(BaseModel):
    """Where the servers listen and what they may hold: *port* is the head's, *ports* are others' by name, 0 is any.

    A session is closed *ttl* seconds after its last use, and at most *sessions* of an environment are open. *mcp*
    offers tools over MCP too, *budget* bounds the agents' episodes. Clients show the token in *token_file*, or in the
    file that GYMSDK_TOKEN_FILE names; without one, only this machine may reach them, unless that is *insecure*.

    *role* and *only* choose which of the servers run here: those of one kind, or the one of that name. With the URL of
    a *head* they are known there; others are told of them at the host *advertise_host*. *sockets* are there by now, by
    the name of the server or as `head_server`. Servers without a port have one of a *range*, if that is given, and none
    that is *disallowed*. A proxy shows the head at *root_path*, and each server beneath that by its name. Those that
    one *supervisor* starts know each other by that. Model calls of rollouts are captured in the folder *capture*.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    ports: dict[str, Annotated[int, Field(ge=0, le=65535)]] = {}
    advertise_host: str | None = None
    insecure: bool = False
    token_file: Path | None = None
    tls: Tls | None = None
    limits: Limits = Limits()
    ttl: float = Field(resources.DEFAULT_TTL_SECONDS, gt=0)
    sessions: int = Field(resources.DEFAULT_MAX_SESSIONS, gt=0)
    mcp: bool = False
    budget: Budget = Budget()
    times: Times = Times()
    role: Role | None = None
    only: str | None = None
    head: str | None = None
    sockets: dict[str, socket.socket] = {}
    range: tuple[int, int] | None = None
    disallowed: tuple[int, ...] = ()
    root_path: Annotated[str, AfterValidator(parse_prefix)] = ""
    supervisor: str = ""
    capture: Path | None = None

    def safety(self) -> Security:
        """Give what keeps the servers safe; raises `UsageError` where they would not be, or a file is not right."""
        token = credentials.get_process_token(self.token_file)
        self.check(token, self.host)
        if self.tls is not None:
            self.tls.create_ssl_context()
        return Security(token=token, tls=self.tls, limits=self.limits)

    def check(self, token: SecretStr | None, *hosts: str) -> None:
        """Refuse *hosts* where others reach one, and nobody is asked for a *token*; raises `UsageError`."""
        for host in hosts:
            auth.check_exposure(host, token, insecure=self.insecure or auth.is_insecure_allowed())


def socket_of(block: ServerConfig, options: Options) -> socket.socket | None:
    """Give the socket of a server that is there by now or has to be in a range, `None` where its port says enough."""
    if block.name in options.sockets or block.port or options.range is None:
        return options.sockets.get(block.name)
    host = options.host if block.host is None else block.host
    return bind_socket_in_range(host, *options.range, but=options.disallowed, what=block.name)


def beside_head(options: Options) -> str | None:
    """Give the host of what the head begins itself: where others reach the head, they are to reach that."""
    at = options.sockets.get("head_server")
    return str(at.getsockname()[0]) if at is not None and is_loopback(options.host) else None
