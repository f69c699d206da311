"""The agent server, called as trainers call it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import httpx
import pytest
from fastapi import FastAPI, Response

from gymsdk import Environment, Failed, Model, Task, play
from gymsdk.edge.cookies import parse_cookies
from gymsdk.http.client import Retry, filter_cookies
from gymsdk.servers import agent, resources
from gymsdk.servers.remote import RemoteEnvironment
from gymsdk.types import Budget, Item

from .app_helpers import app_client, serve_app
from .engines import FixedModel, SlowModel
from .nodes import metric, wait_until

ROW = Task.ask("add", initial_count=1, expected_count=3).row()
TOOLS = [{"type": "function", "name": name, "parameters": {}} for name in ("increment_counter", "verify", "stumble")]
ADD = [("increment_counter", {"count": 2})]


async def run(environment: Environment, model: Model, row: Item = ROW, **options: Any) -> httpx.Response:
    """Return the answer of an agent to a request to play *row*."""
    async with app_client(agent.create_app(environment, model, **options)) as client:
        return await client.post("/run", json=row)


@pytest.fixture
def counting(counter):
    return counter()


async def test_run_returns_the_rollouts_line(counting, policy):
    row = ROW | {"_ng_task_index": 4, "_ng_rollout_index": 1, "agent_ref": {"name": "counter_simple_agent"}}
    async with app_client(agent.create_app(counting, policy(ADD, "done"))) as client:
        line = (await client.post("/run", json=row)).json()
        body = (await client.post("/aggregate_metrics", json={"verify_responses": [line]})).json()
        without = (await client.post("/run", json=ROW)).json()
    own = {key: value for key, value in row.items() if key != "responses_create_params"}
    assert own.items() <= line.items()
    assert (line["reward"], line["reward_components"], line["final"]) == (1.5, {"verdict": 1.0, "steps": 0.5}, 3)
    assert (line["mask_sample"], line["failure_kind"], line["gymsdk"]["id"]) == (False, None, "4:1")
    assert [item["type"] for item in line["response"]["output"]] == ["function_call", "function_call_output", "message"]
    assert body["agent_metrics"]["mean/reward"] == 1.5
    assert not [key for key in without if key.startswith("_ng_")]


async def test_a_row_can_set_its_seed_repeat_and_budget_which_is_limited_to_the_servers(counting, policy):
    own = {"seed": 11, "repeat": 2, "budget": {"turns": 1}}
    line = (await run(counting, policy(ADD, "done"), ROW | {"gymsdk": own})).json()
    assert (line["gymsdk"]["seed"], line["gymsdk"]["turns"], line["gymsdk"]["ended"]) == (11, 1, "turns")
    assert line["responses_create_params"]["input"][-1]["content"] == "seed 11"
    row = ROW | {"gymsdk": {"budget": {"turns": 9}}}
    line = (await run(counting, policy(ADD), row, budget=Budget(turns=2))).json()
    assert (line["gymsdk"]["turns"], line["gymsdk"]["ended"]) == (2, "turns")


async def test_a_row_that_does_not_fit_gets_422_with_a_message(counting, policy):
    unfit = "does not fit environment 'counter'"
    other = "'math_simple_agent', and this is 'counter_simple_agent'"
    async with app_client(agent.create_app(counting, policy("done"))) as client:
        for row, message in (
            ({}, unfit),
            ({"responses_create_params": {}}, unfit),
            (ROW | {"initial_count": "many"}, unfit),
            (ROW | {"agent_ref": {"name": "math_simple_agent"}}, other),
        ):
            answer = await client.post("/run", json=row)
            body = answer.json()
            assert (answer.status_code, message in body["detail"], "reward" in body) == (422, True, False), row


async def test_a_failure_names_its_stage_and_has_no_reward(counter, counting, policy):
    for retryable, status, pause in ((True, 503, 7), (False, 422, None)):
        failure = Failed("no answer", kind="model_error", retryable=retryable, retry_after=pause)
        answer = await run(counting, FixedModel(failure=failure))
        body = answer.json()
        assert (answer.status_code, answer.headers.get("retry-after")) == (status, pause and str(pause))
        assert (body["stage"], body["kind"], body["outcome"]) == ("model", "model_error", "failed")
        assert "reward" not in body
    answer = await run(counter(judge="down"), policy("done"))
    assert (answer.status_code, answer.json()["outcome"], answer.json()["kind"]) == (503, "unscorable", "judge_failed")


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        ("/run", {"_ng_rollout_id": "r1"}),
        ("/run", {"_ng_rollout_id": "3-0"}),
        ("/ng-rollout/r1/run", {}),
        ("/run", {"capture_rollout_id": "r1"}),
    ],
)
async def test_a_rollout_requested_twice_is_played_once_whatever_the_key_order(counting, path, extra):
    model, row = SlowModel(), ROW | extra
    async with app_client(agent.create_app(counting, model)) as client:
        bodies = (row, dict(reversed(row.items())))
        both = [asyncio.ensure_future(client.post(path, json=body)) for body in bodies]
        await wait_until(lambda: model.started == 1)
        model.released.set()
        answers = await asyncio.gather(*both)
        # Every collection has an id of the form TASK-REPEAT, so that only concurrent requests with it are one rollout.
        if extra != {"_ng_rollout_id": "3-0"}:
            answers.append(await client.post(path, json=row))
    assert model.started == 1
    assert len({answer.content for answer in answers}) == 1
    assert answers[0].json()["gymsdk"]["id"] == extra.get("_ng_rollout_id", "r1")


async def test_different_requests_are_played_separately(counting):
    indices = {"_ng_task_index": 0, "_ng_rollout_index": 0}
    pairs = (
        ({}, {}),
        (indices, indices),
        ({"_ng_rollout_id": "4-0"}, {"_ng_rollout_id": "4-0"}),
        ({"_ng_rollout_id": "r1"}, {"_ng_rollout_id": "r2"}),
        ({"_ng_rollout_id": "r3"}, {"_ng_rollout_id": "r3", "_ng_attempt_index": 1}),
        ({"_ng_rollout_id": "r4"}, {"_ng_rollout_id": "r4", "expected_count": 5}),
    )
    model = SlowModel()
    model.released.set()
    async with app_client(agent.create_app(counting, model)) as client:
        for number, pair in enumerate(pairs, 1):
            for extra in pair:
                assert (await client.post("/run", json=ROW | extra)).status_code == 200
            assert model.started == 2 * number, pair


LASTING = """
from contextlib import asynccontextmanager

