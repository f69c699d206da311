"""Nodes on several addresses, known to one head: they come, go, are killed, and make rollouts together meanwhile."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from deployed import Deployed, Run, command, named, nodes, serving, until

from gymsdk import ServerClient


def free(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as one:
        port: int = one.getsockname()[1]
        return port


async def has(head: str, *names: str) -> bool:
    return all([await named(head, name) for name in names])


async def urls(head: str, name: str) -> list[str]:
    return [each["url"] for each in (await nodes(head))["instances"] if each["name"] == name]


async def is_at(head: str, name: str, *wanted: str) -> bool:
    return sorted(await urls(head, name)) == sorted(wanted)


async def test_nodes_of_one_role_each_make_rollouts_with_an_agent_that_the_head_supplies(tmp_path: Path) -> None:
    head = f"http://127.0.0.1:{(port := free())}"
    async with AsyncExitStack() as stack:

        def begun(*words: object) -> asyncio.Future[Deployed]:
            return asyncio.ensure_future(stack.enter_async_context(serving(*words)))

        # Those that are not the head wait for it.
        waiting = [
            begun("tool_call", "--role", "resources", "--host", "127.0.0.2", "--head", head),
            begun("tool_call", "--role", "model", "--model", "scripted/oracle", "--host", "127.0.0.3", "--head", head),
        ]
        await begun("--role", "head", "--port", port)
        resources, model = await asyncio.gather(*waiting)
        assert [each.url(name)[:17] for each, name in ((resources, "tool_call"), (model, "policy_model"))] == [
            "http://127.0.0.2:",
            "http://127.0.0.3:",
        ]
        await until(lambda: has(head, "tool_call_simple_agent", "tool_call_environment_server"))
        run = Run(head, ("tool_call",), tmp_path / "run", 10, 2)
        await run.end(await run.begin())
        assert {reward for reward, _ in run.content().values()} == {1.0}
        # Whoever leaves is gone at once.
        assert await resources.ended() == 0
        assert await urls(head, "tool_call") == []


async def test_an_agent_s_own_node_goes_before_what_the_head_supplies() -> None:
    async with serving("tool_call", "--port", 0) as one, serving("math", "--role", "resources", "--head", one.head):
        await until(lambda: has(one.head, "math_simple_agent"))
        supplied = await ServerClient(one.head).url("math_simple_agent")
        async with serving("math", "--role", "agent", "--head", one.head) as agents:
            assert await ServerClient(one.head).url("math_simple_agent") == agents.url("math_simple_agent")
        assert await ServerClient(one.head).url("math_simple_agent") == supplied


async def test_what_the_head_supplies_is_reached_where_the_head_is() -> None:
    words = ("+head_server.host=127.0.0.2", f"+head_server.port={free('127.0.0.2')}")
    async with serving("tool_call", *words) as one, serving("math", "--role", "resources", "--head", one.head):
        await until(lambda: has(one.head, "math_simple_agent"))
        assert [url[:17] for url in await urls(one.head, "math_simple_agent")] == ["http://127.0.0.2:"]


async def test_a_role_expects_all_that_makes_rollouts_with_it() -> None:
    async with serving("math", "--role", "head", "--port", 0) as one:
        code, said = await command("status", "--head", one.head)
        assert (code, "! policy_model is expected but not registered" in said) == (1, True)
    async with (
        serving("--role", "head", "--port", 0) as one,
        serving("math", "--role", "agent", "--head", one.head),
        serving("math", "--role", "resources", "--head", one.head),
    ):
        code, said = await command("status", "--head", one.head)
        assert (code, "! policy_model is expected but not registered" in said) == (1, True)
        async with serving("math", "--role", "model", "--model", "scripted/oracle", "--head", one.head):
            code, said = await command("status", "--head", one.head)
            assert (code, "4 of 4 expected servers registered" in said) == (0, True)


async def test_of_two_nodes_begun_at_once_one_is_the_head_and_the_other_joins() -> None:
    words = ("+head_server.host=127.0.0.2", f"+head_server.port={free('127.0.0.2')}")
    async with AsyncExitStack() as stack:
        both = await asyncio.gather(
            *(stack.enter_async_context(serving(name, *words)) for name in ("tool_call", "math"))
        )
        assert len({each.head for each in both}) == 1
        assert await has(both[0].head, "tool_call_simple_agent", "math_simple_agent")


async def test_nodes_are_known_again_to_a_head_that_was_killed_and_is_back() -> None:
    head = f"http://127.0.0.1:{(port := free())}"
    words = ("--role", "resources", "--head", head, "--host", "127.0.0.2", "--advertise-host", "127.0.0.4")
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(serving("--role", "head", "--port", port))
        one = await stack.enter_async_context(serving("tool_call", *words))
        # It is told of by another host than it listens at.
        assert one.url("tool_call").startswith("http://127.0.0.4:")
        assert await is_at(head, "tool_call", one.url("tool_call"))
        await first.ended(signal.SIGKILL)
        await stack.enter_async_context(serving("--role", "head", "--port", port))
        await until(lambda: is_at(head, "tool_call", one.url("tool_call")))


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_second_node_takes_over_from_a_first_that_is_killed_during_300_rollouts(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:

        async def begun(*words: object) -> Deployed:
            return await stack.enter_async_context(serving(*words))

        head = (await begun("--role", "head", "--port", 0)).head
        model = ("--role", "model", "--model", "scripted/oracle:0.7", "--host", "127.0.0.4", "--head", head)
        await begun("math", *model)
        first = await begun("math", "--role", "resources", "--host", "127.0.0.2", "--head", head)
        await until(lambda: has(head, "math_simple_agent"))
        calm, run = (Run(head, ("math",), tmp_path / name, 60, 5) for name in ("calm", "run"))
        await calm.end(await calm.begin())

        playing = await run.begin()
        await run.reached(50)
        second = await begun("math", "--role", "resources", "--host", "127.0.0.3", "--head", head)
        assert await is_at(head, "math", first.url("math"), second.url("math"))
        await run.reached(150)
        await first.ended(signal.SIGKILL)
        killed = time.monotonic()
        await asyncio.wait_for(playing.communicate(), 120)
        # What went with the first is played again at the second, within the run.
        assert (run.failures(), run.count()) == ([], run.all)
        assert run.content() == calm.content()
        await until(lambda: is_at(head, "math", second.url("math")), killed + 15 - time.monotonic())
