"""Sessions: closed once, expired in time, bounded in number."""

from __future__ import annotations

import asyncio

import pytest

from gymsdk.edge.errors import RequestRejected
from gymsdk.servers import tool_calls
from gymsdk.servers.episodes import EpisodeService
from gymsdk.servers.requests import parse_row_request
from gymsdk.servers.sessions import SessionStore

from .nodes import metric

ROW = {"responses_create_params": {"input": "add"}, "initial_count": 3}
EPISODE = {"rollout_id": "r1", "attempt": 0}
TYPED = {
    "resources_session_id": "s1",
    "episode_id": EPISODE,
    "task_id": {"taskset": "t", "task_id": "1"},
    "task_data": {"initial_count": 3},
}
CLOSE = {"resources_session_id": "s1", "episode_id": EPISODE}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def open_session(counter):
    """Return a function that opens an episode in a session; its `closed` lists the closed episodes."""
    environment = counter()

    async def open_session(sessions, number=3, name=None):
        request = parse_row_request({**ROW, "initial_count": number}, environment)
        return await EpisodeService(environment, sessions).open_session(request, "tools", name=name)

    open_session.closed = environment.plugin.CLOSED
    return open_session


async def test_a_session_is_found_by_its_token_until_it_is_closed(open_session):
    sessions = SessionStore()
    session = await open_session(sessions)
    assert sessions.find_by_token(session.token) is session
    await sessions.close(session)
    await sessions.close(session)
    assert (sessions.find_by_token(session.token), len(sessions), open_session.closed) == (None, 0, [3])


@pytest.mark.parametrize("token", [None, "", "x"])
async def test_an_unknown_token_finds_nothing(token):
    assert SessionStore().find_by_token(token) is None
    assert SessionStore().find_by_key(token, {}) is None


async def test_a_session_lasts_for_the_time_to_live_after_its_last_use(open_session, clock):
    sessions = SessionStore(ttl=10, clock=clock)
    used, unused = await open_session(sessions, 1), await open_session(sessions, 2)
    clock.now = 6
    sessions.find_by_token(used.token)
    clock.now = 11
    await sessions.sweep()
    assert (len(sessions), sessions.find_by_token(unused.token), open_session.closed) == (1, None, [2])


async def test_the_number_of_sessions_is_bounded(open_session, clock):
    sessions = SessionStore(max_sessions=1, ttl=10, clock=clock)
    await open_session(sessions, 1)
    with pytest.raises(RequestRejected, match="all 1 sessions are in use") as rejected:
        await open_session(sessions, 2)
    assert (rejected.value.status, rejected.value.retry_after) == (503, 5.0)
    clock.now = 11
    await open_session(sessions, 2)
    assert open_session.closed == [1]


async def test_a_closed_name_is_never_opened_again(open_session):
    sessions = SessionStore()
    session = await open_session(sessions, name="s")
    with pytest.raises(RequestRejected, match="a session 's' exists or existed"):
        await sessions.check_capacity("s")
    await sessions.close(session)
    assert sessions.find_by_name("s") is None
    with pytest.raises(RequestRejected, match="choose another id"):
        await sessions.check_capacity("s")


async def test_a_key_finds_a_session_as_long_as_it_is_open(open_session):
    sessions = SessionStore()
    session = await open_session(sessions)
    key = sessions.issue_key(session)
    assert (sessions.issue_key(session), sessions.find_by_key(key, {}), key != session.token) == (key, session, True)
    await sessions.close(session)
    assert sessions.find_by_key(key, {}) is None


async def test_all_sessions_are_closed_even_if_one_fails(open_session):
    sessions = SessionStore()
    for number in (1, 13, 2):
        await open_session(sessions, number)
    await sessions.aclose()
    assert (len(sessions), sorted(open_session.closed)) == (0, [1, 2, 13])


async def test_a_session_closes_after_its_running_call(open_session):
    sessions = SessionStore()
    session = await open_session(sessions)
    async with session.lock:
        closing = asyncio.ensure_future(sessions.close(session))
        await asyncio.sleep(0)
        assert open_session.closed == []
    await closing
    assert open_session.closed == [3]


async def test_the_typed_close_is_idempotent_and_accepts_unknown_ids(resources_client):
    async with resources_client() as client:
        await client.post("/seed_session", json=TYPED)
        answers = [await client.post("/close_session", json=CLOSE) for _ in range(3)]
        unknown = await client.post("/close_session", json={**CLOSE, "resources_session_id": "s2"})
        called = await client.post("/spell", json={})
    assert [(answer.status_code, answer.json()) for answer in answers] == [(200, {"resources_session_id": "s1"})] * 3
    assert (unknown.status_code, unknown.json()) == (200, {"resources_session_id": "s2"})
    assert called.status_code == 409


async def test_a_close_blocks_later_seeds_of_that_id(resources_client):
    async with resources_client() as client:
        await client.post("/close_session", json=CLOSE)
        late = await client.post("/seed_session", json=TYPED)
        figures = await client.get("/metrics")
    assert (late.status_code, "choose another id" in late.json()["detail"]) == (409, True)
    assert metric(figures.text, "sessions_open", server="counter") == 0


