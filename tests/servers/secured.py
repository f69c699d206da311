"""Helpers of the security tests: every server of the counting environment, each on its own socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pydantic import SecretStr

from gymsdk import Environment
from gymsdk.cluster.reports import Kind, Service
from gymsdk.config.model import Times
from gymsdk.deploy.runner import ServerRunner, ServerSpec
from gymsdk.edge.auth import NO_SECURITY, Security
from gymsdk.edge.request import App
from gymsdk.http import client
from gymsdk.models import registry as models
from gymsdk.servers import agent, resources
from gymsdk.servers import environment as environment_server
from gymsdk.servers import model as model_server
from gymsdk.servers.remote import RemoteEnvironment
from gymsdk.types import AGENT_SUFFIX

TOKEN = SecretStr("a-token-of-32-characters-and-more")


@dataclass(frozen=True)
class SecuredServers:
    """Running servers: the URL of their head, and their URLs and apps by name."""

    head: str
    urls: Mapping[str, str]
    apps: Mapping[str, App]


@asynccontextmanager
async def serve_secured(environment: Environment, security: Security = NO_SECURITY) -> AsyncIterator[SecuredServers]:
    """Serve all servers of *environment* with the security settings *safety* and a policy that never answers."""
    apps: dict[str, App] = {}
    runner = ServerRunner(
        [*_parts(environment, security, apps)],
        host="127.0.0.1",
        port=0,
        contexts={"the environment": environment},
        extra_config={"policy_model_name": "scripted/null", "gymsdk_version": "1"},
        times=Times(grace=0.5, ending=0.5),
        security=security,
    )
    running = asyncio.ensure_future(runner.run())
    try:
        await runner.wait_until_up(running)
        yield SecuredServers(runner.head_url, {service.name: service.url for service in runner.services}, apps)
    finally:
        await client.aclose()
        running.cancel()
        await asyncio.wait({running})


def _parts(environment: Environment, security: Security, apps: dict[str, App]) -> Iterator[ServerSpec]:
    name, model = environment.name, models.model("scripted/null")

    def record(label: str, app: App) -> App:
        apps[label] = app
        return app

    def build_agent(urls: Mapping[str, str]) -> App:
        return record(
            name + AGENT_SUFFIX,
            agent.create_app(
                environment, model, resources=RemoteEnvironment(urls[name], name, token=security.token or "")
            ),
        )

    yield ServerSpec(
        _service(name, "resources_servers", name),
        lambda _: record(name, resources.create_app(environment, with_mcp=True)),
    )
    yield ServerSpec(_service(name + AGENT_SUFFIX, "responses_api_agents", "simple_agent", name), build_agent)
    yield ServerSpec(
        _service(name + "_environment_server", "environment_servers", "single_agent_turn"),
        lambda _: record(name + "_environment_server", environment_server.create_app(environment, model)),
    )
    yield ServerSpec(
        _service("policy_model", "responses_api_models", "gymsdk_model"),
        lambda _: record("policy_model", model_server.create_app(model)),
    )


def _service(name: str, kind: Kind, implementation: str, tools: str | None = None) -> Service:
    fields = {"resources_server": {"type": "resources_servers", "name": tools}} if tools else {}
    return Service(name=name, kind=kind, implementation=implementation, fields=fields)
