"""A launch: the servers of some environments, all in this process and on one event loop."""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from gymsdk import oracle
from gymsdk.addresses import public
from gymsdk.client import VERSION
from gymsdk.environment import Environment
from gymsdk.errors import UsageError, suggestion
from gymsdk.models import registry as models
from gymsdk.plugins import registry
from gymsdk.rollouts.jobs import AGENT
from gymsdk.servers import agent, resources
from gymsdk.servers import environment as environment_server
from gymsdk.servers import model as model_server
from gymsdk.servers.fleet import Fleet, Part, Times
from gymsdk.servers.head import Kind, Service
from gymsdk.servers.remote import Remote
from gymsdk.servers.routing import App
from gymsdk.sitting import Budget
from gymsdk.types import Model

HEAD = 11000
"""The port where clients look for a head."""

DEFAULT = "scripted/oracle"
"""Who plays where no model is named."""

POLICY = model_server.NAMED
"""The name of the model server."""

ROUTES = "environment_server_routes"
"""The key under which the configuration says whom a task of which environment is sent to."""

TAKEN = frozenset({"head_server", "default_host", "policy_model_name", VERSION, ROUTES})
"""Keys of the configuration that are no server's."""

DOMAINS = frozenset(
    {"math", "coding", "agent", "knowledge", "instruction_following", "long_context", "safety", "games"}
)
"""What the configuration may say that an environment is about; any other is `other`."""

Urls: TypeAlias = Mapping[str, str]
"""URLs of servers by name."""


class Options(BaseModel):
    """Where the servers listen and what they may hold: *port* is the head's, *ports* are others' by name, 0 is any.

    A session is closed *ttl* seconds after its last use, and at most *sessions* of an environment are open. *mcp*
    offers tools over MCP too, *budget* bounds the agents' episodes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    ports: dict[str, Annotated[int, Field(ge=0, le=65535)]] = {}
    insecure: bool = False
    ttl: float = Field(resources.TTL, gt=0)
    sessions: int = Field(resources.CAP, gt=0)
    mcp: bool = False
    budget: Budget = Budget()
    times: Times = Times()


@dataclass(frozen=True, slots=True)
class Running:
    """Servers that answer, in the order of the configuration, and the environments that they serve."""

    head_url: str
    services: tuple[Service, ...]
    environments: tuple[Environment, ...]
    model: Model
    task: asyncio.Task[None]

    @property
    def urls(self) -> dict[str, str]:
        """The URL of each server by name."""
        return {each.name: each.url for each in self.services}

    async def ended(self) -> None:
        """Wait for as long as they run; raises `GymsdkError` where one of them ends by itself."""
        await asyncio.shield(self.task)


@asynccontextmanager
async def serving(
    environments: Iterable[str | Environment],
    *,
    model: str | Model = DEFAULT,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    options: Options | None = None,
) -> AsyncIterator[Running]:
    """Serve *environments* with *model*, each by its name or as it is, for as long as the context is open.

    Raises `UsageError` where they cannot be served as asked, before anything listens; `GymsdkError` where one of the
    servers does not start. Whatever is wrong, nothing is left running.
    """
    options = options or Options()
    _guarded(options)
    given = tuple(_loaded(each, settings or {}) for each in environments)
    played = oracle.served(models.model(model) if isinstance(model, str) else model, given)
    parts = _parts(given, played, options)
    fleet = _fleet(given, parts, played, options)
    # A task of its own, in which everything begins and ends: whoever opens the context may leave it in another.
    task = asyncio.ensure_future(fleet.run())
    try:
        await fleet.up(task)
        yield Running(fleet.head_url, tuple(fleet.services), given, played, task)
    finally:
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()


def _loaded(environment: str | Environment, settings: Mapping[str, Mapping[str, Any]]) -> Environment:
    if isinstance(environment, Environment):
        return environment
    return registry.load(environment, **settings.get(environment, {}))


def _guarded(options: Options) -> None:
    if not options.insecure and not _is_loopback(options.host):
        raise UsageError(
            f"anybody who reaches {options.host!r} could use these servers, which ask for no token;"
            " listen on 127.0.0.1, or add --insecure"
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _fleet(environments: Sequence[Environment], parts: Sequence[Part], model: Model, options: Options) -> Fleet:
    # What OmegaConf would take for a missing value or a reference has no place in a configuration.
    model_name = re.sub(r"\?\?\?|\$\{", "", named(model))
    routes = {each.name: server_of(each.name) for each in environments}
    lasting: dict[str, AbstractAsyncContextManager[Any]] = {
        f"the lifespan of environment {each.name!r}": each for each in environments
    }
    if isinstance(model, oracle.Oracle):
        lasting["the oracle"] = model
    return Fleet(
        parts,
        host=options.host,
        port=options.port,
        lasting=lasting,
        about={"policy_model_name": model_name, VERSION: version("gymsdk"), ROUTES: routes},
        times=options.times,
    )


def named(model: Model) -> str:
    """Give what *model* is called: the name it was asked for by, or its type's."""
    return public(str(getattr(model, "name", type(model).__name__)))


