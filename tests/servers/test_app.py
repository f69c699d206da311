"""The parts that all servers share: bodies, responses, error statuses, the rollout prefix, metrics."""

from __future__ import annotations

import os
import re
import socket

import httpx
import pytest
from fastapi import Request

from gymsdk import BrokenEnvironment, Failed, Unscorable, UsageError
from gymsdk.edge.addresses import bind_socket
from gymsdk.edge.app import create_app
from gymsdk.edge.errors import RequestRejected
from gymsdk.edge.request import get_state, json_response, read_json_object
from gymsdk.jsonl import dump_json, parse_json
from gymsdk.observability.metrics import ServerMetrics, parse_samples

ERRORS = {
    "refused": (RequestRejected(409, "no", retry_after=0.2, more=1), 409, {"detail": "no", "more": 1}),
    "usage": (UsageError("wrong"), 422, {"detail": "wrong", "kind": "UsageError"}),
    "broken": (BrokenEnvironment("gone"), 503, {"detail": "gone", "kind": "BrokenEnvironment"}),
    "failed": (Failed("f", kind="k", stage="step"), 422, {"detail": "f", "stage": "step", "retryable": False}),
    "again": (Failed("f", kind="k", retryable=True, retry_after=7.4), 503, {"kind": "k", "retryable": True}),
    "open": (Unscorable("u", kind="judge_failed", retryable=True), 503, {"kind": "judge_failed"}),
}


@pytest.fixture
def metrics():
    return ServerMetrics("made")


@pytest.fixture
def app(metrics):
    app = create_app("made", "A server.", metrics=metrics)

    async def echo(request: Request):
        return json_response(await read_json_object(request))

    async def fails(kind: str):
        raise ERRORS[kind][0]

    async def get_rollout_id(request: Request):
        return json_response(get_state(request.scope).rollout_id)

    app.add_api_route("/echo", echo, methods=["POST"])
    app.add_api_route("/fails/{kind}", fails)
    app.add_api_route("/whose", get_rollout_id)
    return app


@pytest.fixture
async def client(app):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gym.test") as client:
        yield client


async def test_invalid_json_and_a_body_that_is_not_an_object_are_rejected(client):
    for text in (b"{", b"\xff", b"NaN", b'{"a": NaN}', b'{"\\ud800": Infinity}'):
        response = await client.post("/echo", content=text)
        assert (response.status_code, response.json()["detail"][0]["type"]) == (422, "json_invalid"), text
        with pytest.raises(ValueError):
            parse_json(text)
    response = await client.post("/echo", content=b"[]")
    assert (response.status_code, response.json()["detail"][0]["msg"]) == (422, "the body must be a JSON object")


async def test_an_error_becomes_a_status_and_a_message(client):
    for kind, (_, status, expected) in ERRORS.items():
        response = await client.get(f"/fails/{kind}")
        assert response.status_code == status, kind
        assert expected.items() <= response.json().items()
    # A pause is at least a second.
    assert (await client.get("/fails/refused")).headers["retry-after"] == "1"
    assert (await client.get("/fails/again")).headers["retry-after"] == "7"
    response = await client.get("/echo")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


async def test_a_path_prefix_names_the_rollout(client):
    for prefix, rollout in (
        ("", None),
        ("/ng-rollout/r-1.a", "r-1.a"),
        ("/ng-rollout/r-1/training-token-capture", "r-1"),
    ):
        assert (await client.get(f"{prefix}/whose")).json() == rollout
    for prefix in ("/ng-rollout/-r", "/ng-rollout", "/ng-rollout/"):
        assert (await client.get(f"{prefix}/whose")).status_code == 404


async def test_requests_are_counted_by_route_and_status(client, metrics):
    metrics.add_gauge("places", "Places.", lambda: 3)
    await client.post("/echo", content=b"{}")
    await client.post("/echo", content=b"{")
    await client.get("/nowhere")
    answer = await client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = {(name, *sorted(labels.items())): value for name, labels, value in parse_samples(answer.text)}
    server, echo = ("server", "made"), ("route", "/echo")
    assert found["places", server] == 3
    assert found["requests_total", echo, server, ("status", "200")] == 1
    assert found["requests_total", echo, server, ("status", "422")] == 1
    assert found["requests_total", ("route", "other"), server, ("status", "404")] == 1
    assert found["request_seconds_bucket", ("le", "+Inf"), echo, server] == 2
    assert found["request_seconds_count", echo, server] == 2
    assert found["request_bytes_total", echo, server] == len("{}{")
    assert found["response_bytes_total", echo, server] > len("{}")
    assert found["process_id", server] == os.getpid()
    types = dict(re.findall(r"^# TYPE gymsdk_(\w+) (\w+)$", answer.text, re.MULTILINE))
    assert (types["places"], types["requests_total"], types["request_seconds"]) == ("gauge", "counter", "histogram")
    assert len(re.findall(r"^# HELP \w+ \w.*[.]$", answer.text, re.MULTILINE)) == len(types)


def test_buckets_are_cumulative(metrics):
    for seconds in (0.0005, 0.003, 0.003, 1000):
        metrics.record_response("/x", 200, seconds)
    buckets = {
        labels["le"]: value for name, labels, value in parse_samples(metrics.render()) if name.endswith("_bucket")
    }
    assert list(buckets) == ["0.001", "0.005", "0.025", "0.1", "0.5", "2.5", "10", "60", "600", "+Inf"]
    assert list(buckets.values()) == [1, 3, 3, 3, 3, 3, 3, 3, 3, 4]


def test_values_that_orjson_cannot_write_are_written():
    assert dump_json({"a": "\ud800", "b": 2**70}) == b'{"a": "\\ud800", "b": 1180591620717411303424}'
    assert dump_json({1: "a"}) == b'{"1":"a"}'


def test_a_response_in_two_writes_is_not_delayed_by_acknowledgements():
    with bind_socket("127.0.0.1") as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
