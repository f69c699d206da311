"""Sessions: closed once, expired in time, bounded in number."""

from __future__ import annotations

import asyncio

import pytest

from gymsdk.edge.errors import RequestRejected
from gymsdk.servers import session_clients
from gymsdk.servers.episodes import EpisodeService
from gymsdk.servers.requests import parse_row_request
from gymsdk.servers.sessions import SessionStore

from .nodes import metric

ROW = {"responses_create_params": {"input": "add"}, "initial_count": 3}
CLOSE = {"resources_session_id": "s1", "episode_id": {"rollout_id": "r1", "attempt": 0}}
TYPED = {**CLOSE, "task_id": {"taskset": "t", "task_id": "1"}, "task_data": {"initial_count": 3}}


@pytest.fixture
def open_session(counter):
    """Return a function that opens an episode in a session; its `closed` lists the closed episodes."""
    environment = counter()

    async def open_session(sessions, number=3, name=None):
        request = parse_row_request({**ROW, "initial_count": number}, environment)
        return await EpisodeService(environment, sessions).open_session(request, "tools", name=name)

    open_session.closed = environment.plugin.CLOSED
    return open_session


async def test_a_session_is_found_by_its_token_and_its_key_until_it_is_closed(open_session):
    sessions = SessionStore()
    session = await open_session(sessions)
    assert sessions.find_by_token(session.token) is session
    key = sessions.issue_key(session)
    assert (sessions.issue_key(session), sessions.find_by_key(key, {}), key != session.token) == (key, session, True)
    await sessions.close(session)
    await sessions.close(session)
    assert (sessions.find_by_token(session.token), len(sessions), open_session.closed) == (None, 0, [3])
    assert sessions.find_by_key(key, {}) is None
    for token in (None, "", "x"):
        assert (sessions.find_by_token(token), sessions.find_by_key(token, {})) == (None, None)


async def test_a_session_lasts_for_the_time_to_live_after_its_last_use(open_session, clock):
    sessions = SessionStore(ttl=10, clock=clock)
    used, unused, busy = [await open_session(sessions, number) for number in (1, 2, 3)]
    # A session with a running call is in use.
    with sessions.use(busy):
        clock.now = 6
        sessions.find_by_token(used.token)
        clock.now = 11
        await sessions.sweep()
        assert (len(sessions), sessions.find_by_token(unused.token), open_session.closed) == (2, None, [2])


async def test_the_number_of_sessions_is_bounded(open_session, clock):
    sessions = SessionStore(max_sessions=1, ttl=10, clock=clock)
    await open_session(sessions, 1)
    with pytest.raises(RequestRejected, match="all 1 sessions are in use") as rejected:
        await open_session(sessions, 2)
    assert (rejected.value.status, rejected.value.retry_after) == (503, 5.0)
    clock.now = 11
    session = await open_session(sessions, 2)
    # A session that its client has left gives its place to another.
    sessions.close_soon(session)
    await open_session(sessions, 3)
    assert open_session.closed == [1, 2]


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_session_closes_after_its_running_call_even_if_the_caller_of_the_close_is_cancelled(
    open_session, cancelled
):
    sessions = SessionStore()
    session = await open_session(sessions)
    async with session.lock:
        closing = asyncio.ensure_future(sessions.close(session))
        await asyncio.sleep(0)
        assert open_session.closed == []
        if cancelled:
            closing.cancel()
            await asyncio.wait({closing})
    await (sessions.aclose() if cancelled else closing)
    assert open_session.closed == [3]


async def test_the_typed_close_is_idempotent_accepts_unknown_ids_and_blocks_later_seeds(client):
    await client.post("/seed_session", json=TYPED)
    answers = [await client.post("/close_session", json=CLOSE) for _ in range(3)]
    assert [(answer.status_code, answer.json()) for answer in answers] == [(200, {"resources_session_id": "s1"})] * 3
    assert (await client.post("/spell", json={})).status_code == 409
    unknown = await client.post("/close_session", json={**CLOSE, "resources_session_id": "s2"})
    assert (unknown.status_code, unknown.json()) == (200, {"resources_session_id": "s2"})
    late = await client.post("/seed_session", json={**TYPED, "resources_session_id": "s2"})
    assert (late.status_code, "choose another id" in late.json()["detail"]) == (409, True)
    assert metric((await client.get("/metrics")).text, "sessions_open", server="counter") == 0


