"""The host check: a server rejects unknown host names and foreign web pages; idle connections are closed."""

from __future__ import annotations

import asyncio
import resource

import httpx
import pytest

from gymsdk import Task, testing
from gymsdk.config.model import Deployment
from gymsdk.deploy.process import serve
from gymsdk.edge import listener
from gymsdk.edge.app import HostCheck
from gymsdk.http import client as http
from gymsdk.http.pages import allowed_hosts
from gymsdk.models.registry import model
from gymsdk.sockets import MAX_OPEN_FILES, raise_open_file_limit

ROW = Task.ask("add", initial_count=3, expected_count=3).row()


@pytest.fixture
async def running(counter):
    async with serve([counter()], model="scripted/null", deployment=Deployment(mcp=True)) as servers:
        yield servers
    await http.aclose()


PROGRAMS: list[tuple[dict[str, str], int]] = [
    ({}, 200),
    ({"host": "localhost:1"}, 200),
    ({"host": "127.0.0.9"}, 200),
    ({"host": "[::1]:80"}, 200),
    ({"host": "LOCALHOST."}, 200),
    ({"host": "evil.test"}, 421),
    ({"host": "127.0.0.1.evil.test:11000"}, 421),
    ({"host": "evil.test", "origin": "http://evil.test"}, 421),
    ({"content-type": "text/plain"}, 200),
    ({"content-type": "application/x-www-form-urlencoded"}, 200),  # `curl -d`
]
"""Headers of programs, and the statuses of the answers."""

PAGES: list[tuple[dict[str, str], int]] = [
    ({"origin": "OWN"}, 200),
    ({"origin": "OWN", "sec-fetch-site": "same-origin", "content-type": "text/plain"}, 200),
    ({"sec-fetch-site": "none"}, 200),
    ({"host": "localhost:9", "origin": "http://localhost:9"}, 200),  # a forwarded port
    ({"host": "localhost", "origin": "http://localhost:80"}, 200),
    ({"host": "LOCALHOST:9", "origin": "http://localhost:9"}, 200),
    ({"host": "[::1]:9", "origin": "http://[::1]:9"}, 200),
    # A proxy with TLS in front of the server.
    ({"host": "localhost:9", "origin": "https://localhost:9", "sec-fetch-site": "same-origin"}, 200),
    ({"host": "localhost", "origin": "https://localhost", "sec-fetch-site": "same-origin"}, 200),
    ({"host": "localhost", "origin": "https://localhost", "sec-fetch-site": "cross-site"}, 403),
    ({"host": "localhost", "origin": "https://localhost:8443", "sec-fetch-site": "same-origin"}, 403),
    ({"host": "localhost", "origin": "ftp://localhost", "sec-fetch-site": "same-origin"}, 403),
    ({"origin": "http://evil.test"}, 403),
    ({"origin": "null"}, 403),
    ({"origin": ""}, 403),
    ({"origin": "http://[::"}, 403),
    ({"origin": "http://localhost:3000"}, 403),
    ({"origin": "http://127.0.0.1"}, 403),
    ({"origin": "http://127.0.0.1:x"}, 403),
    ({"host": "localhost:9", "origin": "http://127.0.0.1:9"}, 403),
    ({"host": "localhost:9", "origin": "https://localhost:9"}, 403),
    ({"host": "localhost:9", "origin": "http://localhost:9@evil.test"}, 403),
    ({"host": "localhost:9", "origin": "http://evil.test@localhost:9"}, 403),
    ({"host": "localhost:9", "origin": "http://localhost:9/path"}, 403),
    ({"host": "localhost:9", "origin": "localhost:9"}, 403),
    ({"host": "localhost:9", "origin": "http://localhost:9, http://evil.test"}, 403),
    ({"host": "localhost:9", "origin": "http://localhost:9,http://localhost:9"}, 403),
    ({"origin": "OWN", "sec-fetch-site": "cross-site"}, 403),
    ({"origin": "http://evil.test", "sec-fetch-site": "same-origin"}, 403),
    ({"sec-fetch-site": "same-site"}, 403),
    ({"sec-fetch-site": "cross-site"}, 403),
    ({"sec-fetch-site": "same-origin, none"}, 403),
    ({"sec-fetch-site": ""}, 403),
]
"""Headers that browsers send, and the statuses of the answers; `OWN` stands for the URL of the server."""


