"""The token: every route of every server requires it, our clients send it, and no output contains it."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import httpx
import pytest
from aiohttp import web
from fastapi import FastAPI
from starlette.routing import BaseRoute, Mount, Route

from gymsdk import Environment, Failed, ServerClient, Task, UsageError, credentials
from gymsdk.bench import report, stage
from gymsdk.http import client as http
from gymsdk.models import registry as models
from gymsdk.profiling import profile_to_directory
from gymsdk.rollouts.remote import fetch_servers
from gymsdk.servers import agent_sessions, auth, head
from gymsdk.servers import model as model_server
from gymsdk.servers.agent_sessions import OpenAgentSession
from gymsdk.servers.auth import AuthMiddleware, Security
from gymsdk.servers.remote import RemoteEnvironment

from .secured import TOKEN, Up, secured

ROW = Task.ask("add", initial_count=3, expected_count=3).row()
RIGHT = TOKEN.get_secret_value()
WRONG = [
    {},
    {"authorization": f"Bearer {RIGHT}x"},
    {"authorization": f"Bearer {RIGHT[:-1]}"},
    {"authorization": f"Basic {RIGHT}"},
    {"authorization": "Bearer"},
    {"authorization": ""},
    {"x-api-key": RIGHT.upper()},
    {"cookie": f"authorization={RIGHT}"},
]
GOOD = [
    {"authorization": f"Bearer {RIGHT}"},
    {"Authorization": f"bearer  {RIGHT}"},
    {"x-api-key": RIGHT},
    {"authorization": "Bearer another", "x-api-key": RIGHT},
]
UNKNOWN = [
    "/nowhere",
    "/v1/nowhere",
    "/v1/messages/nowhere",
    "/ng-rollout/r1/v1/responses",
    "//",
    "/..%2f",
    "/metrics/",
]
VERBS = ["GET", "POST", "HEAD", "OPTIONS"]


@pytest.fixture
async def up(counter: Callable[..., Environment]) -> AsyncIterator[Up]:
    async with secured(counter(), Security(token=TOKEN)) as running:
        yield running


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the token, as the environment names it."""
    file = tmp_path / "token.txt"
    file.touch(mode=0o600)
    file.write_text(RIGHT + "\n")
    monkeypatch.setenv(credentials.TOKEN_FILE_VARIABLE, str(file))
    return file


def routes(app: object) -> Iterator[tuple[str, str]]:
    """Each verb and path that *app* answers, those of apps in it too, parameters filled in."""
    while not isinstance(app, FastAPI):
        app = app._app  # type: ignore[attr-defined]  # our middleware keeps the inner app under this name
    yield from _routes(app.routes, "")


def _routes(found: list[BaseRoute], before: str) -> Iterator[tuple[str, str]]:
    for each in found:
        if isinstance(each, Mount):
            yield before + each.path, "GET"
            yield from _routes(each.routes, before + each.path)
            continue
        assert isinstance(each, Route), f"a kind of route nobody has thought of: {each}"
        path = before + re.sub(r"\{[^}]*\}", "some", each.path)
        yield from ((path, verb) for verb in each.methods or ())


def everything(up: Up) -> list[tuple[str, str]]:
    """Each verb and URL of every server."""
    known = {(f"{up.urls[name]}{path}", verb) for name, app in up.apps.items() for path, verb in routes(app)}
    known |= {(up.head + path, verb) for path, verb in routes(head.create_app([], host="127.0.0.1", port=0))}
    unknown = {(url + path, verb) for url in (up.head, *up.urls.values()) for path in UNKNOWN for verb in VERBS}
    return [(verb, url) for url, verb in sorted(known | unknown)]


async def statuses(asked: list[tuple[str, str]], headers: dict[str, str]) -> dict[tuple[str, str], int]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as client:
        found = {}
        for verb, url in asked:
            async with client.request(verb, url, headers=headers, json={} if verb == "POST" else None) as answer:
                found[verb, url] = answer.status
                assert RIGHT.encode() not in await answer.read()
    return found


async def test_every_route_of_every_server_requires_the_token(up: Up) -> None:
    asked = everything(up)
    assert {
        "/seed_session",
        "/verify",
        "/run",
        "/v1/responses",
        "/mcp",
        "/metrics",
        "/docs",
        "/openapi.json",
        "/nodes/some",
    } <= {httpx.URL(url).path for _, url in asked}
    for headers in WRONG[:3]:
        found = await statuses(asked, headers)
        assert {key: status for key, status in found.items() if status != 401} == {}
    found = await statuses(asked, GOOD[0])
    assert {key: status for key, status in found.items() if status == 401 or status >= 500} == {}
    assert len(found) > 100


@pytest.mark.parametrize("headers", WRONG)
async def test_anything_but_the_token_is_rejected(up: Up, headers: dict[str, str]) -> None:
    found = await statuses([("GET", up.head + "/"), ("POST", up.urls["counter"] + "/verify")], headers)
    assert set(found.values()) == {401}


