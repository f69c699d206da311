"""Served: the agents and resources servers a head knows, and which of them a row is for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gymsdk import credentials, http
from gymsdk.client import NO_SUCH, VERSION, ServerClient, Unknown
from gymsdk.errors import suggestion
from gymsdk.outcome import Rollout
from gymsdk.rollouts import answered, lines
from gymsdk.rollouts.jobs import agent
from gymsdk.types import AGENT, Row

Wanted: TypeAlias = tuple[str | None, str]
"""The agent that a row names, if any, and the row's environment."""

log = logging.getLogger("gymsdk")


@dataclass(frozen=True, slots=True)
class Served:
    """What *client*'s head knows: the agents, each with its resources server where that is named, and all of those.

    The *model* that plays, the *version* of gymsdk and those of the environments are there where the head tells them.
    """

    client: ServerClient
    agents: Mapping[str, str | None]
    resources: frozenset[str]
    model: str | None = None
    version: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def plays_once(self) -> bool:
        """Whether a row that comes twice under one id is played once: what gymsdk's servers do."""
        return self.version is not None

    def identity(self) -> Row:
        """Give what decides what is played there, as far as the head tells."""
        return {"model": self.model, "gymsdk": self.version, "versions": dict(self.versions)}

    def agent_of(self, row: Row, environment: str) -> str:
        """Give the agent that plays *row* of *environment*: the one it names, or the one called as ours are.

        Raises `Unknown` where the head knows neither.
        """
        return self.agent_named(agent(row), environment)

    def agent_named(self, named: str | None, environment: str) -> str:
        """Give the agent that plays rows of *environment* that are for the one so *named*, like `agent_of`."""
        wanted = environment + AGENT
        for name in (named, wanted):
            if name is not None and name in self.agents:
                return name
        raise self._unknown(named or wanted)

    def checked(self, environments: Sequence[str]) -> None:
        """Refuse to play *environments* of which one has no agent; raises `Unknown`."""
        if lost := self.without_agent(environments):
            raise self._unknown(lost[0] + AGENT)

    def without_agent(self, environments: Sequence[str]) -> list[str]:
        """Give those of *environments* that no agent plays."""
        return [name for name in environments if name + AGENT not in self.agents and name not in self.agents]

    def resources_of(self, row: Row, environment: str) -> str:
        """Give the resources server that judges *row* of *environment*; raises `Unknown` where the head knows none."""
        return self.resources_named(agent(row), environment)

    def resources_named(self, named: str | None, environment: str) -> str:
        """Give the resources server that judges rows of *environment* for the agent so *named*, like `resources_of`."""
        for name in (self.agents.get(named or environment + AGENT), environment):
            if name is not None and name in self.resources:
                return name
        near = suggestion(environment, self.resources, f"its: {', '.join(sorted(self.resources)) or 'none'}")
        raise self._missing(f"resources server of {environment!r}{near}")

    def _unknown(self, name: str) -> Unknown:
        near = suggestion(name, self.agents, f"its agents: {', '.join(self.agents) or 'none'}")
        return self._missing(f"agent {name!r}{near}")

    def _missing(self, what: str) -> Unknown:
        return Unknown(f"{http.host(self.client.head)} knows no {what}")


async def served(head: str, wanted: Callable[[Served], bool] = lambda _: True) -> Served:
    """Give what the head at a URL knows: one that has just begun, once it knows all that is *wanted*, or has settled.

    Raises `UsageError` where it is no URL, `Failed` where no head answers.
    """
    head = credentials.head(head)
    asking, client = ServerClient(head, seconds=30.0, retry=http.Retry(times=1)), ServerClient(head)
    return _known(client, await asking.wait_for_config(lambda config: wanted(_known(client, config))))


def _known(client: ServerClient, config: Mapping[str, Any]) -> Served:
    agents = {name: _resources(block) for name, block in _blocks(config, "responses_api_agents")}
    judges = dict(_blocks(config, "resources_servers"))
    return Served(
        client,
        agents,
        frozenset(judges),
        model=_word(config.get("policy_model_name")),
        version=_word(config.get(VERSION)),
        versions={name: told for name, each in judges.items() if (told := _word(_field(each, "version")))},
    )


def _field(block: object, name: str) -> object:
    return block.get(name) if isinstance(block, dict) else None


def _word(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _blocks(config: Mapping[str, Any], kind: str) -> Iterator[tuple[str, Any]]:
    for name, block in config.items():
        implementations = block.get(kind) if isinstance(block, dict) else None
        if isinstance(implementations, dict):
            yield from ((str(name), each) for each in implementations.values())


def _resources(block: object) -> str | None:
    return _word(_field(_field(block, "resources_server"), "name"))


@dataclass(frozen=True, slots=True)
class Distant:
    """An environment that is not installed here: *name*, played by *agent*, whose figures the servers know."""

    name: str
    agent: str
    client: ServerClient

    async def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Give the environment's own figures over scored *rollouts*; raises `EpisodeError`."""
        sent = {"verify_responses": [_trimmed(rollout) for rollout in rollouts]}
        answer = await self.client.post(self.agent, "/aggregate_metrics", json=sent)
        if answer.status in NO_SUCH:
            return {}
        body = answered.object_of(answer, "metrics")
        found, complaint = body.get("key_metrics"), body.get("complaint")
        if isinstance(complaint, str):
            log.warning("%s: %s", self.name, complaint)
        return {
            name: value
            for name, value in (found.items() if isinstance(found, dict) else ())
            if not name.startswith("mean/") and isinstance(value, (int, float))
        }


def all_known(find: Callable[[str | None, str], str], wanted: Iterable[Wanted]) -> bool:
    """Whether *find*, of those served, gives a server for each that is *wanted*."""
    try:
        for named, environment in wanted:
            find(named, environment)
    except Unknown:
        return False
    return True


def _trimmed(rollout: Rollout) -> Row:
    """Give a rollout's line without what is said in it, of which figures take nothing but the usage."""
    task, _, repeat = rollout.id.partition(":")
    line = lines.scored(rollout, (int(task), int(repeat)))
    usage = (line.pop("response") or {}).get("usage")
    line.pop("responses_create_params")
    return {**line, "response": {"usage": usage}}
