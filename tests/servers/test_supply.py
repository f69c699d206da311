"""Servers that a head starts itself: incomplete reports of nodes never stop the head."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from gymsdk import GymsdkError, UsageError
from gymsdk.deploy.background_task import BackgroundTask, Work
from gymsdk.deploy.plan import Options
from gymsdk.deploy.process import serve
from gymsdk.deploy.runner import AutoStarter
from gymsdk.http import client
from gymsdk.servers.registry import NodeRegistry
from gymsdk.servers.reports import Registration
from gymsdk.servers.service import Service

from .nodes import told, until


def resources(name: str) -> Service:
    return Service(name=name, kind="resources_servers", implementation=name, port=9)


def agent(name: str, **fields: dict[str, str]) -> Service:
    return Service(name=name, kind="responses_api_agents", implementation="simple_agent", port=9, fields=fields)


INCOMPLETE = {
    "an agent that names no model": [resources("sums"), agent("sums_simple_agent", resources_server={"name": "sums"})],
    "an agent that names nothing": [agent("lonely_simple_agent")],
    "a name to which nothing can be added": [resources("s" * 200)],
}


async def joined(head_url: str, node: str, *services: Service) -> None:
    answer = await client.put(f"{head_url}/nodes/{node}", {"services": [each.model_dump() for each in services]})
    assert answer.ok, answer.text


async def names(head_url: str) -> set[str]:
    return {each["name"] for each in (await told(head_url))["instances"] if not each["node"]}


async def test_servers_that_nodes_lack_are_logged_once_and_the_rest_is_supplied(caplog) -> None:
    with caplog.at_level(logging.WARNING, "gymsdk"):
        async with serve([], options=Options(role="head")) as running:
            for number, services in enumerate(INCOMPLETE.values()):
                await joined(running.head_url, f"n{number}", *services)
            await until(lambda: all(name in caplog.text for name in ("'sums_env", "'lonely_", "s_simple_agent'")), 60)
            # It takes some looks more until this one counts.
            await joined(running.head_url, "whole", resources("lamps"))
            wanted = {"lamps_simple_agent", "lamps_environment_server"}

            async def supplied() -> bool:
                return await names(running.head_url) == wanted

            await until(supplied, 60)
        await client.aclose()
    said = [each.getMessage() for each in caplog.records if "it cannot run here" in each.getMessage()]
    assert len(said) == len(set(said)) >= len(INCOMPLETE)
    assert any("'sums_environment_server'" in each and "model server" in each for each in said)


async def test_a_head_without_free_ports_reports_it_and_supplies_once_one_is_free(caplog) -> None:
    with caplog.at_level(logging.WARNING, "gymsdk"), socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with serve([], options=Options(role="head", range=(port, port))) as running:
            await joined(running.head_url, "n", resources("lamps"))
            await until(lambda: "'lamps_simple_agent', and it cannot run here" in caplog.text, 60)
            assert await names(running.head_url) == set()
            taken.close()

            async def supplied() -> bool:
                return await names(running.head_url) == {"lamps_simple_agent"}

            await until(supplied, 60)
        await client.aclose()


@dataclass(frozen=True)
class Part:
    service: Service
    work: Work


def supply(*parts: Part, there: list[str], starting: float = 0.2) -> AutoStarter[Part]:
    """Build an AutoStarter for *parts*, each wanted until its name is in *there*."""

    def wanted(_: Sequence[Service], coming: Collection[str]) -> list[Part]:
        return [each for each in parts if each.service.name not in {*coming, *there}]

    def begun(part: Part) -> tuple[BackgroundTask, Callable[[], None]]:
        if part.work is broken:
            raise UsageError("no port is free")
        return BackgroundTask(part.service.name, part.work), lambda: there.append(part.service.name)

    now = [0.0]
    members = NodeRegistry(clock=lambda: now[0])
    members.register("n", Registration(services=[resources("sums")]), "127.0.0.1")
    now[0] = 5.0
    return AutoStarter([], members, wanted, begun, starting=starting, stop_seconds=0.2)


async def broken(up: asyncio.Event, over: asyncio.Event) -> None:
    raise GymsdkError("no oil")


async def test_a_server_that_does_not_start_is_stopped_logged_once_and_not_retried(caplog) -> None:
    tries: list[str] = []
    running: list[str] = []

    async def breaks(up: asyncio.Event, over: asyncio.Event) -> None:
        tries.append("breaks")
        raise GymsdkError("no oil")

    async def hangs(up: asyncio.Event, over: asyncio.Event) -> None:
        tries.append("hangs")
        try:
            await asyncio.Event().wait()
        finally:
            tries.append("ended")

    async def lasts(up: asyncio.Event, over: asyncio.Event) -> None:
        tries.append("lasts")
        up.set()
        await over.wait()

    works = {"broken": broken, "breaks": breaks, "hangs": hangs, "lasts": lasts}
    made = supply(*(Part(resources(name), work) for name, work in works.items()), there=running)
    strand = BackgroundTask("what is supplied", made.run)
    await until(lambda: running)
    assert not strand.task.done()
    await strand.stop(10)
    assert (tries, running) == (["breaks", "hangs", "ended", "lasts"], ["lasts"])
    told = [each.getMessage() for each in caplog.records if "it cannot run here" in each.getMessage()]
    assert [each.split("'")[1] for each in told] == ["broken", "breaks", "hangs"]


async def test_servers_that_are_starting_when_the_head_stops_are_stopped_too() -> None:
    said: list[str] = []

    async def slow(up: asyncio.Event, over: asyncio.Event) -> None:
        said.append("began")
        await over.wait()
        said.append("ended")

    strand = BackgroundTask("what is supplied", supply(Part(resources("slow"), slow), there=[], starting=600).run)
    await until(lambda: said)
    await strand.stop(0.1)
    await until(strand.task.done)
    assert said == ["began", "ended"]
