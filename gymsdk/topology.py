"""A topology: all servers that a deployment comes to, those that follow from what it names among them, and where."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, TypeAlias

from gymsdk.configuration.consistency import judging
from gymsdk.configuration.deployment import Agent, Block, Deployment, Player, Resources
from gymsdk.configuration.kinds import AGENTS, ENVIRONMENTS, MODELS, POLICY, RESOURCES, Kind
from gymsdk.configuration.places import DEFAULT
from gymsdk.servers.environment import NAMED
from gymsdk.servers.nodes.service import Service
from gymsdk.types import AGENT

Role: TypeAlias = Literal["head", "resources", "agent", "model"]
"""What a node may be there for alone."""

ROLES: Mapping[Role, frozenset[Kind]] = {
    "head": frozenset(),
    "resources": frozenset({RESOURCES}),
    "agent": frozenset({AGENTS, ENVIRONMENTS}),
    "model": frozenset({MODELS}),
}

RESOURCES_REF, MODEL_REF, AGENT_REF = "resources_server", "model_server", "agent_server"
"""The keys by which servers refer to others."""


def agent_of(resources: str) -> str:
    """Give the name of the agent of a resources server, where nobody says otherwise."""
    return resources + AGENT


def server_of(resources: str) -> str:
    """Give the name of the environment server of a resources server, where nobody says otherwise."""
    return resources + NAMED


def resources(name: str, settings: Mapping[str, Any] | None = None, *, mcp: bool = False) -> Block:
    """Give the resources server of the environment *name*."""
    part = Resources(environment=name, mcp=mcp)
    return Block(name=name, kind=RESOURCES, implementation=name, part=part, settings=settings or {})


def with_mcp(block: Block) -> Block:
    """Give *block* with its tools offered over MCP too, where it has any."""
    if not isinstance(block.part, Resources):
        return block
    return block.model_copy(update={"part": block.part.model_copy(update={"mcp": True})})


def model(player: Player) -> Block:
    """Give the model server of the policy, where *player* plays."""
    return Block(name=POLICY, kind=MODELS, implementation="gymsdk_model", part=player)


def whole(deployment: Deployment, *blocks: Block, player: Player | None = None) -> tuple[Block, ...]:
    """Give every server of *deployment* and *blocks*: with an agent and an environment server for each environment.

    Where there is a *player*, it is the policy's model server that plays, whatever the deployment says of that.
    """
    named = [*deployment.servers, *blocks]
    if player is not None:
        named = [*(each for each in named if (each.kind, each.name) != (MODELS, POLICY)), model(player)]
    policy = _policy(named)
    agents = [_agent(each, policy) for each in named if each.kind == RESOURCES and not _has_agent(each, named)]
    named += agents
    named += [_server(each) for each in named if each.kind == AGENTS and not _has_server(each, named)]
    return tuple(sorted(named, key=_order(named)))


def needed(blocks: Iterable[Block]) -> list[str]:
    """Give the names of *blocks* and of all that they refer to: with none of those missing, they make rollouts.

    Beside blocks that somebody wrote, those that merely follow from them refer to nothing that has to be there: a file
    with resources servers alone is for those who bring a model of their own.
    """
    listed = list(blocks)
    asking = [each for each in listed if each.place != DEFAULT] or listed
    return list(
        dict.fromkeys([*(each.name for each in listed), *(its for each in asking for its in each.refers.values())])
    )


def lacking(services: Iterable[Service], coming: Collection[str] = ()) -> tuple[Block, ...]:
    """Give the agents and environment servers that are wanted where *services* are, and none of which is *coming*."""
    there = [_known(each) for each in services]
    names = {*coming, *(each.name for each in there)}
    return tuple(each for each in whole(Deployment(servers=tuple(there))) if each.name not in names)


def _known(service: Service) -> Block:
    """Give the block of a server elsewhere, as far as others have to know it."""
    told = {key: service.fields.get(key) for key in (RESOURCES_REF, MODEL_REF, AGENT_REF)}
    refers = {key: str(value["name"]) for key, value in told.items() if isinstance(value, dict) and "name" in value}
    parts = {RESOURCES: Resources(environment=service.implementation), MODELS: Player(name=service.name)}
    part = parts.get(service.kind, Agent())
    place = {"name": service.name, "kind": service.kind, "implementation": service.implementation}
    return Block.model_validate({**place, "part": part, "refers": refers})


def here(blocks: Iterable[Block], *, role: Role | None = None, only: str | None = None) -> tuple[Block, ...]:
    """Give those of *blocks* that run in this process: those of a *role*, the one called *only*, or all."""
    kept = [each for each in blocks if only is None or each.name == only]
    return tuple(each for each in kept if role is None or each.kind in ROLES[role])


def _policy(blocks: Iterable[Block]) -> str:
    """The model server that agents ask who name none: that of the policy, or else the only one that may be meant."""
    listed = list(blocks)
    judges = judging(listed) - {POLICY}
    models = [each.name for each in listed if each.kind == MODELS and each.name not in judges]
    return models[0] if len(models) == 1 else POLICY


def _has_agent(resources: Block, blocks: Iterable[Block]) -> bool:
    return any(each.kind == AGENTS and each.refers.get(RESOURCES_REF) == resources.name for each in blocks)


def _has_server(agent: Block, blocks: Iterable[Block]) -> bool:
    return any(each.kind == ENVIRONMENTS and each.refers.get(AGENT_REF) == agent.name for each in blocks)


def _agent(resources: Block, policy: str) -> Block:
    refers = {RESOURCES_REF: resources.name, MODEL_REF: policy}
    return Block(name=agent_of(resources.name), kind=AGENTS, implementation="simple_agent", part=Agent(), refers=refers)


def _server(agent: Block) -> Block:
    its = agent.refers.get(RESOURCES_REF)
    name = server_of(its) if its and agent.name == agent_of(its) else server_of(agent.name)
    refers = {AGENT_REF: agent.name} | ({RESOURCES_REF: its} if its else {})
    return Block(
        name=name,
        kind=ENVIRONMENTS,
        implementation="single_agent_turn",
        part=agent.part,
        refers={**refers, **_model(agent)},
    )


def _model(agent: Block) -> dict[str, str]:
    asked = agent.refers.get(MODEL_REF)
    return {MODEL_REF: asked} if asked else {}


def _order(blocks: Iterable[Block]) -> Any:
    """The order of the configuration: the servers of each environment together, as they were named, then the models."""
    places: dict[str, int] = {}
    for number, each in enumerate(blocks):
        if each.kind == RESOURCES:
            places[each.name] = number

    def key(block: Block) -> tuple[bool, int, int]:
        its = block.name if block.kind == RESOURCES else block.refers.get(RESOURCES_REF, "")
        return (
            block.kind == MODELS,
            places.get(its, len(places)),
            (RESOURCES, AGENTS, ENVIRONMENTS, MODELS).index(block.kind),
        )

    return key