async def test_a_repeated_seed_finds_its_session_unless_that_was_used(client):
    first, again = await asyncio.gather(*(client.post("/seed_session", json=TYPED) for _ in range(2)))
    later = await client.post("/seed_session", json=TYPED)
    assert metric((await client.get("/metrics")).text, "sessions_open", server="counter") == 1
    other = await client.post("/seed_session", json={**TYPED, "task_data": {"initial_count": 4}})
    await client.post("/spell", json={})
    late = await client.post("/seed_session", json=TYPED)
    assert [answer.status_code for answer in (first, again, later, other, late)] == [200, 200, 200, 409, 409]
    assert len({answer.headers["set-cookie"] for answer in (first, again, later)}) == 1


async def test_a_judged_session_gives_its_place_to_another_a_minute_after_its_verdict(open_session, clock):
    sessions = SessionStore(max_sessions=3, clock=clock)
    unjudged, first, second = [await open_session(sessions, number) for number in (1, 2, 3)]
    sessions.release(first)
    sessions.release(second)
    clock.now = 59
    sessions.find_by_token(first.token)
    with pytest.raises(RequestRejected, match="all 3 sessions are in use"):
        await open_session(sessions, 4)
    clock.now = 61
    with sessions.use(first):
        await open_session(sessions, 4)
    await open_session(sessions, 5)
    with pytest.raises(RequestRejected, match="all 3 sessions are in use"):
        await open_session(sessions, 6)
    assert [sessions.is_open(session) for session in (unjudged, first, second)] == [True, False, False]


async def test_a_session_that_is_closed_while_it_is_judged_holds_no_place_back(open_session, clock):
    sessions = SessionStore(max_sessions=1, clock=clock)
    closed = await open_session(sessions, 1)
    async with closed.lock:
        closing = asyncio.ensure_future(sessions.close(closed))
        await asyncio.sleep(0)
        sessions.release(closed)
    await closing
    sessions.release(await open_session(sessions, 2))
    clock.now = 61
    await open_session(sessions, 3)


async def test_clients_that_never_close_do_not_fill_the_server(resources_client, counter, monkeypatch):
    reply = {"output": [{"role": "assistant", "content": "x"}]}
    async with resources_client(counter(), max_sessions=1) as client:
        await client.post("/seed_session", json=ROW)
        first, again = [await client.post("/verify", json={**ROW, "response": reply}) for _ in range(2)]
        full = await client.post("/seed_session", json=ROW)
        repeated = await client.post("/verify", json={**ROW, "response": reply})
        monkeypatch.setattr("gymsdk.servers.sessions.JUDGED_SESSION_SECONDS", 0.0)
        freed = await client.post("/seed_session", json=ROW)
        called = await client.post("/spell", json={})
    assert (first.status_code, full.status_code, freed.status_code, called.status_code) == (200, 503, 200, 200)
    assert first.json() == again.json() == repeated.json()


async def test_a_left_session_waits_for_its_verdict_for_a_while(open_session, clock):
    sessions = SessionStore(ttl=3600, clock=clock)
    session, other = await open_session(sessions, 1), await open_session(sessions, 2)
    sessions.close_soon(session)
    for clock.now in (599, 601):
        await sessions.sweep()
    assert (open_session.closed, sessions.is_open(other)) == ([1], True)


async def test_a_close_without_an_id_closes_the_cookies_session_and_reports_a_failure(client):
    await client.post("/seed_session", json=ROW)
    headers = {session_clients.CLIENT_HEADER: "1"}
    assert [(await client.post("/close_session", json={}, headers=headers)).json() for _ in range(2)] == [{}, {}]
    assert (await client.post("/spell", json={})).status_code == 409
    await client.post("/seed_session", json={**TYPED, "task_data": {"initial_count": 13}})
    answer = await client.post("/close_session", json=CLOSE)
    assert (answer.status_code, answer.json()["stage"], "it sticks" in answer.json()["detail"]) == (503, "close", True)


async def test_unused_sessions_are_closed(resources_client, counter):
    environment = counter()
    async with resources_client(environment, ttl=0.05) as client:
        await client.post("/seed_session", json=ROW)
        async with asyncio.timeout(10):
            while not environment.plugin.CLOSED:  # noqa: ASYNC110  # a sweep has no event
                await asyncio.sleep(0.02)
        assert (await client.post("/spell", json={})).status_code == 409


async def test_a_verdict_without_a_session_leaves_nothing_open_and_open_sessions_are_closed_at_the_end(
    resources_client, counter
):
    environment = counter()
    async with resources_client(environment) as client:
        for number in (3, 13):
            await client.post("/verify", json={**ROW, "initial_count": number, "response": {"output": []}})
        assert environment.plugin.CLOSED == [3, 13]
        for number in (1, 13, 2):
            await client.post("/seed_session", json={**ROW, "initial_count": number})
    assert sorted(environment.plugin.CLOSED) == [1, 2, 3, 13, 13]