told = []

@hookimpl
@asynccontextmanager
async def lifespan():
    yield 1
    told.append("left")

@hookimpl
async def verify(task):
    return Verdict(reward=1.0)

@hookimpl
async def close(task):
    await asyncio.sleep(0.05)
    told.append("closed")
"""


async def test_an_abandoned_rollout_closes_before_the_environment(made):
    module, model = made(LASTING, "lasting_env"), SlowModel()
    async with app_client(agent.create_app(Environment("lasting", module, {}), model)) as client:
        request = asyncio.ensure_future(client.post("/run", json=ROW | {"_ng_rollout_id": "r1"}))
        await wait_until(lambda: model.started == 1)
        request.cancel()
        await asyncio.wait({request})
    assert module.told == ["closed", "left"]


MASKING = """
class Masking(Verdict):
    mask_sample: bool = False
    failure_kind: str | None = None

@hookimpl
async def verify(task):
    return Masking(reward=0.5, mask_sample=True, failure_kind="too_long")
"""


async def test_the_verdicts_own_mask_is_kept(environment, policy):
    masking = environment(MASKING)
    line = (await run(masking, policy("done"))).json()
    async with serve_app(resources.create_app(masking)) as url, httpx.AsyncClient(base_url=url) as client:
        judged = (await client.post("/verify", json=ROW | {"response": line["response"]})).json()
        rollout = await play(RemoteEnvironment(url, masking.name), policy("done"), ROW)
    for body in (line, judged):
        assert (body["mask_sample"], body["failure_kind"], body["failure_reason"]) == (True, "too_long", None)
    assert (rollout.outcome, rollout.reward) == ("scored", 0.5)


async def test_a_client_that_disconnects_ends_its_episode_unless_another_waits_for_it(counting):
    model = SlowModel()
    async with serve_app(agent.create_app(counting, model)) as url, aiohttp.ClientSession(url) as client:
        alone = asyncio.ensure_future(client.post("/run", json=ROW))
        await wait_until(lambda: model.started == 1)
        alone.cancel()
        await wait_until(lambda: model.cancelled == 1)
        row = ROW | {"_ng_rollout_id": "r1"}
        first = asyncio.ensure_future(client.post("/run", json=row))
        await wait_until(lambda: model.started == 2)
        second = asyncio.ensure_future(client.post("/run", json=row))
        await asyncio.sleep(0.05)
        first.cancel()
        await asyncio.sleep(0.05)
        model.released.set()
        assert (await second).status == 200
    assert (model.started, model.cancelled) == (2, 1)


@asynccontextmanager
async def open_session(
    environment: Environment, model: Model, **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """Yield a client of an agent with the cookies of a session at its resources server, and that server's URL."""
    async with serve_app(resources.create_app(environment)) as url, httpx.AsyncClient(base_url=url) as plain:
        await plain.post("/seed_session", json=ROW)
        remote = RemoteEnvironment(url, "counter")
        async with app_client(agent.create_app(environment, model, resources=remote, **options)) as client:
            client.cookies = dict(plain.cookies)
            yield client, url


