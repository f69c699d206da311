"""Servers that a head starts itself: incomplete reports of nodes never stop the head."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import pytest

from gymsdk import GymsdkError, UsageError
from gymsdk.cluster.registry import NodeRegistry
from gymsdk.cluster.reports import Registration, Service
from gymsdk.config.model import Deployment, PortRange
from gymsdk.deploy.child import HEAD_SERVER
from gymsdk.deploy.node import Work
from gymsdk.deploy.process import serve
from gymsdk.deploy.runner import AutoStarter, BackgroundTask
from gymsdk.edge.addresses import bind_socket
from gymsdk.http import client

from .nodes import fetch_nodes, wait_until


def resources(name: str) -> Service:
    return Service(name=name, kind="resources_servers", implementation=name, port=9)


def agent(name: str, **fields: dict[str, str]) -> Service:
    return Service(name=name, kind="responses_api_agents", implementation="simple_agent", port=9, fields=fields)


INCOMPLETE = {
    "an agent that names no model": [resources("sums"), agent("sums_simple_agent", resources_server={"name": "sums"})],
    "an agent that names nothing": [agent("lonely_simple_agent")],
    "a name that cannot be made longer": [resources("s" * 200)],
}


async def register(head_url: str, node: str, *services: Service) -> None:
    body = {"services": [service.model_dump() for service in services]}
    answer = await client.send("PUT", f"{head_url}/nodes/{node}", body, retry=client.DEFAULT_RETRY)
    assert answer.ok, answer.text


async def names(head_url: str) -> set[str]:
    return {known["name"] for known in (await fetch_nodes(head_url))["instances"] if not known["node"]}


async def wait_for_names(head_url: str, expected: set[str]) -> None:
    """Wait until the head has started the servers with these names."""

    async def is_started() -> bool:
        return await names(head_url) == expected

    await wait_until(is_started, 60)


@pytest.mark.slow
async def test_missing_servers_that_cannot_start_are_logged_once_and_the_rest_is_started(caplog):
    with caplog.at_level(logging.WARNING, "gymsdk"):
        async with serve([], deployment=Deployment(role="head")) as running:
            for number, services in enumerate(INCOMPLETE.values()):
                await register(running.head_url, f"n{number}", *services)
            missing = ("'sums_env", "'lonely_", "s_simple_agent'")
            await wait_until(lambda: all(name in caplog.text for name in missing), 60)
            # The head counts this node only after a few more checks.
            await register(running.head_url, "whole", resources("lamps"))
            await wait_for_names(running.head_url, {"lamps_simple_agent", "lamps_environment_server"})
        await client.aclose()
    messages = [message for message in caplog.messages if "it cannot run here" in message]
    assert len(messages) == len(set(messages)) >= len(INCOMPLETE)
    assert any("'sums_environment_server'" in message and "model server" in message for message in messages)


@pytest.mark.slow
async def test_a_head_without_free_ports_reports_it_and_starts_servers_once_one_is_free(caplog):
    with caplog.at_level(logging.WARNING, "gymsdk"), socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with serve([], deployment=Deployment(role="head", port_range=PortRange(low=port, high=port))) as running:
            await register(running.head_url, "n", resources("lamps"))
            await wait_until(lambda: "'lamps_simple_agent', and it cannot run here" in caplog.text, 60)
            assert await names(running.head_url) == set()
            listener.close()
            await wait_for_names(running.head_url, {"lamps_simple_agent"})
        await client.aclose()


@pytest.mark.slow
async def test_a_missing_server_that_clients_could_not_reach_is_not_started(caplog):
    with bind_socket("127.0.0.2") as at:
        deployment = Deployment(role="head", host="127.0.0.1", advertise_host="127.0.0.2")
        with caplog.at_level(logging.WARNING, "gymsdk"):
            async with serve([], deployment=deployment, sockets={HEAD_SERVER: at}) as running:
                await register(running.head_url, "n", resources("sums"))
                await wait_until(lambda: "sums_environment_server" in caplog.text, 60)
                assert await names(running.head_url) == set()
    message = "sums_simple_agent listens at 127.0.0.1, but clients are told 127.0.0.2, where nothing listens"
    assert message in caplog.text


@dataclass(frozen=True)
class Part:
    service: Service
    work: Work


def build_starter(*parts: Part, started: list[str], starting: float = 0.2) -> AutoStarter[Part]:
    """Build an `AutoStarter` for *parts*; each part is missing until its name is in *started*."""

    def list_missing(_: Sequence[Service], starting_names: Collection[str]) -> list[Part]:
        return [part for part in parts if part.service.name not in {*starting_names, *started}]

    def start(part: Part) -> tuple[BackgroundTask, Callable[[], None]]:
        if part.work is fail_to_start:
            raise UsageError("no port is free")
        return BackgroundTask(part.service.name, part.work), lambda: started.append(part.service.name)

    now = [0.0]
    registry = NodeRegistry(clock=lambda: now[0])
    registry.register("n", Registration(services=[resources("sums")]), "127.0.0.1")
    now[0] = 5.0
    return AutoStarter([], registry, list_missing, start, starting=starting, stop_seconds=0.2)


async def fail_to_start(up: asyncio.Event, over: asyncio.Event) -> None:
    raise GymsdkError("no oil")


async def test_a_server_that_does_not_start_is_stopped_logged_once_and_not_retried(caplog):
    attempts: list[str] = []
    running: list[str] = []

    async def fail(up: asyncio.Event, over: asyncio.Event) -> None:
        attempts.append("breaks")
        raise GymsdkError("no oil")

    async def hang(up: asyncio.Event, over: asyncio.Event) -> None:
        attempts.append("hangs")
        try:
            await asyncio.Event().wait()
        finally:
            attempts.append("ended")

    async def run(up: asyncio.Event, over: asyncio.Event) -> None:
        attempts.append("lasts")
        up.set()
        await over.wait()

    works = {"broken": fail_to_start, "breaks": fail, "hangs": hang, "lasts": run}
    starter = build_starter(*(Part(resources(name), work) for name, work in works.items()), started=running)
    background_task = BackgroundTask("what is supplied", starter.run)
    await wait_until(lambda: running)
    assert not background_task.task.done()
    await background_task.stop(10)
    assert (attempts, running) == (["breaks", "hangs", "ended", "lasts"], ["lasts"])
    logged = [message.split("'")[1] for message in caplog.messages if "it cannot run here" in message]
    assert logged == ["broken", "breaks", "hangs"]


async def test_servers_that_are_starting_when_the_head_stops_are_stopped_too():
    messages: list[str] = []

    async def slow(up: asyncio.Event, over: asyncio.Event) -> None:
        messages.append("began")
        await over.wait()
        messages.append("ended")

    starter = build_starter(Part(resources("slow"), slow), started=[], starting=600)
    background_task = BackgroundTask("what is supplied", starter.run)
    await wait_until(lambda: messages)
    await background_task.stop(0.1)
    await wait_until(background_task.task.done)
    assert messages == ["began", "ended"]
