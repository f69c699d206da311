"""Servers with more requests than they can play queue or reject requests, and play a repeated one once."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest
from fastapi import FastAPI, Request, Response
from rollouts.conftest import RecordingProgress
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from gymsdk import Environment
from gymsdk.cluster.reports import Service
from gymsdk.edge.app import create_app
from gymsdk.edge.limits import ENTRY_OVERHEAD_BYTES, EpisodeSlots, IdempotencyCache
from gymsdk.edge.request import json_response
from gymsdk.http import client as http
from gymsdk.observability.metrics import ServerMetrics
from gymsdk.rollouts.plan import Plan
from gymsdk.rollouts.run import Run, execute
from gymsdk.rollouts.settings import RunLimits
from gymsdk.servers import agent
from gymsdk.types import Episode, Item, Model

from .engines import SlowModel
from .nodes import fetch_nodes, serve_app, serve_head, wait_until
from .test_agent import ROW

REQUESTS = 400

BUSY = """
import time
from gymsdk import Task, Verdict, hookimpl

@hookimpl
async def verify(task: Task):
    ends = time.monotonic() + 3.0
    while time.monotonic() < ends:
        pass
    return Verdict(reward=1.0)
"""
"""Source of an environment that blocks the event loop for three seconds in one request."""


pytestmark = pytest.mark.usefixtures("close_client")


def build_busy_app(done: list[int], *, seconds: float = 0.003) -> FastAPI:
    """Return an app with POST requests that each block the event loop for some *seconds*."""
    app = create_app("working", "An app that works.", metrics=ServerMetrics("working"))

    @app.post("/work")
    async def work(request: Request) -> Response:
        await request.body()
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends:
            pass
        done.append(1)
        return json_response({})

    return app


WORK = b"POST /work HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"
HEALTH = b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"


@pytest.mark.parametrize("kept_alive", [False, True])
async def test_health_checks_are_answered_before_queued_requests(kept_alive):
    done: list[int] = []
    work = WORK.replace(b"connection: close\r\n", b"")
    async with serve_app(build_busy_app(done)) as port:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(REQUESTS)]
        if kept_alive:
            for reader, writer in opened:
                writer.write(HEALTH.replace(b"connection: close\r\n", b""))
                await reader.readuntil(b'"ok"}')
        for _, writer in opened:
            writer.write(work)
        health, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEALTH)
        assert (await health.read()).startswith(b"HTTP/1.1 200")
        assert len(done) < REQUESTS / 2
        for reader, _ in opened:
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        for _, open_writer in [*opened, (health, writer)]:
            open_writer.close()
    assert len(done) == REQUESTS


@pytest.mark.slow
async def test_a_queued_request_whose_client_disconnects_is_never_started():
    done: list[int] = []
    async with serve_app(build_busy_app(done)) as port:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(REQUESTS)]
        for _, writer in opened:
            writer.write(WORK)
        for _, writer in opened[REQUESTS // 2 :]:
            writer.transport.abort()
        for reader, writer in opened[: REQUESTS // 2]:
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
    assert REQUESTS // 2 <= len(done) < REQUESTS * 3 // 4


async def test_episodes_beyond_the_limit_wait(counting):
    model = SlowModel()
    app = agent.create_app(counting, model, concurrency=1, queue=1)
    async with serve_app(app) as port, aiohttp.ClientSession() as client:
        url = f"http://127.0.0.1:{port}/run"
        first = asyncio.ensure_future(client.post(url, json=ROW))
        await wait_until(lambda: model.started == 1)
        leaving = asyncio.ensure_future(client.post(url, json=ROW))
        rejection = await wait_for_rejection(client, url)
        leaving.cancel()
        waiting = asyncio.ensure_future(wait_for_admission(client, url))
        model.released.set()
        assert ((await first).status, (await waiting).status) == (200, 200)
    assert rejection.status == 503
    assert (int(rejection.headers["retry-after"]), http.NOT_STARTED_HEADER in rejection.headers) == (5, True)
    assert (await rejection.json())["kind"] == "too_many"


async def wait_for_rejection(client: aiohttp.ClientSession, url: str) -> aiohttp.ClientResponse:
    """Return the first rejection; until the queue is full, a request waits."""
    async with asyncio.timeout(15):
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    return await client.post(url, json=ROW)


async def wait_for_admission(client: aiohttp.ClientSession, url: str) -> aiohttp.ClientResponse:
    """Return the first response that is not a rejection."""
    while (response := await client.post(url, json=ROW)).status == 503:  # noqa: ASYNC110  # the server has no event for it
        await asyncio.sleep(0.05)
    return response


@pytest.fixture
def counting(counter):
    return counter()


@asynccontextmanager
async def serve_limited_agent(environment: Environment, model: Model) -> AsyncIterator[tuple[str, list[Headers]]]:
    """Serve a head and an agent that plays two episodes at a time and queues two.

    Yield the URL of the head, and the headers of each response of the agent with status 503.
    """
    rejections: list[Headers] = []
    app = agent.create_app(environment, model, concurrency=2, queue=2)

    async def record_rejections(scope: Scope, receive: Receive, send: Send) -> None:
        async def record(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 503:
                rejections.append(Headers(raw=message["headers"]))
            await send(message)

        await app(scope, receive, record)

    async with serve_app(record_rejections) as port:
        fields = {"name": "counter_simple_agent", "kind": "responses_api_agents", "implementation": "simple_agent"}
        async with serve_head(Service.model_validate(fields | {"port": port})) as head_url:
            yield head_url, rejections


class DelayedModel:
    """A model that takes a few milliseconds, so that requests wait for a slot."""

    def __init__(self, model: Model) -> None:
        self._model = model

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        await asyncio.sleep(0.02)
        return await self._model.respond(request, episode=episode)


@pytest.mark.slow
async def test_a_run_with_more_rollouts_in_flight_than_its_servers_admit_waits_and_loses_none(
    counting, policy, monkeypatch, tmp_path
):
    monkeypatch.setattr("gymsdk.edge.limits.DEFAULT_RETRY_SECONDS", 1.0)
    tasks = tmp_path / "rows.jsonl"
    tasks.write_bytes(orjson.dumps(ROW | {"agent_ref": {"name": "counter_simple_agent"}}) + b"\n")
    async with serve_limited_agent(counting, DelayedModel(policy("done"))) as (head_url, rejections):
        plan = Plan(environments={}, head=head_url, tasks=tasks, repeats=40)
        run = Run(plan, tmp_path / "run", limits=RunLimits(concurrency=40, attempts=1))
        [metrics] = await execute(run, RecordingProgress())
    assert metrics["outcomes"] == {"scored": 40}
    # A run that sends its requests again at once is rejected hundreds of times.
    assert 0 < len(rejections) < 200
    assert all(int(headers["retry-after"]) >= 1 for headers in rejections)


@pytest.mark.slow
async def test_a_node_with_a_busy_event_loop_keeps_its_lease(installed):
    installed("busy", BUSY)
    async with serve_head(lease=1.0) as head_url:
        command = [sys.executable, "-m", "gymsdk", "serve", "busy", "--role", "resources", "--head", head_url, "--json"]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            url = orjson.loads(await process.stdout.readline())["servers"]["busy"]["url"]
            row: dict[str, Any] = {"responses_create_params": {"input": "?"}, "response": {"output": []}}
            verification = asyncio.ensure_future(http.post(f"{url}/verify", row, retry=http.DEFAULT_RETRY))
            while not verification.done():
                assert [known["name"] for known in (await fetch_nodes(head_url))["instances"]] == ["busy"]
                await asyncio.sleep(0.1)
            assert (await verification).ok
        finally:
            process.kill()
            await process.communicate()


async def test_cancelling_a_queued_request_as_a_slot_becomes_free_does_not_affect_other_requests():
    admission, finish = EpisodeSlots(slots=1, queue=10), asyncio.Event()

    async def episode(number: int) -> int:
        async with admission:
            await finish.wait()
        return number

    playing, leaving, waiting = (asyncio.ensure_future(episode(number)) for number in range(3))
    await asyncio.sleep(0)
    finish.set()
    leaving.cancel()
    results = await asyncio.gather(playing, leaving, waiting, return_exceptions=True)
    assert (results[0], type(results[1]), results[2]) == (0, asyncio.CancelledError, 2)
    async with asyncio.timeout(5):
        assert await episode(3) == 3
    assert (admission.taken, admission.waiting) == (0, 0)
    # A slot that was granted to a cancelled request goes to the next one.
    async with admission:
        first, second = (asyncio.ensure_future(admission.__aenter__()) for _ in range(2))
        await asyncio.sleep(0)
    first.cancel()
    async with asyncio.timeout(5):
        await second
    assert (admission.taken, admission.waiting) == (1, 0)


async def test_the_time_in_the_queue_is_counted():
    admission, inside = EpisodeSlots(slots=1, queue=10), asyncio.Event()

    async def hold() -> None:
        async with admission:
            inside.set()
            await asyncio.sleep(0.05)

    first = asyncio.ensure_future(hold())
    await inside.wait()
    assert admission.waited == 0
    await asyncio.gather(first, hold(), hold())
    assert admission.waited >= 0.04 + 0.09


class Operation:
    """An operation that counts its runs and finishes when it is released."""

    def __init__(self, answer: bytes = b"done") -> None:
        self.runs = 0
        self.released = asyncio.Event()
        self._answer = answer

    async def __call__(self) -> bytes:
        self.runs += 1
        await self.released.wait()
        return self._answer


async def test_responses_expire_by_age_and_by_size_and_replacing_one_takes_no_more_memory():
    now, largest = 0.0, 2 * (ENTRY_OVERHEAD_BYTES + 6)
    cache, work = IdempotencyCache(seconds=10, largest=largest, clock=lambda: now), Operation(b"12345")
    work.released.set()
    for key in "abc":
        await cache(key, work)
    assert len(cache) == 2
    now = 11.0
    await cache("d", work)
    assert len(cache) == 1
    cache, slow = IdempotencyCache(seconds=10, largest=largest, clock=lambda: now), Operation(b"54321")
    cancelled = asyncio.ensure_future(cache("a", slow))
    await asyncio.sleep(0)
    cancelled.cancel()
    slow.released.set()
    for key in "ab":
        await cache(key, work)
    await asyncio.gather(cancelled, return_exceptions=True)
    assert len(cache) == 2
