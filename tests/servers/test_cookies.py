"""The session cookie: on every response, never guessable, for cookie jars and clients that keep the last cookie."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import httpx
import pytest

from gymsdk import responses
from gymsdk.edge.cookies import cookie_name
from gymsdk.servers import resources

ROW = {"responses_create_params": {"input": "add"}, "initial_count": 3, "expected_count": 8}
COOKIE = "ResourcesServer___counter"
BODY = {**ROW, "response": {"output": [responses.build_message("done")]}}


@pytest.fixture
def serve_counter(counter, serve_app):
    @asynccontextmanager
    async def serve(**options):
        async with serve_app(resources.create_app(counter(), **options)) as url:
            yield url

    return serve


def token(answer):
    return answer.headers["set-cookie"].split(";")[0].partition("=")[2]


async def test_a_cookie_jar_keeps_the_session_after_errors(serve_counter):
    async with serve_counter() as url, httpx.AsyncClient(base_url=url) as client:
        await client.post("/seed_session", json=ROW)
        await client.post("/increment_counter", json={"count": 5})
        statuses = [(await client.post(path, content="{")).status_code for path in ("/nope", "/verify", "/stumble")]
        answer = await client.post("/get_counter_value", json={})
    assert statuses == [404, 422, 200]
    assert answer.json() == {"count": 8}


async def test_a_client_that_keeps_only_the_last_cookies_keeps_the_session_after_errors(serve_counter):
    async with serve_counter() as url, aiohttp.ClientSession(url, cookie_jar=aiohttp.DummyCookieJar()) as client:
        cookies, answers = None, []
        for path, sent in (
            ("/seed_session", ROW),
            ("/increment_counter", {"count": 5}),
            ("/nope", {}),
            ("/stumble", {}),
            ("/verify", {}),
            ("/increment_counter", {"count": -100}),
            ("/verify", BODY),
        ):
            async with client.post(path, json=sent, cookies=cookies) as answer:
                cookies = answer.cookies
                answers.append((answer.status, await answer.json()))
    assert [status for status, _ in answers] == [200, 200, 404, 503, 422, 200, 200]
    assert (answers[-1][1]["final"], answers[-1][1]["reward"]) == (8, 1.5)


@pytest.mark.slow
async def test_two_clients_have_separate_sessions(serve_counter):
    async def count(url, first):
        async with httpx.AsyncClient(base_url=url) as client:
            await client.post("/seed_session", json={**ROW, "initial_count": first})
            for _ in range(5):
                await client.post("/increment_counter", json={"count": 1})
            return (await client.post("/get_counter_value", json={})).json()["count"]

    async with serve_counter() as url:
        assert await asyncio.gather(*(count(url, first) for first in range(8))) == [first + 5 for first in range(8)]


@pytest.mark.parametrize("path", ["/", "/nope", "/metrics", "/reverify_mode", "/docs"])
async def test_every_response_sets_the_cookie(resources_client, path):
    async with resources_client() as client:
        await client.post("/seed_session", json=ROW)
        session = client.cookies[COOKIE]
        answer = await client.get(path)
        client.cookies.clear()
        other = await client.get(path)
    assert token(answer) == session
    assert token(other) not in {"", session}
    assert answer.headers["set-cookie"] == f"{COOKIE}={session}; Path=/; Max-Age=3600; HttpOnly; SameSite=lax"


@pytest.mark.parametrize("forged", ["abc", "", "a" * 5000, '"quoted"', "x\x7f=;;=", "counter"])
async def test_an_invented_token_is_never_adopted(resources_client, forged):
    async with resources_client() as client:
        headers = {"cookie": f"{COOKIE}={forged}"}
        called = await client.post("/spell", json={}, headers=headers)
        client.cookies.clear()
        seeded = await client.post("/seed_session", json=ROW, headers=headers)
        client.cookies.clear()
        again = await client.post("/spell", json={}, headers=headers)
    assert (called.status_code, again.status_code) == (409, 409)
    assert forged not in {token(called), token(seeded)}
    assert len(token(seeded)) == 32


async def test_an_open_session_is_found_among_other_cookies(resources_client):
    async with resources_client() as client:
        session = token(await client.post("/seed_session", json=ROW))
        client.cookies.clear()
        cookies = f"other=1; {COOKIE}=stale; x; {COOKIE}={session}"
        assert (await client.post("/spell", json={}, headers={"cookie": cookies})).text == "it is 3"


async def test_a_second_seed_opens_a_second_session(resources_client):
    async with resources_client() as client:
        first = token(await client.post("/seed_session", json=ROW))
        second = token(await client.post("/seed_session", json={**ROW, "initial_count": 4}))
        client.cookies.clear()
        texts = [
            (await client.post("/spell", json={}, headers={"cookie": f"{COOKIE}={each}"})).text
            for each in (first, second)
        ]
    assert (first != second, texts) == (True, ["it is 3", "it is 4"])


async def test_a_closed_sessions_token_is_not_sent_again(resources_client):
    async with resources_client() as client:
        session = token(await client.post("/seed_session", json=ROW))
        await client.post("/verify", json=BODY)
        closed = await client.post("/close_session", json={})
        assert token(closed) != session


def test_characters_that_cookie_names_forbid_are_replaced():
    assert cookie_name("ResourcesServer", "my env;") == "ResourcesServer___my_env_"
