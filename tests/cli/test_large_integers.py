"""Integers beyond 64 bits survive rows, tool arguments, verdicts, files, and resumed and served runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.conftest import Command, Start

GOLD = 10**23 + 1
"""No double holds it: the nearest one is 10**23 - 8388608."""

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
    """The environment `large`, installed."""
    installed("large", LARGE)


def lines(path: Path) -> list[dict[str, Any]]:
    return sorted(map(json.loads, path.read_text().splitlines()), key=lambda line: int(line["gold"]))


def check(path: Path) -> None:
    """Check that the rollouts at *path* earn what is right and hold each integer as it was written."""
    found = lines(path)
    assert [(line["reward"], line["gold"], line["seen"]) for line in found] == [
        (1.0, GOLD + more, GOLD + more) for more in range(2)
    ]
    for line in found:
        assert line["nested"]["all"] == [line["gold"], -line["gold"], 2**63, 2**64, 10**400]
        assert line["power"] == 10**400


@pytest.mark.usefixtures("large")
def test_a_run_in_process_is_written_resumed_and_judged_again(gymsdk: Command, there: Path) -> None:
    assert gymsdk("tasks", "large", "-o", "rows.jsonl").code == 0
    assert [row["gold"] for row in lines(there / "rows.jsonl")] == [GOLD, GOLD + 1]
    for words in (["large"], ["large", "--tasks", "rows.jsonl"]):
        ended = gymsdk("rollout", *words, "-o", "out", "--overwrite")
        assert ended.code == 0, ended.err
        check(there / "out" / "rollouts.jsonl")
    path = there / "out" / "rollouts.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    assert gymsdk("rollout", "large", "--tasks", "rows.jsonl", "-o", "out", "--resume").code == 0
    check(path)
    told = json.loads(gymsdk("reverify", "out", "--json", "-o", "again.jsonl").out)
    assert (told["rollouts"], told["changed"], told["unscored"]) == (2, [], [])
    check(there / "again.jsonl")
    for more in ([], ["--gym"], ["--tasks", "rows.jsonl"]):
        ended = gymsdk("play", "large", "--model", "scripted/oracle", "--json", *more)
        played = json.loads(ended.out)
        assert (played["reward"], played["row"]["gold"], played["verdict"]["power"]) == (1.0, GOLD, 10**400)


@pytest.mark.usefixtures("large")
def test_served_rows_earn_what_they_earn_in_process(gymsdk: Command, start: Start, there: Path) -> None:
    gymsdk("tasks", "large", "-o", "rows.jsonl")
    process = start("serve", "large", "--port", 0, "--json")
    assert process.stdout is not None
    told = json.loads(process.stdout.readline())
    assert gymsdk("rollout", "--head", told["head"], "--tasks", "rows.jsonl", "-o", "out").code == 0
    check(there / "out" / "rollouts.jsonl")
    row = lines(there / "rows.jsonl")[0]
    with httpx.Client(base_url=told["servers"]["large"]["url"]) as client:
        client.post("/seed_session", json=row).raise_for_status()
        answer = client.post("/submit", json={"number": GOLD})
        items = [
            {"type": "function_call", "name": "submit", "arguments": f'{{"number": {GOLD}}}', "call_id": "c"},
            {"type": "function_call_output", "call_id": "c", "output": answer.text},
        ]
        verdict = client.post("/verify", json={**row, "response": {"output": items}}).json()
        client.cookies.clear()
        alone = client.post("/verify", json={**row, "response": {"output": items}}).json()
        long = client.post("/verify", content=b'{"gold": %s}' % (b"1" * 5_000_000))
    assert answer.json() == {"number": GOLD}
    assert [each["reward"] for each in (verdict, alone)] == [1.0, 1.0]
    assert [each["gold"] for each in (verdict, alone)] == [GOLD, GOLD]
    assert (long.status_code, "5,000,000 digits" in long.text) == (422, True)
