"""The ids of a request belong together: the session's id and its episode, the cookie, and the rollout in the path."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import httpx
import orjson
import pytest

from gymsdk import responses
from gymsdk.deploy.process import serve
from gymsdk.http import client as http

COOKIE = "ResourcesServer___counter"
MINE, OTHERS = {"rollout_id": "mine", "attempt": 0}, {"rollout_id": "others", "attempt": 0}
TASK = {"taskset": "t", "task_id": "1"}
DATA = {"responses_create_params": {"input": "add"}, "initial_count": 3, "expected_count": 3}
RESPONSE = responses.build_response([responses.build_message("done")], model="m")


def seed_body(episode: dict[str, Any] = MINE, name: str = "s", **data: object) -> dict[str, Any]:
    return {"resources_session_id": name, "episode_id": episode, "task_id": TASK, "task_data": {**DATA, **data}}


def close_body(episode: dict[str, Any] = MINE, name: str = "s") -> dict[str, Any]:
    return {"resources_session_id": name, "episode_id": episode}


def opening_body(episode: dict[str, Any] = MINE, name: str = "a", url: str = "http://127.0.0.1:9") -> dict[str, Any]:
    access = {"kind": "direct_http", "name": "n", "base_url": url, "cookies": {"secret": "x"}}
    return {"agent_session_id": name, "episode_id": episode, "task_id": TASK, "tool_accesses": [access]}


@pytest.fixture
async def running(counter):
    async with serve([counter()], model="scripted/null") as servers:
        yield servers
    await http.aclose()


@pytest.fixture
async def connect(running):
    """Return a function that starts another client, with its own connections and cookies."""
    async with AsyncExitStack() as stack:

        async def start(server: str = "counter") -> httpx.AsyncClient:
            return await stack.enter_async_context(httpx.AsyncClient(base_url=running.urls[server], timeout=20))

        yield start


async def test_a_close_with_the_ids_of_another_session_closes_nothing(connect):
    mine, other = await connect(), await connect()
    (await mine.post("/seed_session", json=seed_body())).raise_for_status()
    for episode in (OTHERS, {**MINE, "attempt": 1}):
        refused = await other.post("/close_session", json=close_body(episode))
        assert (refused.status_code, refused.json()["kind"]) == (409, "id_mismatch")
    assert (await mine.post("/increment_counter", json={"count": 1})).status_code == 200
    closed = [await other.post("/close_session", json=close_body()) for _ in range(2)]
    assert [answer.status_code for answer in closed] == [200, 200]
    assert (await mine.post("/increment_counter", json={"count": 1})).status_code == 409
    assert (await other.post("/close_session", json=close_body(OTHERS))).status_code == 409
    # The cookie of another named session closes nothing either.
    (await mine.post("/seed_session", json=seed_body(MINE, "mine"))).raise_for_status()
    (await other.post("/seed_session", json=seed_body(OTHERS, "other"))).raise_for_status()
    assert (await mine.post("/close_session", json=close_body(OTHERS, "other"))).status_code == 409
    assert (await other.post("/close_session", json=close_body(MINE, "mine"))).status_code == 409
    assert [(await client.post("/spell", json={})).status_code for client in (mine, other)] == [200, 200]


async def test_a_close_of_an_unknown_id_only_keeps_its_own_episode_from_opening(connect):
    mine, other = await connect(), await connect()
    assert (await other.post("/close_session", json=close_body(OTHERS))).status_code == 200
    assert (await other.post("/seed_session", json=seed_body(OTHERS))).status_code == 409
    assert (await mine.post("/seed_session", json=seed_body())).status_code == 200
    assert (await mine.post("/close_session", json=close_body())).status_code == 200


async def test_two_clients_with_the_same_seed_body_do_not_share_a_session(connect):
    mine, other = await connect(), await connect()
    first, repeated = [await mine.post("/seed_session", json=seed_body()) for _ in range(2)]
    second = await other.post("/seed_session", json=seed_body())
    assert (first.status_code, repeated.status_code, second.status_code) == (200, 200, 409)
    assert first.cookies[COOKIE] == repeated.cookies[COOKIE] != second.cookies[COOKIE]
    assert (await other.post("/increment_counter", json={"count": 1})).status_code == 409
    for changed in (
        seed_body(OTHERS),
        seed_body(initial_count=4),
        {**seed_body(), "task_id": {"taskset": "t", "task_id": "2"}},
    ):
        assert (await other.post("/seed_session", json=changed)).status_code == 409
    clients = [await connect() for _ in range(3)]
    answers = await asyncio.gather(
        *(client.post("/seed_session", json=seed_body(name="at once")) for client in clients)
    )
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409]
    assert len({answer.cookies[COOKIE] for answer in answers}) == 3


@pytest.mark.parametrize("reads", [True, False])
async def test_a_client_that_lost_its_connection_may_repeat_its_seed(running, connect, reads):
    body = orjson.dumps(seed_body())
    head = f"POST /seed_session HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", int(running.urls["counter"].rsplit(":", 1)[1]))
    writer.write(head.encode() + body)
    await writer.drain()
    answer = await reader.read(65536) if reads else b""
    writer.close()
    client = await connect()
    again = await client.post("/seed_session", json=seed_body())
    assert again.status_code == 200
    assert not reads or again.cookies[COOKIE].encode() in answer
    assert (await client.post("/increment_counter", json={"count": 1})).status_code == 200
    # The session has been used, so its client has the answer.
    late = await (await connect()).post("/seed_session", json=seed_body())
    assert late.status_code == 409


async def test_a_path_that_names_another_rollout_is_refused(connect):
    client = await connect()
    (await client.post("/ng-rollout/mine/seed_session", json=seed_body())).raise_for_status()
    row = {**DATA, "response": RESPONSE}
    for path, body in (
        ("/increment_counter", {"count": 1}),
        ("/verify", row),
        ("/close_session", close_body()),
        ("/close_session", {}),
        ("/seed_session", seed_body()),
        ("/step", {"response": RESPONSE}),
        ("/close", {}),
    ):
        refused = await client.post(f"/ng-rollout/others{path}", json=body)
        assert (refused.status_code, refused.json()["kind"]) == (409, "id_mismatch"), path
        assert (await client.post("/ng-rollout/mine/spell", json={})).text == "it is 3"
    refused = await client.post("/verify", json={**row, "_ng_rollout_id": "others"})
    assert (refused.status_code, "the rollout id differs" in refused.json()["detail"]) == (409, True)
    assert (await client.post("/verify", json={**row, "_ng_rollout_id": "mine"})).status_code == 200


async def test_a_path_may_name_the_attempt_of_the_episode(connect):
    client = await connect()
    episode = {**MINE, "attempt": 2}
    for rollout in ("mine", "mine-a2"):
        assert (await client.post(f"/ng-rollout/{rollout}/seed_session", json=seed_body(episode))).status_code == 200
    assert (await client.post("/ng-rollout/mine-a2/spell", json={})).status_code == 200
    assert (await client.post("/ng-rollout/mine-a1/spell", json={})).status_code == 409


async def test_an_agent_session_is_closed_by_its_own_episode_alone(connect):
    agent, close = "counter_simple_agent", "/v1/agent_sessions/close"
    mine, other = await connect(agent), await connect(agent)
    (await mine.post("/v1/agent_sessions", json=opening_body())).raise_for_status()
    wrong, right = ({"agent_session_id": "a", "episode_id": episode} for episode in (OTHERS, MINE))
    assert (await other.post(close, json=wrong)).status_code == 409
    (await other.post("/v1/agent_sessions", json=opening_body(OTHERS, "b"))).raise_for_status()
    assert (await other.post(close, json=right)).status_code == 409
    assert (await mine.post("/ng-rollout/others/v1/responses", json={"input": "hi"})).status_code == 409
    assert (await mine.post(close, json=right)).json()["resources_cookies"] == {"secret": "x"}
    # The answer to a close has the cookies of the tools, also after the close.
    late = await (await connect(agent)).post(close, json=wrong)
    assert (late.status_code, "resources_cookies" in late.json()) == (409, False)


async def test_two_clients_with_the_same_body_do_not_share_an_agent_session(connect):
    agent = "counter_simple_agent"
    mine, other = await connect(agent), await connect(agent)
    first = await mine.post("/v1/agent_sessions", json=opening_body())
    second = await other.post("/v1/agent_sessions", json=opening_body())
    again = await mine.post("/v1/agent_sessions", json=opening_body())
    assert (first.status_code, second.status_code, again.status_code) == (200, 409, 200)
    assert "Agent___counter_simple_agent" not in second.cookies


async def test_an_episode_request_under_the_path_of_another_rollout_is_not_played(connect):
    client = await connect("counter_environment_server")
    body = {"episode_id": MINE, "task": {"task_id": TASK, "task_input": DATA}}
    changed = {"episode_id": MINE, "task": {"task_id": TASK, "task_input": {**DATA, "_ng_rollout_id": "others"}}}
    refused = [await client.post("/ng-rollout/others/run", json=body), await client.post("/run", json=changed)]
    assert ["failure" in answer.json() for answer in refused] == [True, True]
    assert "result" in (await client.post("/ng-rollout/mine/run", json=body)).json()