@pytest.mark.slow
async def test_a_request_is_answered_with_the_tools_of_the_callers_session_which_its_cookies_identify(counting, policy):
    async with open_session(counting, policy(ADD, "done")) as (client, url):
        answer = await client.post("/ng-rollout/r1/v1/responses", json={"input": "add", "tools": TOOLS})
        async with httpx.AsyncClient(cookies=answer.cookies) as judge:
            verdict = (await judge.post(f"{url}/verify", json=ROW | {"response": answer.json()})).json()
    output = answer.json()["output"]
    assert [item["type"] for item in output] == ["function_call", "function_call_output", "message"]
    assert output[1]["output"] == '{"success":true}'
    assert any(cookie.startswith("ResourcesServer___counter=") for cookie in answer.headers.get_list("set-cookie"))
    assert (verdict["final"], verdict["reward"]) == (3, 1.5)


async def test_calls_of_unlisted_tools_are_answered_and_never_sent_and_failures_are_no_tool_outputs(counting, policy):
    calls = [("verify", {}), ("get_counter_value", {}), ("increment_counter", "{torn")]
    async with open_session(counting, policy(calls, [("stumble", {})])) as (client, _):
        body = {"input": "add", "tools": TOOLS}
        answer = await client.post("/v1/responses", json=body)
        assert (answer.status_code, answer.json()["stage"], answer.json()["kind"]) == (503, "step", "tool_raised")
    async with open_session(counting, policy(calls, "done", ADD)) as (client, _):
        outputs = [item["output"] for item in (await client.post("/v1/responses", json=body)).json()["output"][3:6]]
        client.cookies.clear()
        lost = await client.post("/v1/responses", json=body)
    messages = [f"There is no tool named '{name}'" for name in ("verify", "get_counter_value")]
    for output, message in zip(outputs, [*messages, "Invalid tool call arguments: "], strict=True):
        assert message in output
    assert (lost.status_code, lost.json()["kind"]) == (503, "session_lost")
    gone = RemoteEnvironment("http://127.0.0.1:9", "counter", retry=Retry(times=1, first=0.001))
    async with app_client(agent.create_app(counting, policy(ADD, "done"), resources=gone)) as client:
        answer = await client.post("/v1/responses", json=body)
    assert (answer.status_code, answer.json()["kind"]) == (503, "server_unreachable")


