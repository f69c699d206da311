"""Integers beyond 64 bits survive rows, tool arguments, verdicts, files, and resumed and served runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.conftest import Command, StartServer

GOLD = 10**23 + 1
"""No float holds this number: the nearest float is 10**23 - 8388608."""

LARGE = f"""
from typing import Any, Literal
from gymsdk import Message, Reset, State, Task, ToolCall, Verdict, hookimpl

class Row(Task):
    gold: int
    nested: dict[str, Any] = {{}}

class Memory(State):
    number: int = 0

class Seen(Verdict):
    seen: int
    power: int = 10**400

async def submit(number: int, state: State) -> dict[str, int]:
    "Hand in a number."
    state.number = number
    return {{"number": number}}

@hookimpl
def tools():
    return [submit]

@hookimpl
def tasks(split: Literal["example"]):
    for more in range(2):
        gold = {GOLD} + more
        yield Row.ask("Hand in the number.", gold=gold, nested={{"all": [gold, -gold, 2**63, 2**64, 10**400]}})

@hookimpl
async def reset(task: Row):
    return Reset(state=Memory())

@hookimpl
async def verify(task: Row, state: Memory):
    return Seen(reward=float(task.gold == state.number == task.nested["all"][0]), seen=state.number)

@hookimpl
def solve(task: Row, transcript):
    if transcript.calls("submit"):
        return Message(content="done")
    return [ToolCall(name="submit", arguments={{"number": task.gold}})]
"""


@pytest.fixture
def large(installed: Callable[..., Path]) -> None:
    """Install the environment `large`."""
    installed("large", LARGE)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return sorted(map(json.loads, path.read_text().splitlines()), key=lambda line: int(line["gold"]))


def check_rollouts(path: Path) -> None:
    """Check that the rollouts at *path* have the right rewards and hold every integer unchanged."""
    rollouts = read_lines(path)
    assert [(line["reward"], line["gold"], line["seen"]) for line in rollouts] == [
        (1.0, GOLD + more, GOLD + more) for more in range(2)
    ]
    for line in rollouts:
        assert line["nested"]["all"] == [line["gold"], -line["gold"], 2**63, 2**64, 10**400]
        assert line["power"] == 10**400


@pytest.mark.slow
@pytest.mark.usefixtures("large")
def test_a_run_in_process_is_written_resumed_and_verified_again(gymsdk: Command, workdir: Path) -> None:
    assert gymsdk("tasks", "large", "-o", "rows.jsonl").code == 0
    assert [row["gold"] for row in read_lines(workdir / "rows.jsonl")] == [GOLD, GOLD + 1]
    for arguments in (["large"], ["large", "--tasks", "rows.jsonl"]):
        result = gymsdk("rollout", *arguments, "-o", "out", "--overwrite")
        assert result.code == 0, result.err
        check_rollouts(workdir / "out" / "rollouts.jsonl")
    path = workdir / "out" / "rollouts.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    assert gymsdk("rollout", "large", "--tasks", "rows.jsonl", "-o", "out", "--resume").code == 0
    check_rollouts(path)
    output = json.loads(gymsdk("reverify", "out", "--json", "-o", "again.jsonl").out)
    assert (output["rollouts"], output["changed"], output["unscored"]) == (2, [], [])
    check_rollouts(workdir / "again.jsonl")
    for more in ([], ["--gym"], ["--tasks", "rows.jsonl"]):
        result = gymsdk("play", "large", "--model", "scripted/oracle", "--json", *more)
        played = json.loads(result.out)
        assert (played["reward"], played["row"]["gold"], played["verdict"]["power"]) == (1.0, GOLD, 10**400)


@pytest.mark.usefixtures("large")
@pytest.mark.slow
def test_served_rows_have_the_rewards_of_rows_in_process(
    gymsdk: Command, start_server: StartServer, workdir: Path
) -> None:
    gymsdk("tasks", "large", "-o", "rows.jsonl")
    _, output = start_server("serve", "large")
    assert gymsdk("rollout", "--head", output["head"], "--tasks", "rows.jsonl", "-o", "out").code == 0
    check_rollouts(workdir / "out" / "rollouts.jsonl")
    row = read_lines(workdir / "rows.jsonl")[0]
    with httpx.Client(base_url=output["servers"]["large"]["url"]) as client:
        client.post("/seed_session", json=row).raise_for_status()
        response = client.post("/submit", json={"number": GOLD})
        items = [
            {"type": "function_call", "name": "submit", "arguments": f'{{"number": {GOLD}}}', "call_id": "c"},
            {"type": "function_call_output", "call_id": "c", "output": response.text},
        ]
        verdict = client.post("/verify", json={**row, "response": {"output": items}}).json()
        client.cookies.clear()
        sessionless = client.post("/verify", json={**row, "response": {"output": items}}).json()
        long = client.post("/verify", content=b'{"gold": %s}' % (b"1" * 5_000_000))
    assert response.json() == {"number": GOLD}
    assert [answer["reward"] for answer in (verdict, sessionless)] == [1.0, 1.0]
    assert [answer["gold"] for answer in (verdict, sessionless)] == [GOLD, GOLD]
    assert (long.status_code, "5,000,000 digits" in long.text) == (422, True)
