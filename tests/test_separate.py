"""A process for each server: each may be killed or restarted at any time, and nothing outlives the one that began."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from deployed import Deployed, Run, command, named, nodes, serving, until

SERVERS = (
    "head_server",
    "math",
    "multineedle",
    "math_simple_agent",
    "multineedle_simple_agent",
    "math_environment_server",
    "policy_model",
)


def is_there(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def ports(one: Deployed) -> dict[str, str]:
    return {name: each["url"] for name, each in one.told["servers"].items()}


async def exit_of(one: Deployed, name: str) -> int | None:
    ended = (await nodes(one.head))["exits"].get(name)
    return ended["code"] if ended else None


async def is_well(one: Deployed) -> bool:
    found = (await nodes(one.head))["instances"]
    return {each["name"] for each in found if each["status"] == "success"} == set(ports(one))


async def test_each_server_is_a_process_that_is_killed_restarted_and_ended_by_itself(tmp_path: Path) -> None:
    async with serving("tool_call", "--separate", "--port", 0) as one:
        before, at = one.children(), ports(one)
        assert before.keys() == {"head_server", *at}

        run = Run(one.head, ("tool_call",), tmp_path / "run", 30, 4)
        playing = await run.begin()
        await run.reached(10)
        os.kill(before["tool_call"], signal.SIGKILL)
        os.kill(before["head_server"], signal.SIGKILL)
        await run.end(playing)
        assert len(run.content()) == 120

        await until(lambda: exit_of_is(one, "tool_call", -9))
        await until(lambda: exit_of_is(one, "head", -9))
        await until(lambda: is_well(one))
        after = one.children()
        assert {name for name in before if after[name] != before[name]} == {"tool_call", "head_server"}

        code, said = await command("restart", "tool_call_simple_agent", "--head", one.head)
        assert (code, "tool_call_simple_agent restarted; " in said) == (0, True)
        assert one.children()["tool_call_simple_agent"] != before["tool_call_simple_agent"]
        # Its supervisor tells of it with its next heartbeat.
        await until(lambda: exit_of_is(one, "tool_call_simple_agent", 0))
        assert {name: each["url"] for name in at for each in await named(one.head, name)} == at

        pids = list(one.children().values())
        assert await one.ended(signal.SIGINT) == 0
        assert not any(map(is_there, pids))


async def exit_of_is(one: Deployed, name: str, code: int) -> bool:
    return await exit_of(one, name) == code


async def test_a_server_that_is_killed_is_told_of_no_more_as_soon_as_its_end_is() -> None:
    async with serving("tool_call", "--separate", "--port", 0) as one:
        killed = one.children()["tool_call"]
        os.kill(killed, signal.SIGKILL)
        found: dict[str, Any] = {}

        async def is_told() -> bool:
            found.update(await nodes(one.head))
            return "tool_call" in found["exits"]

        await until(is_told)
        assert killed not in [each["pid"] for each in found["instances"]]
        await until(lambda: is_well(one))
        assert len(await named(one.head, "tool_call")) == 1


async def test_a_head_that_is_back_makes_rollouts_at_once(tmp_path: Path) -> None:
    words = ("tool_call", "--limit", 2, "--split", "validation")
    rows = tmp_path / "rows.jsonl"
    assert (await command("tasks", *words, "--output", rows))[0] == 0
    async with serving("tool_call", "--separate", "--port", 0) as one:
        assert (await command("restart", "head", "--head", one.head))[0] == 0
        assert await is_well(one)
        # Nobody has waited for this one.
        os.kill(one.children()["head_server"], signal.SIGKILL)
        code, said = await command("rollout", "--tasks", rows, "--head", one.head, "--output", tmp_path / "first")
        assert (code, "2 of 2" in said) == (0, True), said
        os.kill(one.children()["head_server"], signal.SIGKILL)
        code, said = await command("rollout", *words, "--head", one.head, "--output", tmp_path / "second")
        assert (code, "2 of 2" in said) == (0, True), said


async def test_what_is_restarted_has_to_be_there_and_somebodys_to_restart() -> None:
    async with serving("tool_call", "--port", 0) as one:
        code, said = await command("restart", "tool_cal", "--head", one.head)
        assert (code, said) == (1, "Error: unknown server 'tool_cal'; did you mean 'tool_call'?\n")
        code, said = await command("restart", "tool_call", "--head", one.head)
        sentence = "no supervisor can restart 'tool_call': serve it with --separate"
        assert (code, said) == (1, f"Error: {sentence}\n")
        await one.ended()
        code, said = await command("restart", "tool_call", "--head", one.head)
        assert (code, "no head answers at" in said, "gymsdk serve NAME --separate" in said) == (1, True, True)


async def test_no_server_outlives_a_supervisor_that_is_killed() -> None:
    async with serving("tool_call", "--separate", "--port", 0) as one:
        pids = list(one.children().values())
        assert len(pids) == 5
        await one.ended(signal.SIGKILL)
        await until(lambda: not any(map(is_there, pids)), 20)


async def test_a_run_comes_to_all_its_rollouts_over_restarts(tmp_path: Path) -> None:
    async with serving("multineedle", "--separate", "--port", 0) as one:
        run = Run(one.head, ("multineedle",), tmp_path / "run", 20, 10, concurrency=2)
        # The head hears of sessions by heartbeats: on a busy machine one may be cut, and is played again.
        playing = await run.begin()
        for count, name in ((10, "multineedle"), (100, "multineedle_simple_agent")):
            await run.reached(count)
            assert (await command("restart", name, "--head", one.head))[0] == 0
        await asyncio.wait_for(playing.communicate(), 60)
        assert (playing.returncode, len(run.content())) == (0, 200)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_whichever_server_is_killed_500_rollouts_come_to_the_same(tmp_path: Path) -> None:
    async with serving("math", "multineedle", "--separate", "--port", 0) as one:
        calm = Run(one.head, ("math", "multineedle"), tmp_path / "calm", 50, 5)
        await calm.end(await calm.begin())
        for name in SERVERS:
            run = Run(one.head, calm.names, tmp_path / name, 50, 5)
            playing = await run.begin()
            await run.reached(60)
            before = one.children()
            os.kill(before[name], signal.SIGKILL)
            await run.end(playing)
            assert run.content() == calm.content()
            await until(lambda: is_well(one))
            after = one.children()
            assert [each for each in before if after[each] != before[each]] == [name]


@pytest.mark.slow
async def test_the_whole_ends_well_in_the_midst_of_rollouts(tmp_path: Path) -> None:
    async with serving("math", "multineedle", "--separate", "--port", 0) as one:
        run = Run(one.head, ("math", "multineedle"), tmp_path / "run", 50, 5)
        playing = await run.begin("--attempts", 1)
        await run.reached(60)
        pids = list(one.children().values())
        assert await one.ended() == 0
        assert not any(map(is_there, pids))
        await asyncio.wait_for(playing.communicate(), 120)
        assert 60 <= len(run.content()) < 500
