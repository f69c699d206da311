"""Requests rejected before routing are counted, and cannot flood the log."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from gymsdk.config.model import Limits, LogConfig
from gymsdk.edge.auth import PROBE_PATHS, Security
from gymsdk.edge.request import REJECTED_ROUTE, RejectionLog
from gymsdk.observability.logging import log_to
from gymsdk.observability.metrics import ServerMetrics, parse_samples

from .secured import TOKEN, serve_secured

TOKEN_HEADER = {"authorization": f"Bearer {TOKEN.get_secret_value()}"}
WRONG_TOKEN = "not-the-token-but-somebodys"
REJECTED: list[tuple[dict[str, str], int]] = [
    ({}, 401),
    ({"authorization": f"Bearer {WRONG_TOKEN}"}, 401),
    ({**TOKEN_HEADER, "host": "evil.test"}, 421),
    ({**TOKEN_HEADER, "origin": "http://evil.test"}, 403),
    ({**TOKEN_HEADER, "x-long": "a" * 5000}, 431),
]


@pytest.fixture
async def servers(counter):
    async with serve_secured(counter(), Security(token=TOKEN, limits=Limits(header=4096))) as running:
        yield running


async def send_rejected_requests(url: str, path: str = "/verify") -> list[int]:
    async with httpx.AsyncClient(base_url=url) as client:
        return [(await client.post(path, json={}, headers=headers)).status_code for headers, _ in REJECTED]


async def count_rejections(url: str) -> Counter[int]:
    async with httpx.AsyncClient(headers=TOKEN_HEADER) as client:
        samples = parse_samples((await client.get(f"{url}/metrics")).text)
    found = [(labels, value) for name, labels, value in samples if name == "requests_total"]
    return Counter({int(labels["status"]): int(value) for labels, value in found if labels["route"] == "refused"})


def read_logs(folder: Path) -> str:
    return "".join(file.read_text() for file in folder.iterdir())


@pytest.fixture
def lines(tmp_path):
    def read(server: str) -> list[dict[str, Any]]:
        for handler in logging.getLogger("gymsdk").handlers:
            handler.flush()
        found = [json.loads(line) for line in (tmp_path / f"{server}.log").read_text().splitlines()]
        return [line for line in found if line["fields"].get("route") == "refused"]

    return read


@pytest.mark.slow
async def test_rejections_are_counted_by_status_at_each_server(servers):
    for url in (servers.head, *servers.urls.values()):
        assert await send_rejected_requests(url) == [status for _, status in REJECTED]
        assert await count_rejections(url) == {401: 2, 421: 1, 403: 1, 431: 1}


def test_a_flood_of_rejections_is_logged_at_intervals(caplog):
    now = [100.0]
    log = RejectionLog(ServerMetrics("counter"), clock=lambda: now[0])
    scope = {"method": "POST", "headers": [], "client": ("10.0.0.9", 1)}
    with caplog.at_level(logging.INFO, "gymsdk.requests"):
        for now[0] in (100.0, 100.5, 100.9, 101.0, 101.9):
            for status in (401, 403):
                log.record(scope, status, REJECTED_ROUTE)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"POST refused {status} client=10.0.0.9" for status in (401, 403)] * 2


@pytest.mark.slow
async def test_a_rejections_log_line_contains_nothing_the_client_sent(servers, tmp_path, lines):
    with log_to(LogConfig(level="info", format="json", directory=tmp_path)):
        for _ in range(4):
            await send_rejected_requests(servers.urls["counter"], f"/{WRONG_TOKEN}")
        assert {line["fields"]["status"] for line in lines("counter")} == {401, 421, 403, 431}
    assert (await count_rejections(servers.urls["counter"]))[401] == 2 * 4
    assert {line["fields"]["client"] for line in lines("counter")} == {"127.0.0.1"}
    assert not any(word in read_logs(tmp_path) for word in (WRONG_TOKEN, TOKEN.get_secret_value(), "evil"))


async def test_health_checks_without_a_token_are_not_counted_as_rejected_but_metrics_are(servers, tmp_path, lines):
    url, paths = servers.urls["counter"], ("/", "/livez", "/healthz", "/health", "/readyz")
    with log_to(LogConfig(level="debug", format="json", directory=tmp_path)):
        async with httpx.AsyncClient() as client:
            for path in (*paths, "/stats", "/metrics"):
                expected = 200 if path in PROBE_PATHS else 401
                assert (await client.get(f"{url}{path}")).status_code == expected
            assert (await client.get(f"{url}/livez", headers={"x-api-key": WRONG_TOKEN})).status_code == 401
        # At debug level, every request is logged.
        assert [line["fields"]["status"] for line in lines("counter") if line["fields"]["status"] != 200] == [401] * 3
    assert await count_rejections(url) == {401: 3}
