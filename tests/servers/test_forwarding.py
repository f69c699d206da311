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
from gymsdk.http import client as http
from gymsdk.servers import instances, resources
from gymsdk.servers.auth import parse_instance_id
from gymsdk.servers.forwarding import FORWARDED_HEADER, Peers, _build_url

from .nodes import LOOK, Instance, balancing, heading, listening, told, until

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
APART = {"connection": "close"}


@pytest.fixture(autouse=True)
async def closed():
    yield
    await http.aclose()


@asynccontextmanager
async def balanced(counter, **options) -> AsyncIterator[tuple[str, Instance, Instance]]:
    async with (
        heading() as head_url,
        Instance(counter(), head_url, "127.0.0.2", options=options).there() as one,
        Instance(counter(), head_url, "127.0.0.3", options=options).there() as other,
        balancing([one.url, other.url]) as url,
    ):
        yield url, one, other


def client(url: str) -> httpx.AsyncClient:
    # A new connection for each request, so that each may reach another instance.
    return httpx.AsyncClient(base_url=url, headers=APART)


async def cycle(url: str) -> tuple[list[int], float]:
    async with client(url) as asking:
        paths = [
            ("/seed_session", ROW),
            ("/increment_counter", {"count": 5}),
            ("/ng-rollout/r1/get_counter_value", {}),
            ("/verify", BODY),
            ("/close_session", {}),
        ]
        answers = [await asking.post(path, json=sent) for path, sent in paths]
    return [each.status_code for each in answers], answers[3].json()["final"]


async def test_every_request_reaches_its_session(counter):
    async with balanced(counter) as (url, _, _):
        answers = await asyncio.gather(*(cycle(url) for _ in range(8)))
    assert answers == [([200] * 5, 8)] * 8


async def opened(asking: httpx.AsyncClient) -> dict[str, dict[str, str]]:
    """The cookie of a session of each instance, by instance."""
    held = {}
    for _ in range(2):
        token = (await asking.post("/seed_session", json=ROW)).cookies[COOKIE]
        asking.cookies.clear()
        held[parse_instance_id(token) or ""] = {"cookie": f"{COOKIE}={token}"}
    return held


async def test_session_tokens_name_their_instance(counter):
    async with balanced(counter) as (url, one, other), client(url) as asking:
        assert (await opened(asking)).keys() == {one.id, other.id}
        assert (one.sessions, other.sessions) == (1, 1)


async def test_turns_reach_their_session_too(counter):
    turn = {"response": {"output": [CALL]}}
    async with balanced(counter) as (url, _, _), client(url) as asking:
        statuses = [(await asking.post("/reset", json=ROW)).status_code]
        for _ in range(4):
            answer = await asking.post("/step", json=turn)
            statuses.append(answer.status_code)
        statuses.append((await asking.post("/close", json={})).status_code)
    assert statuses == [200] * 6


async def test_mcp_requests_reach_their_session_too(counter):
    async with balanced(counter, with_mcp=True) as (url, _, _), client(url) as asking:
        key = (await asking.post("/seed_session", json=ROW)).json()["mcp"]["headers"]
        asking.cookies.clear()
        call = {"name": "increment_counter", "arguments": {"count": 1}}
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
        told = [(await asking.post("/mcp", json=message, headers=key)).json() for _ in range(4)]
    assert [each["result"]["isError"] for each in told] == [False] * 4


async def test_sessions_of_a_lost_instance_are_lost_and_others_continue(counter):
    call = ("/increment_counter", {"count": 5})
    async with balanced(counter) as (url, one, other), client(url) as asking:
        held = await opened(asking)
        await one.cut()
        lost = [await asking.post(path, json=sent, headers=held[one.id]) for path, sent in (call, ("/verify", BODY))]
        asking.cookies.clear()
        there = [await asking.post(path, json=sent, headers=held[other.id]) for path, sent in (call, ("/verify", BODY))]
        again = await cycle(url)
    assert [(each.status_code, each.json()["kind"]) for each in lost] == [(409, "session_lost"), (503, "session_lost")]
    assert ([each.status_code for each in there], there[1].json()["final"]) == ([200, 200], 8)
    assert again == ([200] * 5, 8)


async def test_a_session_is_found_if_only_the_head_has_lost_its_instance(counter):
    async with (
        heading(lease=0.5) as head_url,
        Instance(counter(), head_url, "127.0.0.2").there() as one,
        Instance(counter(), head_url, "127.0.0.3").there() as other,
        client(other.url) as asking,
    ):
        token = (await asking.post(f"{one.url}/seed_session", json=ROW)).cookies[COOKIE]
        asking.cookies.clear()
        headers = {"cookie": f"{COOKIE}={token}"}

        async def spelt() -> bool:
            return (await asking.post("/spell", json={}, headers=headers)).status_code == 200

        await until(spelt)
        # It goes on, though the head has heard of it for the last time.
        await one.node.leave()
        await until(lambda: is_out(head_url, one))
        looks = [await spelt() for _ in range(20) if await asyncio.sleep(LOOK) is None]
        found = await asking.post("/verify", json=SILENT, headers=headers)
    assert (all(looks), found.status_code, found.json()["final"]) == (True, 200, 3)


