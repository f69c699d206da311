"""Streams of the model server: heartbeats, the end of each API, and cancellation on disconnect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from anthropic import APIStatusError
from openai import APIError

from gymsdk import Failed
from gymsdk.convert.apis import INBOUND_APIS
from gymsdk.servers import model as server
from gymsdk.types import Model

from .app_helpers import serve_app
from .engines import BODIES, SlowModel
from .nodes import metric, wait_until
from .proxies import sdks

HEARTBEAT_SECONDS = 0.02
"""The time between two heartbeats in these tests."""


ENDS = {"responses": "response.completed", "chat/completions": "[DONE]", "messages": "message_stop"}
"""The last frame of a response."""

ERRORS = {"responses": ["error"], "chat/completions": ["error", "[DONE]"], "messages": ["error"]}
"""The last frames of a failure."""


@asynccontextmanager
async def serve_proxy(slow: Model, every: float = HEARTBEAT_SECONDS) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serve_app(server.create_app(slow, every=every)) as url,
        httpx.AsyncClient(base_url=url, timeout=10) as client,
    ):
        yield client


def frames(read: bytes) -> list[str]:
    """Classify each frame of a complete stream by its event, its type or its text."""
    *complete, rest = read.decode().split("\n\n")
    assert not rest, "the last frame is incomplete"
    kinds = []
    for frame in (frame for frame in complete if not frame.startswith(":")):
        *event, data = frame.splitlines()
        text = data.removeprefix("data: ")
        body = {} if text == "[DONE]" else json.loads(text)
        kinds.append(str(body.get("type") or body.get("object") or next(iter(body), text)))
        assert event in ([], [f"event: {kinds[-1]}"])
    return kinds


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_gets_heartbeats_while_the_model_is_working_and_ends_as_its_api(path):
    heartbeat = INBOUND_APIS[path].heartbeat
    for failure in (None, Failed("no answer", kind="model_unreachable", retryable=True)):
        slow, read = SlowModel(failure), b""
        async with (
            serve_proxy(slow) as client,
            client.stream("POST", f"/v1/{path}", json=BODIES[path] | {"stream": True}) as answer,
        ):
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")
            async for chunk in answer.aiter_bytes():
                read += chunk
                if read.count(heartbeat) == 3:
                    slow.released.set()
        assert read.startswith(heartbeat * 3)
        found, ends = frames(read), ERRORS[path] if failure else [ENDS[path]]
        assert found[-len(ends) :] == ends
        assert (found.count(ENDS[path]), found.count("error")) == ((int("[DONE]" in ends), 1) if failure else (1, 0))
        assert (b"no answer" if failure else b"hello") in read
        assert not failure or b"no answer" in read.rpartition(b'"error"')[2]


@pytest.mark.parametrize("path", BODIES)
async def test_an_immediate_response_needs_no_heartbeat_and_an_immediate_failure_has_its_status(path):
    full = Failed("no answer", kind="model_rate_limited", retryable=True, retry_after=9)
    answers = []
    for slow in (SlowModel(), SlowModel(full)):
        slow.released.set()
        async with serve_proxy(slow, every=60) as client:
            answers.append(await client.post(f"/v1/{path}", json=BODIES[path] | {"stream": True}))
    answer, failed = answers
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")
    assert INBOUND_APIS[path].heartbeat not in answer.content
    assert (failed.status_code, failed.headers["retry-after"]) == (429, "9")
    assert "no answer" in failed.json()["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
async def test_a_failure_after_a_stream_started_is_an_error_of_the_sdk(path):
    slow = SlowModel(Failed("no answer", kind="model_unreachable", retryable=True))
    async with serve_app(server.create_app(slow, every=HEARTBEAT_SECONDS)) as url, sdks(url) as (openai, anthropic):
        creates: dict[str, Any] = {
            "responses": openai.responses.create,
            "chat/completions": openai.chat.completions.create,
            "messages": anthropic.messages.create,
        }
        stream = await creates[path](model="any", stream=True, **BODIES[path])
        slow.released.set()
        with pytest.raises((APIError, APIStatusError), match="no answer"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("stream", [None, 0.0, HEARTBEAT_SECONDS], ids=["whole", "before a stream", "within a stream"])
@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_disconnects_cancels_its_call_and_is_counted(path, stream):
    slow = SlowModel()
    async with serve_proxy(slow, stream or 60.0) as client:
        request = asyncio.create_task(_read(client, path, streamed=stream is not None))
        await wait_until(lambda: slow.started)
        if stream:
            await asyncio.sleep(3 * stream)
        request.cancel()
        await wait_until(lambda: slow.cancelled)
        metrics = (await client.get("/metrics")).text
    if stream is None:
        assert metric(metrics, "requests_total", route=f"/v1/{path}", status="499") == 1


async def _read(client: httpx.AsyncClient, path: str, *, streamed: bool) -> None:
    async with client.stream("POST", f"/v1/{path}", json=BODIES[path] | {"stream": streamed}) as answer:
        async for _ in answer.aiter_bytes():
            pass
