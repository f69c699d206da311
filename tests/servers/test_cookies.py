"""The session cookie: on every response, never guessable, for cookie jars and clients that keep the last cookie."""

from __future__ import annotations

from contextlib import asynccontextmanager

import aiohttp
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


@pytest.mark.parametrize("jar", [aiohttp.DummyCookieJar, lambda: aiohttp.CookieJar(unsafe=True)], ids=["last", "jar"])
async def test_a_cookie_jar_or_the_last_cookies_keep_the_session_after_errors(serve_counter, jar):
    async with serve_counter() as url, aiohttp.ClientSession(url, cookie_jar=jar()) as client:
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
                cookies = answer.cookies if jar is aiohttp.DummyCookieJar else None
                answers.append((answer.status, await answer.json()))
    assert [status for status, _ in answers] == [200, 200, 404, 503, 422, 200, 200]
    assert (answers[-1][1]["final"], answers[-1][1]["reward"]) == (8, 1.5)


async def test_every_response_sets_the_cookie(client):
    await client.post("/seed_session", json=ROW)
    session = client.cookies[COOKIE]
    for path in ("/", "/nope", "/metrics", "/reverify_mode", "/docs"):
        client.cookies.set(COOKIE, session, domain="gym.test", path="/")
        answer = await client.get(path)
        client.cookies.clear()
        other = await client.get(path)
        client.cookies.clear()
        assert token(answer) == session
        assert token(other) not in {"", session}
        assert answer.headers["set-cookie"] == f"{COOKIE}={session}; Path=/; Max-Age=3600; HttpOnly; SameSite=lax"


async def test_an_invented_token_is_never_adopted(client):
    for forged in ("abc", "", "a" * 5000, '"quoted"', "x\x7f=;;=", "counter"):
        headers, answers = {"cookie": f"{COOKIE}={forged}"}, []
        for path, body in (("/spell", {}), ("/seed_session", ROW), ("/spell", {})):
            answers.append(await client.post(path, json=body, headers=headers))
            client.cookies.clear()
        assert [answer.status_code for answer in answers] == [409, 200, 409]
        assert forged not in {*map(token, answers[:2])}
        assert len(token(answers[1])) == 32


async def test_an_open_session_is_found_among_other_cookies_and_a_second_seed_opens_a_second(client):
    first = token(await client.post("/seed_session", json=ROW))
    second = token(await client.post("/seed_session", json={**ROW, "initial_count": 4}))
    assert first != second
    client.cookies.clear()
    for session, text in ((first, "it is 3"), (second, "it is 4")):
        cookies = f"other=1; {COOKIE}=stale; x; {COOKIE}={session}"
        assert (await client.post("/spell", json={}, headers={"cookie": cookies})).text == text
    # The token of a closed session is not sent again.
    client.cookies.clear()
    session = token(await client.post("/seed_session", json=ROW))
    await client.post("/verify", json=BODY)
    assert token(await client.post("/close_session", json={})) != session


def test_characters_that_cookie_names_forbid_are_replaced():
    assert cookie_name("ResourcesServer", "my env;") == "ResourcesServer___my_env_"
