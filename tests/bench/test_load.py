"""Loads on running servers, and their counts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import gymsdk
from gymsdk import Model, ServerClient, testing
from gymsdk.bench.generator import LoadPlan, run_load
from gymsdk.bench.readings import MetricsDifference, read_metrics
from gymsdk.bench.recording import Recording, record_rollouts
from gymsdk.bench.stage import LOAD, SERVERS, Stage, join_servers
from gymsdk.config.model import Deployment
from gymsdk.deploy import process
from gymsdk.errors import Failed, GymsdkError
from gymsdk.http import client
from gymsdk.servers.session_clients import CLIENT_HEADER
from gymsdk.types import Episode, Item


@pytest.fixture(autouse=True)
def _sums(installed: Callable[..., Path]) -> None:
    installed()


@asynccontextmanager
async def staged(model: str | Model = "scripted/oracle", **settings: Any) -> AsyncIterator[Stage]:
    async with process.serve(model=model, deployment=Deployment(environments={"sums": settings})) as running:
        yield await join_servers(running.head_url)


async def right(tasks: int = 6) -> Recording:
    return await record_rollouts(gymsdk.load("sums"), gymsdk.model("scripted/oracle"), split="train", limit=tasks)


class Slow:
    """A slow policy that records the highest number of concurrent requests."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.01)
        self.now -= 1
        return await gymsdk.model("scripted/oracle").respond(request, episode=episode)


class Broken:
    """A policy that fails if the first digit of the question is odd."""

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        assert episode is not None
        if episode.row["number"] % 2:
            raise Failed("it is odd", kind="odd")
        return await gymsdk.model("scripted/oracle").respond(request, episode=episode)


async def test_an_open_loop_sends_at_the_given_rate_and_bounds_the_outstanding_rollouts() -> None:
    model = Slow()
    async with staged(model) as stage:
        plan = LoadPlan(concurrency=3, rollouts=30, rate=2000.0)
        load = await run_load(stage, await right(), plan)
    assert (load.rollouts, load.wrong, model.most) == (30, 0, 3)
    assert load.open_loop is not None
    assert (load.open_loop.rate, load.open_loop.most, load.open_loop.keeps_up) == (2000.0, 3, False)
    assert load.open_loop.delayed > 10
    # The later rollouts were due long before they could be sent.
    assert load.latency is not None
    assert load.latency.max > 10.0 * 30 / 3 / 2
    assert load.stages["send"] > 0


async def test_every_rollout_is_counted_and_correct_and_a_load_shows_where_the_time_went() -> None:
    model = Slow()
    async with staged(model) as stage:
        assert stage.pids == {SERVERS: os.getpid()}
        load = await run_load(stage, await right(), LoadPlan(concurrency=5, rollouts=25))
    assert (load.rollouts, load.reward, load.expected, load.wrong, load.failures) == (25, 1.0, 1.0, 0, {})
    assert (load.calls, load.requests, load.open) == (1.0, {"sums_simple_agent": 1.0}, 0)
    assert load.is_correct
    assert model.most == 5
    assert load.latency is not None
    assert 0 < load.latency.p50 <= load.latency.p90 <= load.latency.p99
    assert sum(load.stages.values()) == pytest.approx(load.latency.mean, rel=0.1)
    assert {"queue", "reset", "model", "step", "verify", "close", "serialise", "server", "client"} == load.stages.keys()
    assert load.stages["model"] >= 10.0
    [(server, traffic)] = load.traffic.items()
    assert server == "sums_simple_agent"
    assert traffic.sent > traffic.received > 200
    assert load.loop_lag.keys() == {SERVERS, LOAD}
    assert all(0 <= lag.p50 <= lag.p99 <= lag.max for lag in load.loop_lag.values())
    assert load.cpu[SERVERS] > 0
    assert load.memory[SERVERS].most >= load.memory[SERVERS].before > 20.0


async def test_a_reward_that_differs_from_the_recording_is_wrong_and_an_unknown_one_is_not_compared() -> None:
    recording = await right(4)
    async with staged() as stage:
        other = replace(recording, rewards=(1.0, 0.0, 1.0, 1.0))
        load = await run_load(stage, other, LoadPlan(concurrency=2, rollouts=8))
        assert (load.wrong, load.reward, load.expected, load.is_correct) == (2, 1.0, 0.75, False)
        load = await run_load(stage, replace(recording, rewards=None), LoadPlan(concurrency=2, rollouts=4))
    assert (load.wrong, load.expected, load.reward) == (None, None, 1.0)


async def test_failures_are_counted_by_their_kind() -> None:
    recording = await right(10)
    odd = sum(job.row["number"] % 2 for job in recording.jobs)
    async with staged(Broken()) as stage:
        load = await run_load(stage, recording, LoadPlan(concurrency=4, rollouts=10))
    assert load.failures == {"odd": odd}
    assert load.messages == {"odd": "it is odd"}
    assert (load.rollouts, load.wrong) == (10, 0)
    assert not load.is_correct


@pytest.mark.slow
async def test_a_timed_load_ends_in_time_and_repeats_tasks() -> None:
    async with staged() as stage:
        load = await run_load(stage, await right(2), LoadPlan(concurrency=2, seconds=0.7))
    assert load.seconds >= 0.7
    assert load.rollouts > 2
    assert load.is_correct


async def test_an_ended_server_process_is_reported() -> None:
    gone = await asyncio.create_subprocess_exec("true")
    await gone.wait()
    async with staged() as stage:
        with pytest.raises(GymsdkError, match="the process of the servers ended under load"):
            await run_load(
                replace(stage, pids={SERVERS: gone.pid}), await right(1), LoadPlan(concurrency=1, rollouts=1)
            )


async def test_requests_of_the_policy_endpoint_are_counted() -> None:
    async with testing.serve(testing.build_app(gymsdk.model("scripted/null"))) as url:
        before = await read_metrics([url.removesuffix("/v1")], ServerClient(url).build_headers_for)
        for body in ({"input": "hi"}, {"input": "ho"}, {}):
            await client.post(f"{url}/responses", body, retry=client.DEFAULT_RETRY)
        after = await read_metrics([url.removesuffix("/v1")], ServerClient(url).build_headers_for)
    assert MetricsDifference(before, after).count_requests() == {"policy": 3}


async def test_open_sessions_are_read() -> None:
    async with staged() as stage:
        row = (await right(1)).jobs[0].row
        answer = await stage.served.client.post("sums", "/seed_session", json=row)
        assert answer.ok
        assert (await read_metrics(stage.metered, stage.served.client.build_headers_for)).open == 1
        ours = {CLIENT_HEADER: "1"}
        await stage.served.client.post("sums", "/close_session", cookies=answer.cookies, headers=ours)
        assert (await read_metrics(stage.metered, stage.served.client.build_headers_for)).open == 0


async def test_a_token_is_sent_only_to_its_servers() -> None:
    brought: list[str | None] = []

    async def metrics(request: web.Request) -> web.Response:
        brought.append(request.headers.get("authorization"))
        return web.Response()

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with testing.serve(app) as url:
        for head in ("https://head.example:1", "http://127.0.0.1:1"):
            await read_metrics(
                [url.removesuffix("/v1")], ServerClient(head, token="a-token-of-the-head").build_headers_for
            )
    assert brought == [None, "Bearer a-token-of-the-head"]