async def is_out(head_url: str, one: Instance) -> bool:
    nodes = await told(head_url)
    return nodes["settled"] and one.id not in {each["id"] for each in nodes["instances"]}


async def test_a_forwarded_request_is_not_forwarded_again(counter):
    async with balanced(counter) as (url, one, other), client(url) as asking:
        held = (await opened(asking))[one.id]
        path = f"{other.url}/increment_counter"
        there = await asking.post(path, json={"count": 1}, headers=held)
        here = await asking.post(path, json={"count": 1}, headers=held | {FORWARDED_HEADER: "1"})
    assert (there.status_code, here.status_code, here.json()["kind"]) == (200, 409, "session_lost")


async def test_requests_for_an_unknown_instance_are_not_forwarded(counter):
    asked = []

    async def url(id: str) -> str | None:
        asked.append(id)
        return None

    async with (
        listening(resources.create_app(counter(), peers=Peers("0" * 12, url))) as port,
        httpx.AsyncClient() as asking,
    ):
        at = f"http://127.0.0.1:{port}"
        for token in ("a" * 12 + "." + "x" * 32, "a" * 12 + "." + "x" * 31, "none." + "x" * 32, "../../x." + "y" * 32):
            answer = await asking.post(f"{at}/increment_counter", json={}, headers={"cookie": f"{COOKIE}={token}"})
            assert (answer.status_code, answer.json()["kind"]) == (409, "session_lost")
    assert asked == ["a" * 12]


async def test_a_request_and_its_response_are_forwarded_unchanged(counter):
    seen = []
    other = FastAPI()

    @other.post("/{path:path}")
    async def noted(path: str, request: Request):
        headers = {
            name: request.headers.get(name) for name in ("authorization", "content-type", "x-own", FORWARDED_HEADER)
        }
        seen.append((path, request.url.query, await request.body(), headers))
        return {"there": True}

    async with listening(other) as port:

        async def url(_: str) -> str | None:
            return f"http://127.0.0.1:{port}"

        app = resources.create_app(counter(), peers=Peers("0" * 12, url))
        async with listening(app) as here, httpx.AsyncClient() as asking:
            answer = await asking.post(
                f"http://127.0.0.1:{here}/ng-rollout/r1/spell?a=%20b",
                content=b'{"torn',
                headers={
                    "cookie": f"{COOKIE}={'a' * 12}.{'x' * 32}",
                    "authorization": "Bearer s",
                    "content-type": "application/json",
                    "x-own": "1",
                },
            )
    assert answer.json() == {"there": True}
    told = {"authorization": "Bearer s", "content-type": "application/json", "x-own": "1", FORWARDED_HEADER: "1"}
    assert seen == [("ng-rollout/r1/spell", "a=%20b", b'{"torn', told)]


async def test_a_rejected_body_is_not_forwarded(counter):
    asked = []
    other = FastAPI()

    @other.post("/{path:path}")
    async def noted(path: str):
        asked.append(path)

    async with listening(other) as port:

        async def url(_: str) -> str | None:
            return f"http://127.0.0.1:{port}"

        headers = {"cookie": f"{COOKIE}={'a' * 12}.{'x' * 32}", "content-encoding": "gzip"}
        async with (
            listening(resources.create_app(counter(), peers=Peers("0" * 12, url))) as here,
            httpx.AsyncClient() as asking,
        ):
            answer = await asking.post(f"http://127.0.0.1:{here}/increment_counter", content=b"{}", headers=headers)
    assert (answer.status_code, answer.json()["detail"]) == (
        415,
        "the body is encoded as 'gzip'; send it as plain JSON",
    )
    assert asked == []


async def test_a_rejection_of_the_other_instance_is_returned_unchanged(counter):
    mismatch = {**ROW, "initial_count": 4, "response": {"output": []}}
    async with (
        balanced(counter, max_sessions=1) as (_, one, other),
        client(one.url) as at_one,
        client(other.url) as at_other,
    ):
        token = (await at_one.post("/seed_session", json=ROW)).cookies[COOKIE]
        at_one.cookies.clear()
        held = {"cookie": f"{COOKIE}={token}"}
        requests = [("/verify", mismatch), ("/seed_session", ROW), ("/seed_session", [])]
        here = [await at_one.post(path, json=sent, headers=held) for path, sent in requests]
        there = [await at_other.post(path, json=sent, headers=held) for path, sent in requests]
    assert [(each.status_code, each.headers.get("retry-after"), each.json()) for each in there] == [
        (each.status_code, each.headers.get("retry-after"), each.json()) for each in here
    ]
    assert [each.status_code for each in there] == [409, 503, 422]
    assert there[0].json()["kind"] == "session_mismatch"
    assert there[1].headers["retry-after"]


