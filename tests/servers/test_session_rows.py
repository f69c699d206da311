"""A session is found by its row, whatever a table or a client does to the row's nulls; where it is not, nobody guesses.

The environment here has a live tool: what it answers cannot be had again by replaying the calls, so that a verdict
without the session gives 0.0 where the session's gives 1.0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gymsdk import Environment, load, wire
from gymsdk.servers import resources
from gymsdk.transcript import Item
from tests.servers.conftest import Serving

LIVE = """
import secrets

class Ticket(State):
    number: str = ""

@hookimpl
async def reset(task):
    return Reset(state=Ticket())

async def draw(state: State) -> str:
    "Draw a ticket."
    state.number = secrets.token_hex(8)
    return state.number

@hookimpl
def tools():
    return [draw]

@hookimpl
async def verify(state: Ticket, transcript: Transcript):
    return Verdict(reward=float(transcript.text() == state.number))
"""

PROMPT = {"input": [{"role": "user", "content": "draw a ticket and read it out"}]}

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=4), each, max_size=4),
    max_leaves=12,
)
ROWS = st.dictionaries(st.sampled_from(["gold", "call", "meta", "nested"]), VALUES, max_size=4)


def filled(value: Any) -> Any:
    """Return *value* as a table has it that unites many rows: each object has one more member, which is null."""
    if isinstance(value, dict):
        return {key: filled(each) for key, each in value.items()} | {"of another row": None}
    return [filled(each) for each in value] if isinstance(value, list) else value


def stripped(value: Any) -> Any:
    """Return *value* as a client sends it that leaves out what is null."""
    if isinstance(value, dict):
        return {key: stripped(each) for key, each in value.items() if each is not None}
    return [stripped(each) for each in value] if isinstance(value, list) else value


def seed_body(row: Item, *, typed: bool) -> Item:
    if not typed:
        return row
    ids = {"episode_id": {"rollout_id": "r"}, "task_id": {"taskset": "t", "task_id": 1}}
    return {"resources_session_id": "s", **ids, "task_data": row}


async def drawn(client: httpx.AsyncClient, seeded: Item, verified: Item, *, calls: int = 1) -> httpx.Response:
    """Open a session with the body *seeded*, draw a ticket, and have the right reply judged for the row *verified*."""
    (await client.post("/seed_session", json=seeded)).raise_for_status()
    items, ticket = [], ""
    for number in range(calls):
        ticket = (await client.post("/draw", json={})).text
        items += [wire.function_call("draw", {}, f"c{number}"), wire.function_call_output(f"c{number}", ticket)]
    return await client.post("/verify", json={**verified, "response": {"output": [*items, wire.message(ticket)]}})


@pytest.fixture
def live(made: Callable[..., object]) -> Callable[[], Environment]:
    """An environment whose tool gives another answer each time it is called."""
    plugin = made(LIVE, "live_env")
    return lambda: Environment("live", plugin, {})


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fields=ROWS,
    index=st.sampled_from([{}, {"_ng_task_index": 3}]),
    typed=st.booleans(),
    kept=st.sampled_from([lambda row: row, stripped, filled]),
    sent=st.sampled_from([lambda row: row, stripped, filled]),
)
def test_nulls_at_any_depth_lose_no_session(
    serving: Serving,
    live: Callable[[], Environment],
    fields: Item,
    index: Item,
    typed: bool,
    kept: Callable[[Any], Any],
    sent: Callable[[Any], Any],
) -> None:
    async def played() -> Item:
        row = {**fields, **index, "responses_create_params": PROMPT}
        async with serving(live()) as client:
            answer = await drawn(client, seed_body(kept(row), typed=typed), sent(row))
        found: Item = answer.json()
        return found

    verdict = asyncio.run(played())
    assert (verdict["reward"], verdict["gymsdk"].get("session_unused")) == (1.0, None)


@pytest.mark.parametrize("typed", [False, True])
async def test_every_row_of_a_shipped_environment_finds_its_session(listening: Any, typed: bool) -> None:
    rows = [task.row() for task in islice(load("tool_call").tasks("validation"), 40)]
    assert any(row != stripped(row) for row in rows), "some rows have nulls of their own"
    unused = []
    async with listening(resources.app(load("tool_call"))) as url, httpx.AsyncClient(base_url=url) as client:
        for number, row in enumerate(rows):
            client.cookies.clear()
            body = seed_body(row, typed=typed) | ({"resources_session_id": f"s{number}"} if typed else {})
            (await client.post("/seed_session", json=body)).raise_for_status()
            answer = await client.post("/verify", json={**row, "response": {"output": [wire.message("?")]}})
            unused += [(answer.status_code, answer.json()["gymsdk"].get("session_unused"))]
    assert unused == [(200, None)] * len(rows)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gold": 2}, "the field 'gold' differs"),
        ({"responses_create_params": {"input": "another prompt"}}, "the prompt differs"),
        ({"_ng_task_index": 4}, "the seed or the task index differs"),
    ],
)
async def test_a_session_that_does_not_match_is_refused_and_says_why(
    serving: Serving, live: Callable[[], Environment], change: Item, said: str
) -> None:
    row = {"gold": 1, "_ng_task_index": 3, "responses_create_params": PROMPT}
    async with serving(live()) as client:
        answer = await drawn(client, row, {**row, **change})
        told = answer.json()
        right = await client.post("/verify", json={**row, "response": {"output": [wire.message("?")]}})
    assert (answer.status_code, told["kind"], "reward" in told) == (409, "session_mismatch", False)
    assert said in told["detail"]
    assert (right.status_code, right.json()["reward"]) == (200, 0.0), "the session stays for its own row"


async def test_calls_that_the_session_never_saw_are_not_replayed(
    serving: Serving, live: Callable[[], Environment]
) -> None:
    row = {"gold": 1, "responses_create_params": PROMPT}
    items = [wire.function_call("draw", {}, "c"), wire.function_call_output("c", "x"), wire.message("x")]
    async with serving(live()) as client:
        await client.post("/seed_session", json=row)
        answer = await client.post("/verify", json={**row, "response": {"output": items}})
    assert (answer.status_code, answer.json()["kind"]) == (409, "session_mismatch")
    assert "has seen none of the calls" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("name", "arguments", "output"),
    [
        ("no_such_tool", {}, '{"detail":"Not Found"}'),
        ("draw", '{"broken', '{"error": "Invalid tool call arguments: not JSON"}'),
        ("draw", {}, '{"error":"not run: the episode is over"}'),
    ],
)
async def test_calls_that_agents_answer_themselves_lose_no_session(
    serving: Serving, live: Callable[[], Environment], name: str, arguments: Any, output: str
) -> None:
    row = {"gold": 1, "responses_create_params": PROMPT}
    items = [wire.function_call(name, arguments, "c"), wire.function_call_output("c", output), wire.message("?")]
    async with serving(live()) as client:
        await client.post("/seed_session", json=row)
        answer = await client.post("/verify", json={**row, "response": {"output": items}})
    assert (answer.status_code, answer.json()["reward"]) == (200, 0.0)
    assert "session_unused" not in answer.json()["gymsdk"]


async def test_one_cookie_jar_serves_one_row_after_another(serving: Serving, live: Callable[[], Environment]) -> None:
    rows = [{"gold": number, "responses_create_params": PROMPT} for number in range(3)]
    async with serving(live()) as client:
        rewards = [(await drawn(client, row, row)).json()["reward"] for row in rows]
        # The session of the last row has its verdict: its cookie says nothing about this row.
        alone = await client.post(
            "/verify", json={**rows[0], "gold": 9, "response": {"output": [wire.message("a guess")]}}
        )
    assert rewards == [1.0, 1.0, 1.0]
    assert (alone.status_code, alone.json()["reward"]) == (200, 0.0)
    assert "one of another row" in alone.json()["gymsdk"]["session_unused"]


async def test_one_cookie_jar_holds_the_sessions_of_many_rows_until_they_are_verified(
    serving: Serving, live: Callable[[], Environment]
) -> None:
    rows = [{"gold": number, "responses_create_params": PROMPT} for number in range(14)]
    async with serving(live()) as client:
        for row in rows:
            await client.post("/seed_session", json=row)
        answers = [
            await client.post("/verify", json={**row, "response": {"output": [wire.message("a guess")]}})
            for row in rows
        ]
    assert [answer.status_code for answer in answers] == [200] * len(rows)
