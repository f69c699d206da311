"""Every route of every server requires the token, gymsdk's clients send it, and no output contains it."""

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
from pydantic import ValidationError
from starlette.routing import BaseRoute, Mount, Route

from gymsdk import Environment, Failed, ServerClient, Task, UsageError, credentials
from gymsdk.bench import readings, stage
from gymsdk.edge import auth
from gymsdk.edge.auth import AuthMiddleware, Security
from gymsdk.http import client as http
from gymsdk.models import registry as models
from gymsdk.rollouts.remote import fetch_servers
from gymsdk.servers import agent_sessions, head
from gymsdk.servers import model as model_server
from gymsdk.servers.agent_sessions import OpenAgentSession
from gymsdk.servers.remote import RemoteEnvironment
from gymsdk.tracing import profile_to_directory

from .secured import TOKEN, SecuredServers, serve_secured

ROW = Task.ask("add", initial_count=3, expected_count=3).row()
TOKEN_TEXT = TOKEN.get_secret_value()
WRONG_HEADERS = [
    {},
    {"authorization": f"Bearer {TOKEN_TEXT}x"},
    {"authorization": f"Bearer {TOKEN_TEXT[:-1]}"},
    {"authorization": f"Basic {TOKEN_TEXT}"},
    {"authorization": "Bearer"},
    {"authorization": ""},
    {"x-api-key": TOKEN_TEXT.upper()},
    {"cookie": f"authorization={TOKEN_TEXT}"},
]
GOOD_HEADERS = [
    {"authorization": f"Bearer {TOKEN_TEXT}"},
    {"Authorization": f"bearer  {TOKEN_TEXT}"},
    {"x-api-key": TOKEN_TEXT},
    {"authorization": "Bearer another", "x-api-key": TOKEN_TEXT},
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
async def servers(counter: Callable[..., Environment]) -> AsyncIterator[SecuredServers]:
    async with serve_secured(counter(), Security(token=TOKEN)) as running:
        yield running


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of the token, which the environment variable names."""
    file = tmp_path / "token.txt"
    file.touch(mode=0o600)
    file.write_text(TOKEN_TEXT + "\n")
    monkeypatch.setenv(credentials.TOKEN_FILE_VARIABLE, str(file))
    return file


def routes(app: object) -> Iterator[tuple[str, str]]:
    """Yield each verb and path of *app* and of the apps mounted in it, with parameters filled in."""
    while not isinstance(app, FastAPI):
        app = app._app  # type: ignore[attr-defined]  # our middleware keeps the inner app under this name
    yield from _routes(app.routes, "")


def _routes(found: list[BaseRoute], before: str) -> Iterator[tuple[str, str]]:
    for each in found:
        if isinstance(each, Mount):
            yield before + each.path, "GET"
            yield from _routes(each.routes, before + each.path)
            continue
        assert isinstance(each, Route), f"unknown kind of route: {each}"
        path = before + re.sub(r"\{[^}]*\}", "some", each.path)
        yield from ((path, verb) for verb in each.methods or ())


def list_requests(servers: SecuredServers) -> list[tuple[str, str]]:
    """Return each verb and URL of every server."""
    known = {(f"{servers.urls[name]}{path}", verb) for name, app in servers.apps.items() for path, verb in routes(app)}
    known |= {(servers.head + path, verb) for path, verb in routes(head.create_app([], host="127.0.0.1", port=0))}
    unknown = {
        (url + path, verb) for url in (servers.head, *servers.urls.values()) for path in UNKNOWN for verb in VERBS
    }
    return [(verb, url) for url, verb in sorted(known | unknown)]


async def statuses(requests: list[tuple[str, str]], headers: dict[str, str]) -> dict[tuple[str, str], int]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as client:
        found = {}
        for verb, url in requests:
            async with client.request(verb, url, headers=headers, json={} if verb == "POST" else None) as answer:
                found[verb, url] = answer.status
                assert TOKEN_TEXT.encode() not in await answer.read()
    return found


@pytest.mark.slow
async def test_every_route_of_every_server_requires_the_token(servers: SecuredServers) -> None:
    requests = list_requests(servers)
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
    } <= {httpx.URL(url).path for _, url in requests}
    for headers in WRONG_HEADERS[:3]:
        found = await statuses(requests, headers)
        assert {key: status for key, status in found.items() if status != 401} == {}
    found = await statuses(requests, GOOD_HEADERS[0])
    assert {key: status for key, status in found.items() if status == 401 or status >= 500} == {}
    assert len(found) > 100


@pytest.mark.parametrize("headers", WRONG_HEADERS)
async def test_anything_but_the_token_is_rejected(servers: SecuredServers, headers: dict[str, str]) -> None:
    found = await statuses([("GET", servers.head + "/"), ("POST", servers.urls["counter"] + "/verify")], headers)
    assert set(found.values()) == {401}


@pytest.mark.parametrize("headers", GOOD_HEADERS)
async def test_the_token_may_be_in_either_header(servers: SecuredServers, headers: dict[str, str]) -> None:
    assert set((await statuses([("GET", servers.head + "/nodes")], headers)).values()) == {200}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/verify", "detail"),
        ("/health", "detail"),
        ("/v1/chat/completions", "openai"),
        ("/v1/responses", "openai"),
        ("/ng-rollout/r1/v1/responses", "openai"),
        ("/v1/completions", "openai"),
        ("/v1/responses/input_tokens", "openai"),
        ("/v1/messages", "anthropic"),
        ("/ng-rollout/r1/v1/messages/count_tokens", "anthropic"),
    ],
)
async def test_a_rejection_explains_the_token_in_the_form_of_the_api(
    servers: SecuredServers, path: str, kind: str
) -> None:
    async with httpx.AsyncClient() as client:
        answer = await client.post(servers.urls["policy_model"] + path, json={})
    body = answer.json()
    message = body["detail"] if kind == "detail" else body["error"]["message"]
    assert "`Authorization: Bearer TOKEN`" in message
    assert credentials.TOKEN_FILE_VARIABLE in message
    assert ("type" in body) == (kind == "anthropic")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.slow
async def test_foreign_sdks_authenticate_with_their_api_keys(servers: SecuredServers) -> None:
    from anthropic import AsyncAnthropic, AuthenticationError
    from openai import AsyncOpenAI

    base = servers.urls["policy_model"]
    async with AsyncOpenAI(base_url=base + "/v1", api_key=TOKEN_TEXT) as openai:
        assert (await openai.models.list()).data
    async with AsyncAnthropic(base_url=base, api_key="wrong", max_retries=0) as anthropic:
        with pytest.raises(AuthenticationError, match="requires a token"):
            await anthropic.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": "hi"}])
    async with AsyncAnthropic(base_url=base, api_key=TOKEN_TEXT) as anthropic:
        message = await anthropic.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": "hi"}])
    assert message.role == "assistant"


@pytest.mark.usefixtures("token_file")
async def test_our_clients_send_the_token_of_the_environment_variable(servers: SecuredServers) -> None:
    client = ServerClient(servers.head)
    assert (await client.post("counter", "/seed_session", json=ROW)).ok
    remote = RemoteEnvironment(servers.urls["counter"], "counter")
    episode = await remote.reset(ROW)
    await remote.close(episode)
    found = await fetch_servers(servers.head)
    assert set(found.agents) == {"counter_simple_agent"}
    joined = await stage.join_servers(servers.head)
    assert (await readings.read_metrics(joined.metered, joined.served.client.build_headers_for)).requests[
        "counter"
    ] >= 1


async def test_a_program_can_pass_the_token_itself(servers: SecuredServers) -> None:
    assert (await ServerClient(servers.head, token=TOKEN_TEXT).servers())["counter"] == servers.urls["counter"]
    remote = RemoteEnvironment(servers.urls["counter"], "counter", token=TOKEN)
    await remote.close(await remote.reset(ROW))


@pytest.mark.parametrize("token", ["", "another-token-of-some-length"])
async def test_a_client_without_the_right_token_learns_what_to_set(servers: SecuredServers, token: str) -> None:
    with pytest.raises(Failed, match=rf"token; set {credentials.TOKEN_FILE_VARIABLE} to the file") as caught:
        await ServerClient(servers.head, token=token).config()
    assert not caught.value.retryable
    with pytest.raises(Failed, match="requires a token") as caught:
        await RemoteEnvironment(servers.urls["counter"], "counter", token=token).reset(ROW)
    assert not caught.value.retryable
    assert "another-token" not in str(caught.value)


async def test_the_token_is_sent_to_our_servers_only(servers: SecuredServers) -> None:
    own_url = servers.urls["counter"]
    remote = RemoteEnvironment(own_url, "counter", token=TOKEN)
    assert remote.auth_headers(own_url + "/")
    assert remote.auth_headers(own_url.replace("127.0.0.1", "localhost"))
    for other in (
        "http://192.0.2.7:80",
        own_url + "1",
        own_url.replace("http", "https"),
        own_url.replace("127.0.0.1", "evil.test"),
        "http://[::",
    ):
        assert not remote.auth_headers(other)


def test_an_agent_sends_the_token_only_to_its_own_resources_server() -> None:
    remote = RemoteEnvironment("http://127.0.0.1:8001", "counter", token=TOKEN)

    def list_sent_headers(base_url: str, name: str = "x-theirs") -> set[str]:
        access = {"kind": "direct_http", "name": "tools", "base_url": base_url, "headers": {name: "1"}}
        ids = {"agent_session_id": "s", "episode_id": {"rollout_id": "e"}, "task_id": {"taskset": "t", "task_id": 1}}
        line = agent_sessions.connect_to_tools(
            OpenAgentSession.model_validate({**ids, "tool_accesses": [access]}), remote.auth_headers
        )
        return set(line.headers) if line else set()

    assert list_sent_headers("http://127.0.0.1:8001/") == {"x-theirs", "authorization"}
    assert list_sent_headers("http://192.0.2.7:8001") == {"x-theirs"}
    with pytest.raises(ValidationError, match="must not be empty or contain spaces"):
        list_sent_headers("http://192.0.2.7:8001", "x theirs")


@pytest.mark.usefixtures("token_file")
async def test_the_token_is_not_sent_to_the_model_behind_the_servers() -> None:
    received: list[str] = []

    async def upstream(request: web.Request) -> web.Response:
        received.append(str(dict(request.headers)))
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
            answer = await client.post("/v1/responses", json={"model": "m", "input": "hi"}, headers=GOOD_HEADERS[3])
    finally:
        await http.aclose()
        await runner.cleanup()
    assert answer.status_code == 200, answer.text
    assert received
    assert TOKEN_TEXT not in "".join(received)


async def test_apps_never_see_the_token() -> None:
    received: list[list[tuple[bytes, bytes]]] = []

    async def behind(scope: dict[str, object], *_: object) -> None:
        received.append(scope["headers"])  # type: ignore[arg-type]  # as ASGI has it

    headers = [(b"host", b"a"), (b"authorization", f"Bearer {TOKEN_TEXT}".encode()), (b"x-api-key", b"k")]
    await AuthMiddleware(behind, TOKEN)({"type": "http", "path": "/", "headers": headers}, None, None)  # type: ignore[arg-type]  # nothing is received or sent
    assert received == [[(b"host", b"a")]]


@pytest.mark.slow
async def test_the_token_appears_in_no_output(
    servers: SecuredServers, caplog: pytest.LogCaptureFixture, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    server_client = ServerClient(servers.head)
    async with httpx.AsyncClient(headers=GOOD_HEADERS[0]) as client:
        paths = ("/global_config_dict_yaml", "/server_instances", "/nodes", "/openapi.json", "/metrics")
        texts = [(await client.get(servers.head + path)).text for path in paths]
        texts += [
            (await client.get(url + path)).text
            for url in servers.urls.values()
            for path in ("/openapi.json", "/metrics")
        ]
        texts += [(await client.get(servers.head, headers={"authorization": TOKEN_TEXT + "x"})).text]
    remote = RemoteEnvironment(servers.urls["counter"], "counter")
    episode = await remote.reset(ROW)
    texts += [
        repr(each)
        for each in (server_client, vars(server_client), remote, vars(remote), episode, Security(token=TOKEN))
    ]
    await remote.close(episode)
    assert TOKEN_TEXT not in "".join(texts)
    # httpx and httpcore log their own lines; no line of the servers contains the token.
    assert not [each for each in caplog.records if TOKEN_TEXT in each.getMessage() and not each.name.startswith("http")]


async def test_a_server_that_echoes_requests_is_not_quoted() -> None:
    async def echo(request: web.Request) -> web.Response:
        return web.Response(status=400, text=f"bad {request.headers['Authorization']}")

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
            await http.get(url, headers=credentials.bearer(TOKEN), retry=http.DEFAULT_RETRY),
            await http.put(url, {}, headers=credentials.bearer(TOKEN), retry=http.DEFAULT_RETRY),
        ]
    finally:
        await http.aclose()
        await runner.cleanup()
    assert "***" in str(caught.value)
    assert not [text for text in (str(caught.value), *(each.text for each in answers)) if TOKEN_TEXT in text]


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "10.0.0.5", "node5"])  # hosts that other machines can reach
def test_a_host_that_others_reach_needs_a_token_or_permission(host: str) -> None:
    with pytest.raises(UsageError, match=r"--token-file FILE.*--insecure"):
        auth.check_exposure(host, None, insecure=False)
    auth.check_exposure(host, TOKEN, insecure=False)
    auth.check_exposure(host, None, insecure=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_loopback_needs_no_token(host: str) -> None:
    auth.check_exposure(host, None, insecure=False)


@pytest.mark.parametrize(("text", "allowed"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_the_environment_variable_can_allow_access_without_a_token(
    text: str, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(auth.INSECURE_VARIABLE, text)
    assert auth.is_insecure_allowed() is allowed


def test_an_invalid_value_of_the_environment_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(auth.INSECURE_VARIABLE, "perhaps")
    with pytest.raises(UsageError, match="set it to 1"):
        auth.is_insecure_allowed()


RAW = ["*", "nodes", "@127.0.0.1/nodes", "http://127.0.0.1/nodes", "http:/nodes", "?/nodes", "//nodes", "/%2e%2e/nodes"]


@pytest.mark.slow
@pytest.mark.parametrize("target", [*RAW, "/nodes", "/nodes?", "/nodes#a"])
async def test_no_spelling_of_a_path_bypasses_the_token(servers: SecuredServers, target: str) -> None:
    for url in (servers.head, servers.urls["counter"]):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(f"GET {target} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode())
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
        assert answer.split(b" ", 2)[1] in {b"400", b"401"}
        assert b'"instances"' not in answer


async def test_profiling_statistics_require_the_token_too(counter: Callable[..., Environment], tmp_path: Path) -> None:
    with profile_to_directory(tmp_path):
        async with serve_secured(counter(), Security(token=TOKEN)) as servers:
            requests = [
                ("GET", url + "/stats") for url in (servers.urls["counter"], servers.urls["counter_simple_agent"])
            ]
            for headers in WRONG_HEADERS:
                assert set((await statuses(requests, headers)).values()) == {401}
            assert set((await statuses(requests, GOOD_HEADERS[0])).values()) == {200}
