"""Two instances behind a load balancer without session affinity: each request reaches its session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from gymsdk import responses
from gymsdk.cluster import directory
from gymsdk.cluster.forwarding import FORWARDED_HEADER, _build_url
from gymsdk.edge.cookies import parse_instance_id
from gymsdk.http import client as http
from gymsdk.servers import resources

from .nodes import MAX_AGE, Instance, fetch_nodes, list_other, serve_app, serve_balancer, serve_head, wait_until

ROW = {"responses_create_params": {"input": "add"}, "initial_count": 3, "expected_count": 8}
CALL = responses.build_function_call("increment_counter", {"count": 5})
BODY = {
    **ROW,
    "response": {
        "output": [CALL, responses.build_function_call_output(CALL["call_id"], "{}"), responses.build_message("done")]
    },
}
SILENT = {**ROW, "response": {"output": [responses.build_message("done")]}}
COOKIE = "ResourcesServer___counter"
NEW_CONNECTION = {"connection": "close"}


@pytest.fixture(autouse=True)
async def close_client():
    yield
    await http.aclose()


@asynccontextmanager
async def serve_balanced(counter, **options) -> AsyncIterator[tuple[str, Instance, Instance]]:
    async with (
        serve_head() as head_url,
        Instance(counter(), head_url, "127.0.0.2", options=options).serve() as one,
        Instance(counter(), head_url, "127.0.0.3", options=options).serve() as other,
        serve_balancer([one.url, other.url]) as url,
    ):
        yield url, one, other


def client(url: str) -> httpx.AsyncClient:
    # Each request uses a new connection, so each may reach another instance.
    return httpx.AsyncClient(base_url=url, headers=NEW_CONNECTION)


async def play_session(url: str) -> tuple[list[int], float]:
    async with client(url) as http_client:
        paths = [
            ("/seed_session", ROW),
            ("/increment_counter", {"count": 5}),
            ("/ng-rollout/r1/get_counter_value", {}),
            ("/verify", BODY),
            ("/close_session", {}),
        ]
        answers = [await http_client.post(path, json=sent) for path, sent in paths]
    return [each.status_code for each in answers], answers[3].json()["final"]


@pytest.mark.slow
async def test_every_request_reaches_its_session(counter):
    async with serve_balanced(counter) as (url, _, _):
        answers = await asyncio.gather(*(play_session(url) for _ in range(8)))
    assert answers == [([200] * 5, 8)] * 8


async def open_sessions(http_client: httpx.AsyncClient) -> dict[str, dict[str, str]]:
    """Return the cookies of one session at each instance, by instance."""
    cookies = {}
    for _ in range(2):
        token = (await http_client.post("/seed_session", json=ROW)).cookies[COOKIE]
        http_client.cookies.clear()
        cookies[parse_instance_id(token) or ""] = {"cookie": f"{COOKIE}={token}"}
    return cookies


async def test_session_tokens_name_their_instance(counter):
    async with serve_balanced(counter) as (url, one, other), client(url) as http_client:
        assert (await open_sessions(http_client)).keys() == {one.id, other.id}
        assert (one.sessions, other.sessions) == (1, 1)


async def test_turns_reach_their_session_too(counter):
    turn = {"response": {"output": [CALL]}}
    async with serve_balanced(counter) as (url, _, _), client(url) as http_client:
        statuses = [(await http_client.post("/reset", json=ROW)).status_code]
        for _ in range(4):
            answer = await http_client.post("/step", json=turn)
            statuses.append(answer.status_code)
        statuses.append((await http_client.post("/close", json={})).status_code)
    assert statuses == [200] * 6


async def test_mcp_requests_reach_their_session_too(counter):
    async with serve_balanced(counter, with_mcp=True) as (url, _, _), client(url) as http_client:
        key = (await http_client.post("/seed_session", json=ROW)).json()["mcp"]["headers"]
        http_client.cookies.clear()
        call = {"name": "increment_counter", "arguments": {"count": 1}}
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
        results = [(await http_client.post("/mcp", json=message, headers=key)).json() for _ in range(4)]
    assert [each["result"]["isError"] for each in results] == [False] * 4


@pytest.mark.slow
async def test_sessions_of_a_lost_instance_are_lost_and_others_continue(counter):
    call = ("/increment_counter", {"count": 5})
    async with serve_balanced(counter) as (url, one, other), client(url) as http_client:
        cookies = await open_sessions(http_client)
        await one.shut_down()
        lost = [
            await http_client.post(path, json=sent, headers=cookies[one.id]) for path, sent in (call, ("/verify", BODY))
        ]
        http_client.cookies.clear()
        forwarded = [
            await http_client.post(path, json=sent, headers=cookies[other.id])
            for path, sent in (call, ("/verify", BODY))
        ]
        again = await play_session(url)
    assert [(each.status_code, each.json()["kind"]) for each in lost] == [(409, "session_lost"), (503, "session_lost")]
    assert ([each.status_code for each in forwarded], forwarded[1].json()["final"]) == ([200, 200], 8)
    assert again == ([200] * 5, 8)


@pytest.mark.slow
async def test_a_session_is_found_if_only_the_head_has_lost_its_instance(counter):
    async with (
        serve_head(lease=0.5) as head_url,
        Instance(counter(), head_url, "127.0.0.2").serve() as one,
        Instance(counter(), head_url, "127.0.0.3").serve() as other,
        client(other.url) as http_client,
    ):
        token = (await http_client.post(f"{one.url}/seed_session", json=ROW)).cookies[COOKIE]
        http_client.cookies.clear()
        headers = {"cookie": f"{COOKIE}={token}"}

        async def is_found() -> bool:
            return (await http_client.post("/spell", json={}, headers=headers)).status_code == 200

        await wait_until(is_found)
        # The instance keeps running, although it has left the head.
        await one.node.leave()
        await wait_until(lambda: is_removed(head_url, one))
        looks = [await is_found() for _ in range(20) if await asyncio.sleep(MAX_AGE) is None]
        found = await http_client.post("/verify", json=SILENT, headers=headers)
    assert (all(looks), found.status_code, found.json()["final"]) == (True, 200, 3)


async def is_removed(head_url: str, one: Instance) -> bool:
    nodes = await fetch_nodes(head_url)
    return nodes["settled"] and one.id not in {each["id"] for each in nodes["instances"]}


async def test_a_forwarded_request_is_not_forwarded_again(counter):
    async with serve_balanced(counter) as (url, one, other), client(url) as http_client:
        cookies = (await open_sessions(http_client))[one.id]
        path = f"{other.url}/increment_counter"
        forwarded = await http_client.post(path, json={"count": 1}, headers=cookies)
        direct = await http_client.post(path, json={"count": 1}, headers=cookies | {FORWARDED_HEADER: "1"})
    assert (forwarded.status_code, direct.status_code, direct.json()["kind"]) == (200, 409, "session_lost")


async def test_requests_for_an_unknown_instance_are_not_forwarded(counter, monkeypatch):
    monkeypatch.setattr(directory, "STARTUP_SECONDS", 0.0)
    peers = list_other(lambda: None)
    async with (
        serve_app(resources.create_app(counter(), peers=peers)) as port,
        httpx.AsyncClient() as http_client,
    ):
        at = f"http://127.0.0.1:{port}"
        for token in ("a" * 12 + "." + "x" * 32, "a" * 12 + "." + "x" * 31, "none." + "x" * 32, "../../x." + "y" * 32):
            answer = await http_client.post(f"{at}/increment_counter", json={}, headers={"cookie": f"{COOKIE}={token}"})
            assert (answer.status_code, answer.json()["kind"]) == (409, "session_lost")
    assert [*peers.directory._unknown] == ["a" * 12]


async def test_a_request_and_its_response_are_forwarded_unchanged(counter):
    received = []
    other = FastAPI()

    @other.post("/{path:path}")
    async def record(path: str, request: Request):
        headers = {
            name: request.headers.get(name) for name in ("authorization", "content-type", "x-own", FORWARDED_HEADER)
        }
        received.append((path, request.url.query, await request.body(), headers))
        return {"there": True}

    async with serve_app(other) as port:
        app = resources.create_app(counter(), peers=list_other(lambda: f"http://127.0.0.1:{port}"))
        async with serve_app(app) as own_port, httpx.AsyncClient() as http_client:
            answer = await http_client.post(
                f"http://127.0.0.1:{own_port}/ng-rollout/r1/spell?a=%20b",
                content=b'{"torn',
                headers={
                    "cookie": f"{COOKIE}={'a' * 12}.{'x' * 32}",
                    "authorization": "Bearer s",
                    "content-type": "application/json",
                    "x-own": "1",
                },
            )
    assert answer.json() == {"there": True}
    headers = {"authorization": "Bearer s", "content-type": "application/json", "x-own": "1", FORWARDED_HEADER: "1"}
    assert received == [("ng-rollout/r1/spell", "a=%20b", b'{"torn', headers)]


async def test_a_rejected_body_is_not_forwarded(counter):
    calls = []
    other = FastAPI()

    @other.post("/{path:path}")
    async def record(path: str):
        calls.append(path)

    async with serve_app(other) as port:
        headers = {"cookie": f"{COOKIE}={'a' * 12}.{'x' * 32}", "content-encoding": "gzip"}
        async with (
            serve_app(
                resources.create_app(counter(), peers=list_other(lambda: f"http://127.0.0.1:{port}"))
            ) as own_port,
            httpx.AsyncClient() as http_client,
        ):
            answer = await http_client.post(
                f"http://127.0.0.1:{own_port}/increment_counter", content=b"{}", headers=headers
            )
    assert (answer.status_code, answer.json()["detail"]) == (
        415,
        "the body is encoded as 'gzip'; send it as plain JSON",
    )
    assert calls == []


async def test_a_rejection_of_the_other_instance_is_returned_unchanged(counter):
    mismatch = {**ROW, "initial_count": 4, "response": {"output": []}}
    async with (
        serve_balanced(counter, max_sessions=1) as (_, one, other),
        client(one.url) as at_one,
        client(other.url) as at_other,
    ):
        token = (await at_one.post("/seed_session", json=ROW)).cookies[COOKIE]
        at_one.cookies.clear()
        cookies = {"cookie": f"{COOKIE}={token}"}
        requests = [("/verify", mismatch), ("/seed_session", ROW), ("/seed_session", [])]
        direct = [await at_one.post(path, json=sent, headers=cookies) for path, sent in requests]
        forwarded = [await at_other.post(path, json=sent, headers=cookies) for path, sent in requests]
    assert [(each.status_code, each.headers.get("retry-after"), each.json()) for each in forwarded] == [
        (each.status_code, each.headers.get("retry-after"), each.json()) for each in direct
    ]
    assert [each.status_code for each in forwarded] == [409, 503, 422]
    assert forwarded[0].json()["kind"] == "session_mismatch"
    assert forwarded[1].headers["retry-after"]


@pytest.mark.parametrize("target", ["@127.0.0.9:{port}/x", "1/x", "http://127.0.0.9:{port}/x", "*", "x", "%2fx", "?a"])
async def test_a_target_that_is_not_a_path_is_rejected_and_not_forwarded(counter, target):
    received = []

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(writer)
        writer.close()

    peers = list_other(lambda: received.append("asked") or "http://127.0.0.1:1", token="a-token-that-is-secret")
    app = resources.create_app(counter(), peers=peers)
    async with await asyncio.start_server(accept, "127.0.0.9", 0) as stray, serve_app(app) as own_port:
        request_target = target.format(port=stray.sockets[0].getsockname()[1])
        cookie = f"cookie: {COOKIE}={'a' * 12}.{'x' * 32}"
        lines = [
            f"POST {request_target} HTTP/1.1",
            "host: 127.0.0.1",
            cookie,
            "content-length: 2",
            "connection: close",
            "",
            "{}",
        ]
        reader, writer = await asyncio.open_connection("127.0.0.1", own_port)
        writer.write("\r\n".join(lines).encode())
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 400")
    # The parser rejects what is no target at all.
    assert b"begins with a slash" in answer or b"Invalid HTTP request" in answer
    assert received == []


@pytest.mark.parametrize("target", ["@127.0.0.9:1/x", "1/x", "http://127.0.0.9:1/x", "//127.0.0.9:1/x", "\\\\h/x"])
async def test_no_target_changes_the_host_of_a_forwarded_request(target):
    scope = {"type": "http", "path": target, "raw_path": target.encode(), "query_string": b"a=%20b"}
    found = urlsplit(_build_url("http://127.0.0.1:6107", scope))
    assert (found.hostname, found.port, found.query) == ("127.0.0.1", 6107, "a=%20b")


async def test_repeated_headers_are_joined_and_hop_by_hop_headers_removed(counter):
    received = []
    other = FastAPI()

    @other.post("/{path:path}")
    async def record(path: str, request: Request):
        received.append(dict(request.headers))
        return Response(
            headers={"connection": "x-theirs", "x-theirs": "1", "proxy-authenticate": "Basic", "x-kept": "1"}
        )

    async with serve_app(other) as port:
        app = resources.create_app(counter(), peers=list_other(lambda: f"http://127.0.0.1:{port}"))
        async with serve_app(app) as own_port, httpx.AsyncClient() as http_client:
            headers = [
                ("cookie", "first=1"),
                ("cookie", f"{COOKIE}={'a' * 12}.{'x' * 32}"),
                ("x-list", "1"),
                ("x-list", "2"),
                ("x-mine", "1"),
                ("proxy-authorization", "Basic s"),
                ("connection", "X-Mine, close"),
            ]
            answer = await http_client.post(f"http://127.0.0.1:{own_port}/spell", content=b"{}", headers=headers)
    assert received[0]["cookie"] == f"first=1; {COOKIE}={'a' * 12}.{'x' * 32}"
    assert received[0]["x-list"] == "1, 2"
    assert not {"x-mine", "proxy-authorization"} & received[0].keys()
    assert answer.headers["x-kept"] == "1"
    assert not {"x-theirs", "proxy-authenticate"} & answer.headers.keys()


@pytest.mark.slow
async def test_an_instance_that_disappears_during_a_request_is_not_waited_for(counter, monkeypatch):
    monkeypatch.setattr(directory, "PROBE_SECONDS", 0.1)
    is_running = True

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as silent:
        at = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        peers = list_other(lambda: at if is_running else None, watch_seconds=0.05)
        app = resources.create_app(counter(), peers=peers)
        async with serve_app(app) as own_port, httpx.AsyncClient(timeout=20) as http_client:
            cookie = {"cookie": f"{COOKIE}={'a' * 12}.{'x' * 32}"}
            calling = asyncio.ensure_future(
                http_client.post(f"http://127.0.0.1:{own_port}/spell", json={}, headers=cookie)
            )
            await asyncio.sleep(0.3)
            assert not calling.done()
            is_running = False
            answer = await calling
        await http.aclose()
    assert (answer.status_code, answer.json()["kind"]) == (503, "server_unreachable")


async def test_without_peers_a_token_names_no_instance(counter):
    async with serve_app(resources.create_app(counter())) as port, httpx.AsyncClient() as http_client:
        answer = await http_client.post(f"http://127.0.0.1:{port}/seed_session", json=ROW)
    assert len(answer.cookies[COOKIE]) == 32