def _parts(environments: Sequence[Environment], model: Model, options: Options) -> list[Part]:
    """Give the servers to be, on the ports asked for; raises `UsageError` where names or ports do not fit."""
    made = [part for each in environments for part in _of(each, model, options)]
    policy = _service(POLICY, "responses_api_models", "gymsdk_model")
    made.append(Part(policy, lambda _: model_server.app(model, name=POLICY)))
    names = Counter(each.service.name for each in made)
    for name, times in names.items():
        if times > 1 or name in TAKEN:
            raise UsageError(f"two things would be called {name!r}; leave out one of the environments named like that")
    for name in options.ports:
        if name not in names:
            near = suggestion(name, names, f"there are {', '.join(names)}")
            raise UsageError(f"no server {name!r} to give a port{near}")
    return [_at(each, options.ports.get(each.service.name, 0)) for each in made]


def _of(environment: Environment, model: Model, options: Options) -> Iterator[Part]:
    """Yield the servers of one environment: its resources, its agent, its environment server."""
    name = environment.name
    domain = name if name in DOMAINS else "other"
    its_resources = {"resources_server": {"type": "resources_servers", "name": name}}
    its_model = {"model_server": {"type": "responses_api_models", "name": POLICY}}
    its_agent = {"agent_server": {"type": "responses_api_agents", "name": agent_of(name)}}

    def its_app(_: Urls) -> App:
        return resources.app(environment, ttl=options.ttl, cap=options.sessions, with_mcp=options.mcp)

    def agents_app(urls: Urls) -> App:
        # Rows are played in process; only who brings a session's cookies has its tools called over HTTP.
        tools = Remote(urls[name], name)
        return agent.app(environment, model, resources=tools, name=agent_of(name), budget=options.budget)

    def servers_app(_: Urls) -> App:
        return environment_server.app(environment, model, name=server_of(name), budget=options.budget)

    yield Part(_service(name, "resources_servers", name, domain=domain, version=environment.version), its_app)
    yield Part(
        _service(agent_of(name), "responses_api_agents", "simple_agent", **its_resources, **its_model), agents_app
    )
    yield Part(
        _service(server_of(name), "environment_servers", "single_agent_turn", **its_agent, **its_resources), servers_app
    )


def agent_of(environment: str) -> str:
    """Give the name of an environment's agent."""
    return environment + AGENT


def server_of(environment: str) -> str:
    """Give the name of an environment's environment server."""
    return environment + environment_server.NAMED


def _service(name: str, kind: Kind, implementation: str, **fields: Any) -> Service:
    return Service(name=name, kind=kind, implementation=implementation, fields=fields)


def _at(part: Part, port: int) -> Part:
    return replace(part, service=part.service.model_copy(update={"port": port}))