@pytest.mark.parametrize("headers", GOOD)
async def test_the_token_may_be_in_either_header(up: Up, headers: dict[str, str]) -> None:
    assert set((await statuses([("GET", up.head + "/nodes")], headers)).values()) == {200}


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/verify", "detail"),
        ("/health", "detail"),
        ("/v1/chat/completions", "openai"),
        ("/v1/responses", "openai"),
        ("/ng-rollout/r1/v1/responses", "openai"),
        ("/v1/messages", "anthropic"),
        ("/ng-rollout/r1/v1/messages/count_tokens", "anthropic"),
    ],
)
async def test_a_rejection_explains_the_token_in_the_form_of_the_api(up: Up, path: str, kind: str) -> None:
    async with httpx.AsyncClient() as client:
        answer = await client.post(up.urls["policy_model"] + path, json={})
    told = answer.json()
    sentence = told["detail"] if kind == "detail" else told["error"]["message"]
    assert "`Authorization: Bearer TOKEN`" in sentence
    assert credentials.TOKEN_FILE_VARIABLE in sentence
    assert ("type" in told) == (kind == "anthropic")
    assert answer.headers["www-authenticate"] == "Bearer"


async def test_foreign_sdks_authenticate_with_their_api_keys(up: Up) -> None:
    from anthropic import AsyncAnthropic, AuthenticationError
    from openai import AsyncOpenAI

    base = up.urls["policy_model"]
    async with AsyncOpenAI(base_url=base + "/v1", api_key=RIGHT) as openai:
        assert (await openai.models.list()).data
    async with AsyncAnthropic(base_url=base, api_key="wrong", max_retries=0) as anthropic:
        with pytest.raises(AuthenticationError, match="requires a token"):
            await anthropic.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": "hi"}])
    async with AsyncAnthropic(base_url=base, api_key=RIGHT) as anthropic:
        told = await anthropic.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": "hi"}])
    assert told.role == "assistant"


@pytest.mark.usefixtures("named")
async def test_our_clients_send_the_token_of_the_environment_variable(up: Up) -> None:
    client = ServerClient(up.head)
    assert (await client.post("counter", "/seed_session", json=ROW)).ok
    remote = RemoteEnvironment(up.urls["counter"], "counter")
    episode = await remote.reset(ROW)
    await remote.close(episode)
    found = await fetch_servers(up.head)
    assert set(found.agents) == {"counter_simple_agent"}
    joined = await stage.join_servers(up.head)
    assert (await report.read_metrics(joined.metered, joined.served.client.build_headers_for)).requests["counter"] >= 1


async def test_a_program_can_pass_the_token_itself(up: Up) -> None:
    assert (await ServerClient(up.head, token=RIGHT).servers())["counter"] == up.urls["counter"]
    remote = RemoteEnvironment(up.urls["counter"], "counter", token=TOKEN)
    await remote.close(await remote.reset(ROW))


@pytest.mark.parametrize("token", ["", "another-token-of-some-length"])
async def test_a_client_without_the_right_token_learns_what_to_set(up: Up, token: str) -> None:
    with pytest.raises(Failed, match=rf"token; set {credentials.TOKEN_FILE_VARIABLE} to the file") as caught:
        await ServerClient(up.head, token=token).config()
    assert not caught.value.retryable
    with pytest.raises(Failed, match="requires a token") as caught:
        await RemoteEnvironment(up.urls["counter"], "counter", token=token).reset(ROW)
    assert not caught.value.retryable
    assert "another-token" not in str(caught.value)


async def test_the_token_is_sent_to_our_servers_only(up: Up) -> None:
    ours = up.urls["counter"]
    remote = RemoteEnvironment(ours, "counter", token=TOKEN)
    assert remote.auth_headers(ours + "/")
    assert remote.auth_headers(ours.replace("127.0.0.1", "localhost"))
    for other in (
        "http://192.0.2.7:80",
        ours + "1",
        ours.replace("http", "https"),
        ours.replace("127.0.0.1", "evil.test"),
        "http://[::",
    ):
        assert not remote.auth_headers(other)


def test_an_agent_sends_the_token_only_to_its_own_resources_server() -> None:
    remote = RemoteEnvironment("http://127.0.0.1:8001", "counter", token=TOKEN)

    def carried(base_url: str) -> set[str]:
        access = {"kind": "direct_http", "name": "tools", "base_url": base_url, "headers": {"x-theirs": "1"}}
        ids = {"agent_session_id": "s", "episode_id": {"rollout_id": "e"}, "task_id": {"taskset": "t", "task_id": 1}}
        line = agent_sessions.connect_to_tools(
            OpenAgentSession.model_validate({**ids, "tool_accesses": [access]}), remote.auth_headers
        )
        return set(line.headers) if line else set()

    assert carried("http://127.0.0.1:8001/") == {"x-theirs", "authorization"}
    assert carried("http://192.0.2.7:8001") == {"x-theirs"}