async def test_a_repeated_seed_finds_its_session_unless_that_was_used(resources_client):
    async with resources_client() as client:
        first, again = [await client.post("/seed_session", json=TYPED) for _ in range(2)]
        other = await client.post("/seed_session", json={**TYPED, "task_data": {"initial_count": 4}})
        await client.post("/spell", json={})
        late = await client.post("/seed_session", json=TYPED)
    assert (first.status_code, first.headers["set-cookie"]) == (200, again.headers["set-cookie"])
    assert (other.status_code, late.status_code) == (409, 409)


async def test_a_repeated_seed_during_the_opening_finds_its_session(resources_client, counter):
    environment = counter()
    async with resources_client(environment) as client:
        first, again = await asyncio.gather(*(client.post("/seed_session", json=TYPED) for _ in range(2)))
        figures = (await client.get("/metrics")).text
    assert (first.status_code, again.status_code) == (200, 200)
    assert first.headers["set-cookie"] == again.headers["set-cookie"]
    assert metric(figures, "sessions_open", server="counter") == 1


async def test_a_session_with_a_running_call_is_in_use(open_session, clock):
    sessions = SessionStore(ttl=10, clock=clock)
    busy, idle = await open_session(sessions, 1), await open_session(sessions, 2)
    with sessions.use(busy):
        clock.now = 11
        await sessions.sweep()
        assert (sessions.is_open(busy), sessions.is_open(idle), open_session.closed) == (True, False, [2])


async def test_a_close_continues_after_its_caller_is_cancelled(open_session):
    sessions = SessionStore()
    session = await open_session(sessions)
    async with session.lock:
        closing = asyncio.ensure_future(sessions.close(session))
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait({closing})
    await sessions.aclose()
    assert open_session.closed == [3]


async def test_a_left_session_gives_its_place_to_another(open_session):
    sessions = SessionStore(max_sessions=1)
    session = await open_session(sessions, 1)
    sessions.close_soon(session)
    await open_session(sessions, 2)
    assert open_session.closed == [1]


async def test_a_left_session_waits_for_its_verdict_for_a_while(open_session, clock):
    sessions = SessionStore(ttl=3600, clock=clock)
    session, other = await open_session(sessions, 1), await open_session(sessions, 2)
    sessions.close_soon(session)
    for clock.now in (599, 601):
        await sessions.sweep()
    assert (open_session.closed, sessions.is_open(other)) == ([1], True)


async def test_a_close_that_does_not_release_reports_it(resources_client):
    stuck = {**TYPED, "task_data": {"initial_count": 13}}
    async with resources_client() as client:
        await client.post("/seed_session", json=stuck)
        answer = await client.post("/close_session", json=CLOSE)
    assert (answer.status_code, answer.json()["stage"], "it sticks" in answer.json()["detail"]) == (503, "close", True)


async def test_a_close_without_an_id_closes_the_cookies_session(resources_client, counter):
    environment = counter()
    async with resources_client(environment) as client:
        await client.post("/seed_session", json=ROW)
        headers = {tool_calls.CLIENT_HEADER: "1"}
        assert [(await client.post("/close_session", json={}, headers=headers)).json() for _ in range(2)] == [{}, {}]
        assert (await client.post("/spell", json={})).status_code == 409
        assert environment.plugin.CLOSED == [3]


async def test_a_full_server_returns_retry_after(resources_client, counter):
    environment = counter()
    async with resources_client(environment, max_sessions=2) as client:
        statuses = [(await client.post("/seed_session", json=ROW)).status_code for _ in range(2)]
        full = await client.post("/seed_session", json=ROW)
        await client.post("/close_session", json={})
        freed = await client.post("/seed_session", json=ROW)
    assert (statuses, full.status_code, full.headers["retry-after"], freed.status_code) == ([200, 200], 503, "5", 200)


async def test_unused_sessions_are_closed(resources_client, counter):
    environment = counter()
    async with resources_client(environment, ttl=0.05) as client:
        await client.post("/seed_session", json=ROW)
        async with asyncio.timeout(10):
            while not environment.plugin.CLOSED:  # noqa: ASYNC110  # a sweep has no event
                await asyncio.sleep(0.02)
        assert (await client.post("/spell", json={})).status_code == 409


async def test_open_sessions_are_closed_at_the_end(resources_client, counter):
    environment = counter()
    async with resources_client(environment) as client:
        for number in (1, 13, 2):
            await client.post("/seed_session", json={**ROW, "initial_count": number})
    assert sorted(environment.plugin.CLOSED) == [1, 2, 13]


async def test_a_verdict_without_a_session_leaves_nothing_open(resources_client, counter):
    environment = counter()
    async with resources_client(environment) as client:
        await client.post("/verify", json={**ROW, "response": {"output": [{"role": "assistant", "content": "x"}]}})
        assert environment.plugin.CLOSED == [3]
        await client.post("/verify", json={**ROW, "initial_count": 13, "response": {"output": []}})
        assert environment.plugin.CLOSED == [3, 13]
