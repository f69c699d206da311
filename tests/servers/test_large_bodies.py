"""Large request bodies: those that a server rejects before it takes memory, and the number that it accepts together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from io import BytesIO

import aiohttp
import pytest

from gymsdk.config.model import Limits
from gymsdk.edge import request
from gymsdk.edge.auth import Security
from gymsdk.edge.request import LARGE_BODY_BYTES, body_budget

from .secured import serve_secured

ROW = {"responses_create_params": {"input": "add"}, "initial_count": 3, "expected_count": 3}
MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]}
TOKENS = {"generation_token_ids": [*range(65_536)], "generation_log_probs": [-0.5] * 65_536}
RESPONSE = {"id": "r", "object": "response", "status": "completed", "model": "m"}
PADDED = json.dumps(ROW | {"response": RESPONSE | {"output": [MESSAGE]}, "padding": "x" * LARGE_BODY_BYTES}).encode()
JSON = {"content-type": "application/json"}


@pytest.fixture
async def servers(counter):
    async with serve_secured(
        counter(), Security(limits=Limits(body=64 * 2**20, bodies=2 * LARGE_BODY_BYTES))
    ) as running:
        yield running


@pytest.fixture
async def client(servers):
    async with aiohttp.ClientSession(
        servers.urls["counter"], headers=JSON, timeout=aiohttp.ClientTimeout(120)
    ) as session:
        yield session


@pytest.mark.slow
async def test_bodies_that_would_take_too_much_memory_are_rejected(client):
    nested, long = b"[" * 2000 + b"]" * 2000 + b"}", b'{"x":"' + b"a" * LARGE_BODY_BYTES + b'"'
    rows = b'{"verify_responses":[' + b'{"reward":1},' * 250_000 + b'{"reward":1}]}'
    for path, body, status, message in (
        ("/verify", b'{"x":[' + b"[]," * 1_100_000 + b"0]}", 413, "too many values"),
        ("/verify", b'{"x":' + nested, 422, "depth limit"),
        ("/verify", long + b',"y":' + nested, 413, "1024 levels"),
        ("/verify", long, 422, "the body is not valid JSON"),
        ("/aggregate_metrics", rows, 413, "send at most 250000"),
    ):
        async with client.post(path, data=BytesIO(body)) as answer:
            assert (answer.status, message in await answer.text()) == (status, True), message


@pytest.mark.slow
async def test_a_transcript_of_long_turns_with_their_tokens_is_judged(client):
    turn = MESSAGE | TOKENS
    body = json.dumps(ROW | {"response": RESPONSE | {"output": [turn] * 8}}).encode()
    async with client.post("/verify", data=BytesIO(body)) as answer:
        result = await answer.json()
    assert (answer.status, result["reward"]) == (200, 1.5)
    assert result["response"]["output"] == [turn] * 8


async def stalled() -> AsyncIterator[bytes]:
    yield PADDED[:-1]
    await asyncio.Event().wait()


@pytest.mark.slow
async def test_large_bodies_wait_and_small_ones_do_not(client):
    more = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield PADDED[:-1]
        await more.wait()
        yield PADDED[-1:]

    async def verify(body: BytesIO | AsyncIterator[bytes]) -> int:
        async with client.post("/verify", data=body) as answer:
            await answer.read()
            return answer.status

    # The length of this body is unknown, so it takes all the room for large bodies.
    first = asyncio.ensure_future(verify(slow()))
    async with asyncio.timeout(60):
        while not body_budget().used:  # noqa: ASYNC110  # the server receives it in its own time
            await asyncio.sleep(0.01)
        others = [asyncio.ensure_future(verify(BytesIO(PADDED))) for _ in range(4)]
        assert await verify(BytesIO(json.dumps(ROW | {"response": RESPONSE | {"output": [MESSAGE]}}).encode())) == 200
        assert not any(request_task.done() for request_task in (first, *others))
        more.set()
        assert await asyncio.gather(first, *others) == [200] * 5
        assert body_budget().used == 0


@pytest.mark.slow
async def test_a_large_body_without_memory_can_be_sent_again(client, monkeypatch):
    monkeypatch.setattr(request, "BODY_WAIT_SECONDS", 0.05)
    first = asyncio.ensure_future(client.post("/verify", data=stalled()))
    async with asyncio.timeout(60):
        while not body_budget().used:  # noqa: ASYNC110  # the server receives it in its own time
            await asyncio.sleep(0.01)
        async with client.post("/verify", data=BytesIO(PADDED)) as answer:
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        first.cancel()
        await asyncio.wait({first})
        while body_budget().used:  # noqa: ASYNC110  # the server notices that the client is gone
            await asyncio.sleep(0.01)
        async with client.post("/verify", data=BytesIO(PADDED)) as answer:
            assert answer.status == 200
