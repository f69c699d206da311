"""Malformed requests over raw sockets get a response and break neither the server nor other sessions."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest

from gymsdk import Task, responses
from gymsdk.config.model import Deployment
from gymsdk.deploy.process import RunningServers, serve
from gymsdk.edge import request as edge_request
from gymsdk.http import client as http

ROW = Task.ask("add", initial_count=3, expected_count=3).row()
BODY = orjson.dumps(ROW)
RESPONSE = responses.build_response([responses.build_message("done")], model="m")
SERVERS = ("counter", "counter_simple_agent", "counter_environment_server", "policy_model")


@pytest.fixture
async def running(counter):
    async with serve([counter()], model="scripted/null", deployment=Deployment(mcp=True)) as servers:
        yield servers
    await http.aclose()


def request(
    verb: str = "POST", path: str = "/seed_session", body: bytes = b"", *, version: str = "1.1", **headers: str
) -> bytes:
    named = {"Host": "127.0.0.1", "Connection": "close", "Content_Length": str(len(body))}
    lines = [f"{key.replace('_', '-')}: {value}" for key, value in (named | headers).items() if value]
    return "\r\n".join([f"{verb} {path} HTTP/{version}", *lines, "", ""]).encode("latin-1") + body


async def send_raw(url: str, sent: bytes, *, leaves: bool = False) -> list[int]:
    """Send the bytes *sent* to *url* and return the statuses of the responses; a client that *leaves* does not wait."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(sent)
        await writer.drain()
        if leaves:
            return []
        async with asyncio.timeout(10):
            answer = await reader.read()
    finally:
        writer.close()
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", answer)]


CHUNKED = request(Transfer_Encoding="chunked", Content_Length="")
MALFORMED: dict[str, Any] = {
    "http/1.0": (request(body=BODY, version="1.0"), [200]),
    "chunks": (CHUNKED + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY), [200]),
    "invalid-chunks": (CHUNKED + b"zz\r\n", [400]),
    "several-at-once": (request(body=BODY, Connection="keep-alive") * 4 + request("GET", "/"), [200] * 5),
    "a-header-of-100-kb": (request(body=BODY, X_Long="a" * 100_000), [200]),
    "cookies-of-100-kb": (request(body=BODY, Cookie="ResourcesServer___counter=a; " * 3500), [200]),
    "a-path-of-100-kb": (request(path="/" + "a" * 100_000), [404], [400]),
    "another-type": (request(body=BODY, Content_Type="multipart/form-data"), [200]),
    "a-form": (request(body=b"a=b", Content_Type="application/x-www-form-urlencoded"), [422]),
    "utf-16": (request(body=BODY.decode().encode("utf-16")), [422]),
    "a-hundred-thousand-lists": (request(body=b"[" * 100_000), [422]),
    "depths": (request(body=BODY[:-1] + b',"x":' + b"[" * 1000 + b"]" * 1000 + b"}"), [422], [200]),
    "a-length-of-an-exabyte": (request(Content_Length=str(10**18)), [413]),
    "a-negative-length": (request(Content_Length="-5"), [400]),
    "a-foreign-host": (request(body=BODY, Host="evil.test"), [421]),
    "head": (request("HEAD", "/verify"), [405]),
    "options": (request("OPTIONS", "/verify"), [405]),
    "options-of-all": (request("OPTIONS", "*"), [400]),
    "put": (request("PUT", "/verify", BODY), [405]),
    "an-unknown-verb": (request("BREW", "/verify", BODY), [405], [400]),
    "up": (request(path="/../../etc/passwd"), [404]),
    "up-percent-encoded": (request(path="/%2e%2e/%2e%2e/etc/passwd"), [404]),
    "a-null-byte": (request(path="/verify%00"), [404]),
    "not-text": (request(path="/%ff%fe"), [404]),
    "half-a-surrogate-pair": (request(path="/ng-rollout/r/%ed%a0%80"), [404]),
    "a-tool-in-chinese": (request(path="/%E4%B8%AD%E6%96%87", body=b"{}"), [404]),
    "two-rollouts": (request(path="/ng-rollout/a/ng-rollout/b/verify"), [404]),
    "not-http": (b"\x16\x03\x01\x00" + b"a" * 300, [400]),
    "an-invalid-origin": (request(path="/mcp", body=b"{}", Origin="http://[::"), [403]),
    "an-invalid-key": (request(path="/mcp", body=b'{"id":1}', X_NeMo_Gym_Session_Token="\xe9"), [200]),
}


@asynccontextmanager
async def unaffected(running: RunningServers, caplog: pytest.LogCaptureFixture) -> AsyncIterator[aiohttp.ClientSession]:
    """Keep a session open meanwhile; check that its verdict does not change and that no server logs an error."""
    url = running.urls["counter"]
    jar = aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession(cookie_jar=jar, timeout=aiohttp.ClientTimeout(total=20)) as client:
        for path, body in (("seed_session", ROW), ("increment_counter", {"count": 4})):
            async with client.post(f"{url}/{path}", json=body) as answer:
                assert answer.status == 200
        before = await _fetch_count(client, url)
        yield client
        assert await _fetch_count(client, url) == before == 7
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def _fetch_count(client: aiohttp.ClientSession, url: str) -> int:
    async with client.post(f"{url}/verify", json=ROW | {"response": RESPONSE}) as answer:
        final: int = (await answer.json())["final"]
    return final


@pytest.mark.slow
async def test_malformed_requests_get_a_response_and_break_no_server(running, caplog):
    urls = {"head": running.head_url, **{server: running.urls[server] for server in SERVERS}}
    async with unaffected(running, caplog):
        for server, url in urls.items():
            found = {name: await send_raw(url, sent) for name, (sent, *_) in MALFORMED.items()}
            assert {name: statuses for name, statuses in found.items() if not statuses or max(statuses) >= 500} == {}
            if server == "counter":
                # uvicorn reads with `httptools` where that package is installed, and then rejects two requests itself.
                assert {name: found[name] for name in found if found[name] not in MALFORMED[name][1:]} == {}


async def test_clients_that_disconnect_break_nothing_and_a_body_that_does_not_arrive_times_out(
    running, caplog, monkeypatch
):
    cut = [request(body=BODY, Content_Length="999"), CHUNKED + b"ff\r\n{", request(body=BODY)[:40], request(body=BODY)]
    async with unaffected(running, caplog) as client:
        for server in SERVERS:
            for sent in cut:
                await send_raw(running.urls[server], sent, leaves=True)
        await asyncio.sleep(0.1)
        async with client.get(f"{running.urls['counter']}/metrics") as answer:
            assert 'status="500"' not in await answer.text()
        monkeypatch.setattr(edge_request, "BODY_RECEIVE_SECONDS", 0.1)
        for path in ("/seed_session", "/increment_counter"):
            assert await send_raw(running.urls["counter"], request(path=path, body=b"{", Content_Length="2")) == [408]