@pytest.mark.parametrize(("depth", "status"), [(300, 200), (900, 422)])
async def test_deeply_nested_metadata_is_no_failure_of_the_server(counting, policy, depth, status):
    content = b'{"input": "add", "metadata": ' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"
    async with app_client(agent.create_app(counting, policy("done"))) as client:
        assert (await client.post("/v1/responses", content=content)).status_code == status


async def test_usage_is_summed_over_turns_and_the_servers_budget_applies(counting, policy):
    async with open_session(counting, policy(ADD), budget=Budget(turns=3)) as (client, _):
        response = (await client.post("/v1/responses", json={"input": "add", "tools": TOOLS})).json()
        for body in ({}, {"input": 7}, {"input": [3]}, {"input": "x", "tools": [4]}):
            assert (await client.post("/v1/responses", json=body)).status_code == 422, body
    assert sum(item["type"] == "function_call" for item in response["output"]) == 3
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"] == {"cached_tokens": 0}


CLOSING = {"agent_session_id": "agent-session-1", "episode_id": {"rollout_id": "r1", "attempt": 0}}


def build_opening(url: str = "http://127.0.0.1:9", jar: Any = (), **changed: Any) -> Item:
    access = {"kind": "direct_http", "name": "counter.direct_http", "required": True, "base_url": url, "headers": {}}
    accesses = {"tool_accesses": [access | {"cookies": dict(jar)}], "sandbox_access": None}
    return CLOSING | {"task_id": {"taskset": "counter", "task_id": "1"}} | accesses | changed


@pytest.mark.slow
async def test_an_agent_session_calls_tools_at_its_base_url(counting, policy):
    async with (
        serve_app(resources.create_app(counting)) as url,
        httpx.AsyncClient(base_url=url) as plain,
        app_client(agent.create_app(counting, policy(ADD, "done"))) as client,
    ):
        jar = dict((await plain.post("/seed_session", json=ROW)).cookies)
        opened = await client.post("/v1/agent_sessions", json=build_opening(url, jar))
        response = await client.post("/ng-rollout/r1/v1/responses", json={"input": "add", "tools": TOOLS})
        closed = (await client.post("/v1/agent_sessions/close", json=CLOSING)).json()
        verdict = (await plain.post("/verify", json=ROW | {"response": response.json()})).json()
        again = (await client.post("/v1/agent_sessions/close", json=CLOSING)).json()
    assert opened.json() == {"agent_session_id": "agent-session-1"}
    assert response.json()["output"][1]["output"] == '{"success":true}'
    assert closed["resources_cookies"] == jar
    assert (verdict["reward"], again) == (1.5, closed)


async def test_an_agent_session_is_opened_once_and_never_after_its_close(counting, policy):
    body = build_opening()
    other = body | {"episode_id": {"rollout_id": "r2", "attempt": 0}}
    async with app_client(agent.create_app(counting, policy("done"))) as client:
        first, same = [await client.post("/v1/agent_sessions", json=body) for _ in range(2)]
        conflicting = await client.post("/v1/agent_sessions", json=other)
        other_close = await client.post("/v1/agent_sessions/close", json=CLOSING | {"episode_id": other["episode_id"]})
        await client.post("/v1/agent_sessions/close", json=CLOSING)
        late = await client.post("/v1/agent_sessions", json=body)
    assert first.headers["set-cookie"] == same.headers["set-cookie"]
    assert [answer.status_code for answer in (first, same, conflicting, other_close, late)] == [200, 200, 409, 409, 409]


