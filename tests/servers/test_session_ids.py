"""The ids of a request belong together: the session's id and its episode, the cookie, and the rollout in the path."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import orjson
import pytest

from gymsdk import Environment, responses
from gymsdk.deploy.process import RunningServers, serve
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
async def running(counter: Callable[..., Environment]) -> AsyncIterator[RunningServers]:
    async with serve([counter()], model="scripted/null") as servers:
        yield servers
    await http.aclose()


@pytest.fixture
async def connect(running: RunningServers) -> AsyncIterator[Callable[..., Any]]:
    """Return a function that starts another client, with its own connections and cookies."""
    async with AsyncExitStack() as stack:

        async def start(server: str = "counter") -> httpx.AsyncClient:
            return await stack.enter_async_context(httpx.AsyncClient(base_url=running.urls[server], timeout=20))

        yield start


async def test_a_close_with_the_episode_of_another_session_closes_nothing(connect: Callable[..., Any]) -> None:
    mine, other = await connect(), await connect()
    (await mine.post("/seed_session", json=seed_body())).raise_for_status()
    refused = await other.post("/close_session", json=close_body(OTHERS))
    assert (refused.status_code, refused.json()["kind"]) == (409, "id_mismatch")
    assert (await mine.post("/increment_counter", json={"count": 1})).status_code == 200
    closed = [await other.post("/close_session", json=close_body()) for _ in range(2)]
    assert [each.status_code for each in closed] == [200, 200]
    assert (await mine.post("/increment_counter", json={"count": 1})).status_code == 409
    assert (await other.post("/close_session", json=close_body(OTHERS))).status_code == 409


async def test_another_attempt_is_another_episode(connect: Callable[..., Any]) -> None:
    client = await connect()
    (await client.post("/seed_session", json=seed_body())).raise_for_status()
    retried = {**MINE, "attempt": 1}
    assert (await client.post("/close_session", json=close_body(retried))).status_code == 409
    assert (await client.post("/spell", json={})).status_code == 200


async def test_a_close_with_the_cookie_of_another_named_session_closes_nothing(connect: Callable[..., Any]) -> None:
    mine, other = await connect(), await connect()
    (await mine.post("/seed_session", json=seed_body(MINE, "mine"))).raise_for_status()
    (await other.post("/seed_session", json=seed_body(OTHERS, "other"))).raise_for_status()
    assert (await mine.post("/close_session", json=close_body(OTHERS, "other"))).status_code == 409
    assert (await other.post("/close_session", json=close_body(MINE, "mine"))).status_code == 409
    assert [(await each.post("/spell", json={})).status_code for each in (mine, other)] == [200, 200]


async def test_a_close_of_an_unknown_id_only_keeps_its_own_episode_from_opening(connect: Callable[..., Any]) -> None:
    mine, other = await connect(), await connect()
    assert (await other.post("/close_session", json=close_body(OTHERS))).status_code == 200
    assert (await other.post("/seed_session", json=seed_body(OTHERS))).status_code == 409
    assert (await mine.post("/seed_session", json=seed_body())).status_code == 200
    assert (await mine.post("/close_session", json=close_body())).status_code == 200


async def test_two_clients_with_the_same_seed_body_do_not_share_a_session(connect: Callable[..., Any]) -> None:
    mine, other = await connect(), await connect()
    first = await mine.post("/seed_session", json=seed_body())
    second = await other.post("/seed_session", json=seed_body())
    assert (first.status_code, second.status_code) == (200, 409)
    assert first.cookies[COOKIE] != second.cookies[COOKIE]
    assert (await other.post("/increment_counter", json={"count": 1})).status_code == 409


async def test_two_clients_that_seed_at_once_do_not_share_a_session(connect: Callable[..., Any]) -> None:
    clients = [await connect() for _ in range(3)]
    answers = await asyncio.gather(*(each.post("/seed_session", json=seed_body()) for each in clients))
    assert sorted(each.status_code for each in answers) == [200, 409, 409]
    assert len({each.cookies[COOKIE] for each in answers}) == 3


async def test_a_client_with_the_cookie_may_repeat_its_seed(connect: Callable[..., Any]) -> None:
    client = await connect()
    answers = [await client.post("/seed_session", json=seed_body()) for _ in range(2)]
    assert [each.status_code for each in answers] == [200, 200]
    assert len({each.cookies[COOKIE] for each in answers}) == 1


@pytest.mark.parametrize("reads", [True, False])
async def test_a_client_that_lost_its_connection_may_repeat_its_seed(
    running: RunningServers, connect: Callable[..., Any], reads: bool
) -> None:
    body = orjson.dumps(seed_body())
    port = int(running.urls["counter"].rsplit(":", 1)[1])
    head = f"POST /seed_session HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n"

    def send_and_leave() -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as lost:
            lost.sendall(head.encode() + body)
            return lost.recv(65536) if reads else b""

    answer = await asyncio.to_thread(send_and_leave)
    client = await connect()
    again = await client.post("/seed_session", json=seed_body())
    assert again.status_code == 200
    assert not reads or again.cookies[COOKIE].encode() in answer
    assert (await client.post("/increment_counter", json={"count": 1})).status_code == 200
    # The session has been used, so its client has the answer.
    late = await (await connect()).post("/seed_session", json=seed_body())
    assert late.status_code == 409


async def test_the_same_id_with_another_body_is_refused(connect: Callable[..., Any]) -> None:
    mine, other = await connect(), await connect()
    (await mine.post("/seed_session", json=seed_body())).raise_for_status()
    changed = [
        seed_body(OTHERS),
        seed_body(initial_count=4),
        {**seed_body(), "task_id": {"taskset": "t", "task_id": "2"}},
    ]
    assert [(await other.post("/seed_session", json=body)).status_code for body in changed] == [409] * 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/increment_counter", {"count": 1}),
        ("/verify", {**DATA, "response": RESPONSE}),
        ("/close_session", close_body()),
        ("/close_session", {}),
        ("/seed_session", seed_body()),
        ("/step", {"response": RESPONSE}),
        ("/close", {}),
    ],
)
async def test_a_path_that_names_another_rollout_is_refused(
    connect: Callable[..., Any], path: str, body: dict[str, Any]
) -> None:
    client = await connect()
    (await client.post("/ng-rollout/mine/seed_session", json=seed_body())).raise_for_status()
    refused = await client.post(f"/ng-rollout/others{path}", json=body)
    assert (refused.status_code, refused.json()["kind"]) == (409, "id_mismatch")
    assert (await client.post("/ng-rollout/mine/spell", json={})).text == "it is 3"


async def test_a_path_may_name_the_attempt_of_the_episode(connect: Callable[..., Any]) -> None:
    client = await connect()
    episode = {**MINE, "attempt": 2}
    for rollout in ("mine", "mine-a2"):
        assert (await client.post(f"/ng-rollout/{rollout}/seed_session", json=seed_body(episode))).status_code == 200
    assert (await client.post("/ng-rollout/mine-a2/spell", json={})).status_code == 200
    assert (await client.post("/ng-rollout/mine-a1/spell", json={})).status_code == 409


async def test_a_verdict_under_another_rollout_id_does_not_use_the_session(connect: Callable[..., Any]) -> None:
    client = await connect()
    (await client.post("/seed_session", json=seed_body())).raise_for_status()
    row = {**DATA, "response": RESPONSE}
    refused = await client.post("/verify", json={**row, "_ng_rollout_id": "others"})
    assert (refused.status_code, "the rollout id differs" in refused.json()["detail"]) == (409, True)
    assert (await client.post("/verify", json={**row, "_ng_rollout_id": "mine"})).status_code == 200


async def test_an_agent_session_is_closed_by_its_own_episode_alone(connect: Callable[..., Any]) -> None:
    agent = "counter_simple_agent"
    mine, other = await connect(agent), await connect(agent)
    (await mine.post("/v1/agent_sessions", json=opening_body())).raise_for_status()
    wrong, right = ({"agent_session_id": "a", "episode_id": episode} for episode in (OTHERS, MINE))
    assert (await other.post("/v1/agent_sessions/close", json=wrong)).status_code == 409
    (await other.post("/v1/agent_sessions", json=opening_body(OTHERS, "b"))).raise_for_status()
    assert (await other.post("/v1/agent_sessions/close", json=right)).status_code == 409
    assert (await mine.post("/ng-rollout/others/v1/responses", json={"input": "hi"})).status_code == 409
    closed = await mine.post("/v1/agent_sessions/close", json=right)
    assert closed.json()["resources_cookies"] == {"secret": "x"}
    # The answer to a close has the cookies of the tools, also after the close.
    late = await (await connect(agent)).post("/v1/agent_sessions/close", json=wrong)
    assert (late.status_code, "resources_cookies" in late.json()) == (409, False)


async def test_two_clients_with_the_same_body_do_not_share_an_agent_session(connect: Callable[..., Any]) -> None:
    agent = "counter_simple_agent"
    mine, other = await connect(agent), await connect(agent)
    first = await mine.post("/v1/agent_sessions", json=opening_body())
    second = await other.post("/v1/agent_sessions", json=opening_body())
    again = await mine.post("/v1/agent_sessions", json=opening_body())
    assert (first.status_code, second.status_code, again.status_code) == (200, 409, 200)
    assert "Agent___counter_simple_agent" not in second.cookies


async def test_an_episode_request_under_the_path_of_another_rollout_is_not_played(connect: Callable[..., Any]) -> None:
    client = await connect("counter_environment_server")
    body = {"episode_id": MINE, "task": {"task_id": TASK, "task_input": DATA}}
    changed = {"episode_id": MINE, "task": {"task_id": TASK, "task_input": {**DATA, "_ng_rollout_id": "others"}}}
    refused = [await client.post("/ng-rollout/others/run", json=body), await client.post("/run", json=changed)]
    assert ["failure" in each.json() for each in refused] == [True, True]
    assert "result" in (await client.post("/ng-rollout/mine/run", json=body)).json()


async def test_the_cookie_of_one_server_opens_nothing_at_another(
    counter: Callable[..., Environment], connect: Callable[..., Any]
) -> None:
    mine = await connect()
    token = (await mine.post("/seed_session", json=seed_body())).cookies[COOKIE]
    async with (
        serve([counter()], model="scripted/null") as others,
        httpx.AsyncClient(base_url=others.urls["counter"], cookies={COOKIE: token}) as foreign,
    ):
        assert (await foreign.post("/increment_counter", json={"count": 1})).status_code == 409
        assert (await foreign.post("/close_session", json=close_body())).status_code == 200
    assert (await mine.post("/spell", json={})).status_code == 200