@pytest.mark.usefixtures("named")
async def test_the_token_is_not_sent_to_the_model_behind_the_servers() -> None:
    seen: list[str] = []

    async def upstream(request: web.Request) -> web.Response:
        seen.append(str(dict(request.headers)))
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": "hi"}}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", upstream)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    model = models.model("endpoint/m", base_url=f"http://127.0.0.1:{runner.addresses[0][1]}/v1", api="chat")
    guarded = AuthMiddleware(model_server.create_app(model), TOKEN)
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://gym.test") as client:
            answer = await client.post("/v1/responses", json={"model": "m", "input": "hi"}, headers=GOOD[3])
    finally:
        await http.aclose()
        await runner.cleanup()
    assert answer.status_code == 200, answer.text
    assert seen
    assert RIGHT not in "".join(seen)


async def test_apps_never_see_the_token() -> None:
    seen: list[list[tuple[bytes, bytes]]] = []

    async def behind(scope: dict[str, object], *_: object) -> None:
        seen.append(scope["headers"])  # type: ignore[arg-type]  # as ASGI has it

    headers = [(b"host", b"a"), (b"authorization", f"Bearer {RIGHT}".encode()), (b"x-api-key", b"k")]
    await AuthMiddleware(behind, TOKEN)({"type": "http", "path": "/", "headers": headers}, None, None)  # type: ignore[arg-type]  # nothing is received or sent
    assert seen == [[(b"host", b"a")]]


async def test_the_token_appears_in_no_output(
    up: Up, caplog: pytest.LogCaptureFixture, named: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    client = ServerClient(up.head)
    async with httpx.AsyncClient(headers=GOOD[0]) as asking:
        paths = ("/global_config_dict_yaml", "/server_instances", "/nodes", "/openapi.json", "/metrics")
        texts = [(await asking.get(up.head + path)).text for path in paths]
        texts += [
            (await asking.get(url + path)).text for url in up.urls.values() for path in ("/openapi.json", "/metrics")
        ]
        texts += [(await asking.get(up.head, headers={"authorization": RIGHT + "x"})).text]
    remote = RemoteEnvironment(up.urls["counter"], "counter")
    episode = await remote.reset(ROW)
    texts += [repr(each) for each in (client, vars(client), remote, vars(remote), episode, Security(token=TOKEN))]
    await remote.close(episode)
    assert RIGHT not in "".join(texts)
    # What httpx and httpcore log is theirs; no line of the servers' has it.
    assert not [each for each in caplog.records if RIGHT in each.getMessage() and not each.name.startswith("http")]


async def test_a_server_that_echoes_requests_is_not_quoted() -> None:
    async def echo(request: web.Request) -> web.Response:
        return web.Response(status=400, text=f"bad {dict(request.headers)}")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", echo)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        with pytest.raises(Failed) as caught:
            await RemoteEnvironment(url, "counter", token=TOKEN).reset(ROW)
        answers = [
            await http.get(url, headers=credentials.build_auth_headers(TOKEN)),
            await http.put(url, {}, headers=credentials.build_auth_headers(TOKEN)),
        ]
    finally:
        await http.aclose()
        await runner.cleanup()
    assert "***" in str(caught.value)
    assert not [text for text in (str(caught.value), *(each.text for each in answers)) if RIGHT in text]


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "10.0.0.5", "node5"])  # where others reach it
def test_a_host_that_others_reach_needs_a_token_or_permission(host: str) -> None:
    with pytest.raises(UsageError, match=r"--token-file FILE.*--insecure"):
        auth.check_exposure(host, None, insecure=False)
    auth.check_exposure(host, TOKEN, insecure=False)
    auth.check_exposure(host, None, insecure=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_loopback_needs_no_token(host: str) -> None:
    auth.check_exposure(host, None, insecure=False)


@pytest.mark.parametrize(("said", "meant"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_the_environment_variable_can_allow_access_without_a_token(
    said: str, meant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(auth.INSECURE_VARIABLE, said)
    assert auth.is_insecure_allowed() is meant


def test_an_invalid_value_of_the_environment_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(auth.INSECURE_VARIABLE, "perhaps")
    with pytest.raises(UsageError, match="set it to 1"):
        auth.is_insecure_allowed()


RAW = ["*", "nodes", "@127.0.0.1/nodes", "http://127.0.0.1/nodes", "http:/nodes", "?/nodes", "//nodes", "/%2e%2e/nodes"]


@pytest.mark.parametrize("target", [*RAW, "/nodes", "/nodes?", "/nodes#a"])
async def test_no_spelling_of_a_path_bypasses_the_token(up: Up, target: str) -> None:
    for url in (up.head, up.urls["counter"]):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(f"GET {target} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode())
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
        assert answer.split(b" ", 2)[1] in {b"400", b"401"}
        assert b'"instances"' not in answer


async def test_profiling_statistics_require_the_token_too(counter: Callable[..., Environment], tmp_path: Path) -> None:
    with profile_to_directory(tmp_path):
        async with secured(counter(), Security(token=TOKEN)) as up:
            asked = [("GET", url + "/stats") for url in (up.urls["counter"], up.urls["counter_simple_agent"])]
            for headers in WRONG:
                assert set((await statuses(asked, headers)).values()) == {401}
            assert set((await statuses(asked, GOOD[0])).values()) == {200}