async def test_a_server_answers_programs_and_its_own_pages(running):
    async with httpx.AsyncClient() as client:
        for headers, status in (*PROGRAMS, *PAGES):
            for name, path in (("counter", "/seed_session"), ("counter_simple_agent", "/run")):
                url = running.urls[name]
                sent = {key: url if value == "OWN" else value for key, value in headers.items()}
                answer = await client.post(
                    f"{url}{path}", json=ROW, headers={"content-type": "application/json"} | sent
                )
                assert answer.status_code == status, (headers, path)
                assert status == 200 or answer.json()["detail"]


async def test_every_method_and_path_is_closed_to_other_pages_and_hosts(running):
    urls = {running.head_url, *running.urls.values()}
    async with httpx.AsyncClient() as client:
        for headers in ({"origin": "http://evil.test"}, {"sec-fetch-site": "cross-site"}):
            for method in ("GET", "POST", "DELETE", "OPTIONS"):
                for path in ("/", "/pause", "/nodes", "/nowhere"):
                    found = {(await client.request(method, url + path, headers=headers)).status_code for url in urls}
                    assert found == {403}, (method, path)
        path = f"{running.head_url}/global_config_dict_yaml"
        assert (await client.get(path, headers={"host": "evil.test"})).status_code == 421
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(running.head_url).port)
    writer.write(b"GET / HTTP/1.1\r\nhost: evil.test\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    assert answer.split(b" ", 2)[1] == b"421"


async def test_the_check_comes_before_the_token_and_holds_on_all_addresses(counter, tmp_path):
    file = tmp_path / "token.txt"
    file.write_text(token := "a-token-of-twenty-characters")
    file.chmod(0o600)
    deployment = Deployment(host="0.0.0.0", token_file=file)
    foreign, own = {"origin": "http://127.0.0.1:1"}, {"authorization": f"Bearer {token}"}
    async with (
        serve([counter()], model="scripted/null", deployment=deployment) as servers,
        httpx.AsyncClient(base_url=servers.urls["counter"]) as client,
    ):
        for headers, status in ((foreign, 403), (foreign | own, 403), (own, 200)):
            assert (await client.post("/seed_session", json=ROW, headers=headers)).status_code == status
    await http.aclose()


async def test_the_endpoint_of_a_scripted_policy_is_closed_to_other_pages():
    async with testing.serve(testing.build_app(model("scripted/null"))) as url, httpx.AsyncClient() as client:
        base = url.removesuffix("/v1")
        for headers, status in (
            ({"origin": "http://localhost:3000"}, 403),
            ({"sec-fetch-site": "same-site"}, 403),
            ({"host": "evil.test"}, 421),
        ):
            for method in ("GET", "POST"):
                for path in ("/v1/responses", "/v1/models", "/health", "/tokenize"):
                    answer = await client.request(method, base + path, headers=headers)
                    assert (answer.status_code, bool(answer.json()["detail"])) == (status, True), (method, path)
        assert (await client.get(f"{base}/health", headers={"origin": base})).status_code == 200


def test_a_server_that_listens_on_all_addresses_accepts_every_name():
    assert allowed_hosts("0.0.0.0") is None  # the caller asked for all addresses
    assert allowed_hosts("::", "here") is None
    assert {"10.0.0.5", "node5", "localhost"} <= (allowed_hosts("10.0.0.5", "Node5") or set())
    assert allowed_hosts("127.0.0.1") == {"127.0.0.1", "localhost", "localhost.localdomain", "ip6-localhost"}


async def test_a_connection_without_a_request_is_closed_and_a_slow_request_is_not(running, monkeypatch):
    monkeypatch.setattr(listener, "FIRST_REQUEST_SECONDS", 0.1)
    head = b"POST /seed_session HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    for sent, rest, expected in (
        (b"", b"", b""),
        (head, b"", b""),
        (head + b"connection: close\r\ncontent-length: 2\r\n\r\n{", b"}", b"HTTP/1.1 422"),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(running.urls["counter"]).port)
        writer.write(sent)
        if rest:
            await asyncio.sleep(0.3)
            writer.write(rest)
        async with asyncio.timeout(10):
            assert (await reader.read())[: len(expected) or None] == expected
        writer.close()


def test_a_serving_process_may_open_many_connections():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        expected = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
        assert raise_open_file_limit() == expected
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (expected, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_former_import_path_works_with_a_warning():
    with pytest.warns(DeprecationWarning, match=r"import it from gymsdk\.edge\.app"):
        from gymsdk.servers.middleware import HostCheck as Former
    assert Former is HostCheck
