"""A session is found by its row, whatever a table or a client does to the row's nulls, and never guessed.

The environment of these tests has a live tool: replaying the calls cannot reproduce its outputs, so a verdict
without the session gives 0.0 where the session's gives 1.0.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gymsdk import Environment, responses
from gymsdk.types import Item

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

BASKET = """
class Basket(State):
    counts: dict[str, int] = {}

@hookimpl
async def reset(task):
    return Reset(state=Basket())

async def add(state: State, item: str, count: int = 1) -> str:
    "Add to the basket."
    state.counts[item] = state.counts.get(item, 0) + count
    return "added"

async def look(state: State) -> str:
    "Look into the basket."
    return str(state.counts)

@hookimpl
def tools():
    return [add, look]

@hookimpl
async def verify(task, state: Basket):
    return Verdict(reward=float(state.counts == {"pear": 1}))
"""
"""Source of an environment with a verdict that uses only the state."""

PROMPT = {"input": [{"role": "user", "content": "draw a ticket and read it out"}]}

ROW = {"gold": 1, "responses_create_params": PROMPT}
KEY = "X-NeMo-Gym-Session-Token"

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda member: st.lists(member, max_size=4) | st.dictionaries(st.text(max_size=4), member, max_size=4),
    max_leaves=12,
)
ROWS = st.dictionaries(st.sampled_from(["gold", "call", "meta", "nested"]), VALUES, max_size=4)


def add_nulls(value: Any) -> Any:
    """Return *value* as in a table that unites many rows: each object has one more member, which is null."""
    if isinstance(value, dict):
        return {key: add_nulls(member) for key, member in value.items()} | {"of another row": None}
    return [add_nulls(member) for member in value] if isinstance(value, list) else value


def drop_nulls(value: Any) -> Any:
    """Return *value* as a client sends it that omits nulls."""
    if isinstance(value, dict):
        return {key: drop_nulls(member) for key, member in value.items() if member is not None}
    return [drop_nulls(member) for member in value] if isinstance(value, list) else value


def seed_body(row: Item, number: int = 0, *, typed: bool) -> Item:
    ids = {"episode_id": {"rollout_id": f"r{number}"}, "task_id": {"taskset": "t", "task_id": 1}}
    return {"resources_session_id": f"s{number}", **ids, "task_data": row} if typed else row


async def draw_and_verify(client: httpx.AsyncClient, seeded: Item, verified: Item) -> httpx.Response:
    """Open a session with the body *seeded*, draw a ticket, and verify the right reply for the row *verified*."""
    (await client.post("/seed_session", json=seeded)).raise_for_status()
    ticket = (await client.post("/draw", json={})).text
    items = [responses.build_function_call("draw", {}, "c"), responses.build_function_call_output("c", ticket)]
    return await verify(client, [*items, responses.build_message(ticket)], verified)


@pytest.fixture
def live(made):
    """Return a function that builds an environment with a tool that returns another output on each call."""
    plugin = made(LIVE, "live_env")
    return lambda: Environment("live", plugin, {})


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fields=ROWS,
    index=st.sampled_from([{}, {"_ng_task_index": 3}]),
    typed=st.booleans(),
    stored=st.sampled_from([lambda row: row, drop_nulls, add_nulls]),
    sent=st.sampled_from([lambda row: row, drop_nulls, add_nulls]),
)
def test_nulls_at_any_depth_lose_no_session(resources_client, live, fields, index, typed, stored, sent):
    async def run_session() -> Item:
        row = {**fields, **index, "responses_create_params": PROMPT}
        async with resources_client(live()) as client:
            return (await draw_and_verify(client, seed_body(stored(row), typed=typed), sent(row))).json()

    verdict = asyncio.run(run_session())
    assert (verdict["reward"], verdict["gymsdk"].get("session_unused")) == (1.0, None)


async def test_a_session_that_does_not_match_is_rejected_with_the_reason(resources_client, live):
    row = ROW | {"_ng_task_index": 3}
    for change, reason in (
        ({"gold": 2}, "the field 'gold' differs"),
        ({"responses_create_params": {"input": "another prompt"}}, "the prompt differs"),
        ({"_ng_task_index": 4}, "the seed or the task index differs"),
    ):
        async with resources_client(live()) as client:
            answer = await draw_and_verify(client, row, {**row, **change})
            right = await verify(client, [responses.build_message("?")], row)
        body = answer.json()
        assert (answer.status_code, body["kind"], "reward" in body) == (409, "session_mismatch", False)
        assert reason in body["detail"]
        assert (right.status_code, right.json()["reward"]) == (200, 0.0), "the session is kept for its own row"


async def test_calls_that_agents_answer_themselves_lose_no_session(resources_client, live):
    for name, arguments, output in (
        ("no_such_tool", {}, '{"detail":"Not Found"}'),
        ("draw", '{"broken', '{"error": "Invalid tool call arguments: not JSON"}'),
        ("draw", {}, '{"error":"not run: the episode is over"}'),
    ):
        call = responses.build_function_call(name, arguments, "c")
        items = [call, responses.build_function_call_output("c", output), responses.build_message("?")]
        async with resources_client(live()) as client:
            await client.post("/seed_session", json=ROW)
            answer = await verify(client, items)
        assert (answer.status_code, answer.json()["reward"]) == (200, 0.0)
        assert "session_unused" not in answer.json()["gymsdk"]


async def test_one_cookie_jar_serves_one_row_after_another_and_many_rows_until_they_are_verified(
    resources_client, live
):
    guess = [responses.build_message("a guess")]
    async with resources_client(live()) as client:
        rows = [ROW | {"gold": number} for number in range(3)]
        rewards = [(await draw_and_verify(client, row, row)).json()["reward"] for row in rows]
        # The session of the last row has its verdict; its cookie does not affect this row.
        alone = await verify(client, guess, ROW | {"gold": 9})
        many = [ROW | {"gold": number} for number in range(10, 24)]
        for row in many:
            await client.post("/seed_session", json=row)
        answers = [await verify(client, guess, row) for row in many]
    assert rewards == [1.0, 1.0, 1.0]
    assert (alone.status_code, alone.json()["reward"]) == (200, 0.0)
    assert "not opened with this row" in alone.json()["gymsdk"]["session_unused"]
    assert [answer.status_code for answer in answers] == [200] * len(many)


@pytest.fixture
def basket(made):
    """Return an environment with a verdict that uses only the state."""
    return Environment("basket", made(BASKET, "basket_env"), {})


PEAR = '{"item": "pear"}'


def build_items(*calls: tuple[str, Any]) -> list[Item]:
    """Return the items of a response with *calls* and their outputs."""
    items = []
    for number, (name, arguments) in enumerate(calls):
        items.append(responses.build_function_call("", {}, f"c{number}") | {"name": name, "arguments": arguments})
        items.append(responses.build_function_call_output(f"c{number}", "added"))
    return [*items, responses.build_message("done")]


async def send(client: httpx.AsyncClient, interface: str, name: str, text: str) -> None:
    """Call a tool in the session of *client* by one of the interfaces that call tools."""
    if interface == "mcp":
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
        params = {"name": name, "arguments": json.loads(text)}
        answer = await client.post("/mcp", json={**call, "params": params})
        assert answer.json()["result"]["isError"] is False
    elif interface == "turns":
        output = [responses.build_function_call("", {}, "c") | {"name": name, "arguments": text}]
        (await client.post("/step", json={"response": {"output": output}})).raise_for_status()
    else:
        (await client.post(f"/{name}", content=text)).raise_for_status()


async def open_session(client: httpx.AsyncClient, interface: str, number: int = 0) -> None:
    """Open a session of `ROW` by one of the interfaces."""
    path = "/reset" if interface == "turns" else "/seed_session"
    answer = await client.post(path, json=seed_body(ROW, number, typed=interface == "typed"))
    if interface == "mcp":
        client.headers[KEY] = answer.json()["mcp"]["headers"][KEY]


async def verify(client: httpx.AsyncClient, items: list[Item], row: Item = ROW) -> httpx.Response:
    return await client.post("/verify", json={**row, "response": {"output": items}})


@pytest.mark.parametrize("interface", ["tools", "typed", "turns", "mcp"])
async def test_a_session_that_received_other_calls_is_not_judged(resources_client, basket, interface):
    async with resources_client(basket, with_mcp=True) as client:
        await open_session(client, interface)
        await send(client, interface, "add", PEAR)
        for calls, reason in (
            ([("add", '{"item": "plum", "count": 1}')], "None of the response's tool calls was sent to the cookie's"),
            ([("add", PEAR), ("look", "{}")], "Some of the response's tool calls were not sent"),
            ([("add", PEAR), ("add", PEAR)], "the first is a call of 'add'"),
        ):
            other = await verify(client, build_items(*calls))
            body = other.json()
            assert (other.status_code, body["kind"], "reward" in body) == (409, "session_mismatch", False)
            assert reason in body["detail"]
        own = await verify(client, build_items(("add", PEAR)))
    assert (own.status_code, own.json()["reward"]) == (200, 1.0)


@pytest.mark.parametrize("interface", ["tools", "typed", "turns", "mcp"])
async def test_a_call_is_recognised_however_its_arguments_are_written(resources_client, basket, interface):
    async with resources_client(basket, with_mcp=True) as client:
        for number, (sent, written) in enumerate(
            (
                ('{"item":"pear","count":null}', '{ "item": "pear" }'),
                (PEAR, '{"count": null, "item": "pear"}'),
                (PEAR, {"item": "pear"}),
                ('{"item": "pear", "count": 1}', PEAR),
                (PEAR, '{"item": "pear", "count": 1.0}'),
                ('{"item": "pear", "count": 1}', '{"item": "pear", "count": "1"}'),
            )
        ):
            await open_session(client, interface, number)
            await send(client, interface, "add", sent)
            answer = await verify(client, build_items(("add", written)))
            assert (answer.status_code, answer.json().get("reward")) == (200, 1.0), (sent, written)


async def test_a_repeated_call_loses_no_session(resources_client, basket):
    async with resources_client(basket) as client:
        await open_session(client, "tools")
        for _ in range(2):
            await send(client, "tools", "add", PEAR)
        answer = await verify(client, build_items(("add", PEAR)))
    assert (answer.status_code, answer.json()["reward"]) == (200, 0.0), "the session has two pears"
    assert "session_unused" not in answer.json()["gymsdk"]


async def test_of_several_sessions_the_one_that_received_the_calls_is_judged(resources_client, basket):
    async with resources_client(basket) as client:
        for items in (["pear"], ["plum", "plum"], []):
            await open_session(client, "tools")
            for item in items:
                await send(client, "tools", "add", json.dumps({"item": item}))
        answer = await verify(client, build_items(("add", '{"item": "pear"}')))
    assert (answer.status_code, answer.json()["reward"]) == (200, 1.0)
    assert answer.json()["gymsdk"]["session_unused"] == (
        "The cookie's session was opened after the session that played this response. The earlier session was judged."
    )


async def test_a_call_that_its_tool_rejects_need_not_have_been_sent(resources_client, basket):
    for arguments in ("{}", '{"item": "pear", "count": "many"}', '{"item": "pear", "colour": "red"}'):
        async with resources_client(basket) as client:
            await open_session(client, "tools")
            answer = await verify(client, build_items(("add", arguments)))
            assert (answer.status_code, answer.json().get("reward")) == (200, 0.0)
            assert "session_unused" not in answer.json()["gymsdk"]
            await open_session(client, "tools")
            await send(client, "tools", "add", PEAR)
            answer = await verify(client, build_items(("add", arguments), ("add", PEAR)))
        assert (answer.status_code, answer.json().get("reward")) == (200, 1.0)


LEADING = [{"role": "developer", "content": "Be brief."}, {"role": "system", "content": "You are an agent."}]
USER = {"role": "user", "content": "draw a ticket and read it out"}
SYSTEM = {"role": "system", "content": "Play fair."}


@pytest.mark.parametrize(
    ("opened", "verified", "accepted"),
    [
        ({"_ng_task_index": 3}, {}, True),
        ({}, {"_ng_task_index": 3}, True),
        ({"_ng_task_index": 3}, {"_ng_task_index": 4}, False),
        ({"gymsdk": {"seed": 7}}, {"_ng_task_index": 4}, False),
        ({}, {"ng_trajectory": [], "_rowidx": 3, "extra": 1, "other": None}, True),
        ([USER], [USER | {"type": "message"}], True),
        ([USER], [*LEADING, USER], True),
        ([SYSTEM, USER], [*LEADING, SYSTEM, USER], True),
        ([SYSTEM, USER], [{"role": "system", "content": "You are an agent.\n\nPlay fair."}, USER], True),
        ([SYSTEM, USER], [*LEADING, USER], False),
        ([USER], [USER, *LEADING], False),
    ],
)
async def test_fields_that_agents_add_or_omit_lose_no_session(resources_client, basket, opened, verified, accepted):
    first, second = (
        ROW | (change if isinstance(change, dict) else {"responses_create_params": {"input": change}})
        for change in (opened, verified)
    )
    async with resources_client(basket) as client:
        seed = (await verify(client, [], first)).json()["gymsdk"]["seed"]
        await client.post("/seed_session", json=first)
        await send(client, "tools", "add", PEAR)
        answer = await verify(client, build_items(("add", PEAR)), second)
    body = answer.json()
    assert answer.status_code == (200 if accepted else 409)
    if accepted:
        assert (body["reward"], body["gymsdk"]["seed"], "session_unused" in body["gymsdk"]) == (1.0, seed, False)


async def test_an_exactly_matching_session_is_preferred(resources_client, basket):
    """A row may equal another row with a system prompt before it: its own session is judged."""
    rows = [ROW | {"responses_create_params": {"input": prompt}} for prompt in ([SYSTEM, USER], [USER])]
    calls = [("add", json.dumps({"item": item})) for item in ("pear", "plum")]
    async with resources_client(basket) as client:
        for row, (name, text) in zip(rows, calls, strict=True):
            await client.post("/seed_session", json=row)
            await send(client, "tools", name, text)
        answers = [await verify(client, build_items(call), row) for row, call in zip(rows, calls, strict=True)]
    assert [(answer.status_code, answer.json()["reward"]) for answer in answers] == [(200, 1.0), (200, 0.0)]