@pytest.mark.parametrize("target", ["@127.0.0.9:{port}/x", "1/x", "http://127.0.0.9:{port}/x", "*", "x", "%2fx", "?a"])
async def test_a_target_that_is_not_a_path_is_rejected_and_not_forwarded(counter, target):
    seen = []

    async def taken(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(writer)
        writer.close()

    async def url(_: str) -> str | None:
        seen.append("asked")
        return "http://127.0.0.1:1"

    app = resources.create_app(counter(), peers=Peers("0" * 12, url, token="a-token-that-is-secret"))
    async with await asyncio.start_server(taken, "127.0.0.9", 0) as stray, listening(app) as here:
        asked = target.format(port=stray.sockets[0].getsockname()[1])
        cookie = f"cookie: {COOKIE}={'a' * 12}.{'x' * 32}"
        lines = [
            f"POST {asked} HTTP/1.1",
            "host: 127.0.0.1",
            cookie,
            "content-length: 2",
            "connection: close",
            "",
            "{}",
        ]
        reader, writer = await asyncio.open_connection("127.0.0.1", here)
        writer.write("\r\n".join(lines).encode())
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"begins with a slash" in answer
    assert seen == []


@pytest.mark.parametrize("target", ["@127.0.0.9:1/x", "1/x", "http://127.0.0.9:1/x", "//127.0.0.9:1/x", "\\\\h/x"])
async def test_no_target_changes_the_host_of_a_forwarded_request(target):
    scope = {"type": "http", "path": target, "raw_path": target.encode(), "query_string": b"a=%20b"}
    found = urlsplit(_build_url("http://127.0.0.1:6107", scope))
    assert (found.hostname, found.port, found.query) == ("127.0.0.1", 6107, "a=%20b")


async def test_repeated_headers_are_joined_and_hop_by_hop_headers_removed(counter):
    seen = []
    other = FastAPI()

    @other.post("/{path:path}")
    async def noted(path: str, request: Request):
        seen.append(dict(request.headers))
        return Response(
            headers={"connection": "x-theirs", "x-theirs": "1", "proxy-authenticate": "Basic", "x-kept": "1"}
        )

    async with listening(other) as port:

        async def url(_: str) -> str | None:
            return f"http://127.0.0.1:{port}"

        app = resources.create_app(counter(), peers=Peers("0" * 12, url))
        async with listening(app) as here, httpx.AsyncClient() as asking:
            headers = [
                ("cookie", "first=1"),
                ("cookie", f"{COOKIE}={'a' * 12}.{'x' * 32}"),
                ("x-list", "1"),
                ("x-list", "2"),
                ("x-mine", "1"),
                ("proxy-authorization", "Basic s"),
                ("connection", "X-Mine, close"),
            ]
            answer = await asking.post(f"http://127.0.0.1:{here}/spell", content=b"{}", headers=headers)
    assert seen[0]["cookie"] == f"first=1; {COOKIE}={'a' * 12}.{'x' * 32}"
    assert seen[0]["x-list"] == "1, 2"
    assert not {"x-mine", "proxy-authorization"} & seen[0].keys()
    assert answer.headers["x-kept"] == "1"
    assert not {"x-theirs", "proxy-authenticate"} & answer.headers.keys()


async def test_an_instance_that_disappears_during_a_request_is_not_waited_for(counter, monkeypatch):
    monkeypatch.setattr(instances, "PROBE_SECONDS", 0.1)
    there = True

    async def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(taken, "127.0.0.1", 0) as silent:
        at = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"

        async def url(_: str) -> str | None:
            return at if there else None

        app = resources.create_app(counter(), peers=Peers("0" * 12, url, watch_seconds=0.05))
        async with listening(app) as here, httpx.AsyncClient(timeout=20) as asking:
            cookie = {"cookie": f"{COOKIE}={'a' * 12}.{'x' * 32}"}
            calling = asyncio.ensure_future(asking.post(f"http://127.0.0.1:{here}/spell", json={}, headers=cookie))
            await asyncio.sleep(0.3)
            assert not calling.done()
            there = False
            answer = await calling
        await http.aclose()
    assert (answer.status_code, answer.json()["kind"]) == (503, "server_unreachable")


async def test_without_peers_a_token_names_no_instance(counter):
    async with listening(resources.create_app(counter())) as port, httpx.AsyncClient() as asking:
        answer = await asking.post(f"http://127.0.0.1:{port}/seed_session", json=ROW)
    assert len(answer.cookies[COOKIE]) == 32