async def test_an_unsupported_agent_session_is_rejected_with_a_message(counting, policy):
    mcp = {"kind": "mcp", "name": "m", "required": True, "connection": {"url": "http://x/mcp"}}
    async with app_client(agent.create_app(counting, policy(ADD, "done"))) as client:
        for changed in (
            {"tool_accesses": [mcp]},
            {"sandbox_access": {"kind": "any"}},
            {"agent_session_id": ""},
            {"strange": 1},
        ):
            answer = await client.post("/v1/agent_sessions", json=build_opening(**changed))
            assert (answer.status_code, bool(answer.json()["detail"])) == (422, True), changed
        await client.post("/v1/agent_sessions", json=build_opening(f"http://{'a' * 300}.x"))
        answer = await client.post("/v1/responses", json={"input": "add", "tools": TOOLS})
    assert (answer.status_code, "is not the URL of a server" in answer.json()["detail"]) == (422, True)


async def test_a_malformed_cookie_of_a_tool_is_not_sent_on(policy):
    async def tool() -> Response:
        response = Response("done")
        for cookie in ("sid=\u20ac\u20ac; Path=/", "s\u20acd=1"):
            response.raw_headers.append((b"set-cookie", cookie.encode()))
        return response

    tool_server = FastAPI()
    tool_server.add_api_route("/increment_counter", tool, methods=["POST"])
    async with (
        serve_app(tool_server) as url,
        app_client(agent.create_app(RemoteEnvironment(url, "counter"), policy(ADD, "done"))) as client,
    ):
        answer = await client.post("/v1/responses", json={"input": "add", "tools": TOOLS})
    assert (answer.status_code, answer.json()["output"][1]["output"]) == (200, "done")


async def open_twice(client: httpx.AsyncClient) -> list[int]:
    """Open the session of `CLOSING` without cookies and return the status, then the same for another session."""
    bodies = [build_opening(agent_session_id=name) for name in (CLOSING["agent_session_id"], "b")]
    return [(await client.post("/v1/agent_sessions", json=body)).status_code for body in bodies]


async def test_the_number_of_agent_sessions_is_bounded(counter, policy):
    async with app_client(agent.create_app(counter(), policy(), max_sessions=1)) as client:
        assert await open_twice(client) == [200, 503]
        await client.post("/v1/agent_sessions/close", json=CLOSING)
        assert await open_twice(client) == [409, 200]


async def test_an_expired_agent_session_is_closed_unless_it_answers_and_its_id_stays_in_use(counter):
    model = SlowModel()
    async with app_client(agent.create_app(counter(), model, ttl=0.5)) as client:

        async def count_sessions() -> float | None:
            return metric((await client.get("/metrics")).text, "agent_sessions_open", server="counter_simple_agent")

        async def is_closed() -> bool:
            return not await count_sessions()

        assert (await client.post("/v1/agent_sessions", json=build_opening(tool_accesses=[]))).status_code == 200
        answering = asyncio.ensure_future(client.post("/v1/responses", json={"input": "hi"}))
        await wait_until(lambda: model.started == 1)
        await asyncio.sleep(1.2)
        assert await count_sessions() == 1
        model.released.set()
        assert (await answering).status_code == 200
        await wait_until(is_closed)
        assert await open_twice(client) == [409, 200]


async def test_cookies_that_would_split_a_header_are_not_sent_on():
    assert parse_cookies("good=1; b ad=2; worse=\xe9; =3; x=a\x01") == {"good": "1"}
    assert filter_cookies({"good": "1", "bad": "1; Path=/", "worse": 3}) == {"good": "1"}


async def test_nulls_added_by_a_table_do_not_matter(counting, policy):
    row = Task.ask("add", initial_count=3, expected_count=3, nested={"a": 1, "b": None}, other=None).row()
    answer = await run(counting, policy("done"), row)
    assert (answer.status_code, answer.json()["final"]) == (200, 3)
