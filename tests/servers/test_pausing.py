"""A trainer pauses the model server, updates the weights, and resumes; no call meets an engine between two versions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse

from gymsdk import load
from gymsdk.config.model import Deployment, ModelServerConfig
from gymsdk.deploy.process import serve
from gymsdk.http import client as http
from gymsdk.models.registry import model
from gymsdk.servers.model import create_app

from .nodes import serve_app, wait_until

CALL = {"model": "policy", "input": "hello"}


class Engine:
    """An inference engine with answers that take *seconds* and name the version of its weights."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.abort_seconds = seconds, 0.0
        self.version = 1
        self.running = self.started = self.finished = 0
        self.calls_tool_first = False
        self.metric = "vllm:num_requests_running"
        self.app = FastAPI()
        self.app.post("/v1/chat/completions")(self.chat)
        self.app.get("/metrics")(self.metrics)

    async def metrics(self) -> PlainTextResponse:
        return PlainTextResponse(f'# TYPE x gauge\n{self.metric}{{engine="0"}} {float(self.running)}\n')

    async def chat(self, request: Request) -> dict[str, Any]:
        await request.body()
        version = self.version
        self.running += 1
        self.started += 1
        try:
            # A client that leaves aborts the generation, as in vLLM.
            left = asyncio.ensure_future(self._wait_for_disconnect(request))
            done, _ = await asyncio.wait({left}, timeout=self.seconds)
            left.cancel()
            # The engine works on an aborted generation for a while.
            await asyncio.sleep(self.abort_seconds if done else 0)
        finally:
            self.running -= 1
        assert version == self.version, "the weights changed while a call was running"
        self.finished += 1
        message: dict[str, Any] = {"role": "assistant", "content": "hi"}
        if self.calls_tool_first and self.finished == 1:
            function = {"name": "company_directory_find_email_address", "arguments": '{"name": "raj"}'}
            message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "1", "model": "policy", "choices": [choice], "metadata": {"weight_version": f"v{version}"}}

    @staticmethod
    async def _wait_for_disconnect(request: Request) -> None:
        while not await request.is_disconnected():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
async def server(engine):
    async with serve_app(engine.app) as port:
        policy = model("vllm/policy", base_url=f"http://127.0.0.1:{port}/v1", timeout=20.0)
        async with serve_app(create_app(policy)) as own, connect(f"http://127.0.0.1:{own}") as client:
            yield client
    await http.aclose()


def connect(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=30)


async def call(client: httpx.AsyncClient) -> str:
    answer = await client.post("/v1/responses", json=CALL)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["output"][-1]["weight_version"])


async def pause(client: httpx.AsyncClient, wait: float | None = None, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = await client.post("/pause", params={} if wait is None else {"wait": wait}, json=body)
    assert answer.status_code == status, answer.text
    return dict(answer.json())


@asynccontextmanager
async def run_calls(engine: Engine, server: httpx.AsyncClient, count: int) -> AsyncIterator[list[asyncio.Task[str]]]:
    """Send calls, wait until all of them are running, and resume at the end."""
    running = [asyncio.ensure_future(call(server)) for _ in range(count)]
    await wait_until(lambda: engine.running == count)
    yield running
    await server.post("/resume")


async def test_running_calls_finish_and_new_calls_get_the_new_weights(engine, server):
    engine.seconds = 0.3
    async with run_calls(engine, server, 5) as running:
        nothing = {"running": 0, "cut": 0, "in_flight": 0, "oldest_seconds": None}
        assert await pause(server, wait=10) == {"paused": True, "waiting": 0, **nothing}
        assert engine.running == 0
        waiting = [asyncio.ensure_future(call(server)) for _ in range(3)]
        await asyncio.sleep(0.2)
        assert engine.started == 5
        assert (await server.get("/pause")).json() == {"paused": True, "waiting": 3, **nothing}
        engine.version = 2
        assert (await server.post("/resume")).json()["paused"] is False
    assert await asyncio.gather(*running) == ["v1"] * 5
    assert await asyncio.gather(*waiting) == ["v2"] * 3


async def test_a_pause_answers_at_once_with_the_number_of_calls(engine, server):
    engine.seconds = 1.0
    async with run_calls(engine, server, 3) as running:
        state = await pause(server)
        assert (state["paused"], state["in_flight"], engine.running, engine.finished) == (True, 3, 3, 0)
        assert 0 < state["oldest_seconds"] < 60
        later = await pause(server, wait=0.1, status=202)
        assert (later["in_flight"], engine.running) == (3, 3)
        assert later["oldest_seconds"] > state["oldest_seconds"]
        assert (await pause(server, wait=10))["in_flight"] == engine.running == 0
    assert await asyncio.gather(*running) == ["v1"] * 3


async def test_a_cut_call_is_in_flight_until_the_engine_has_ended_it_and_starts_again_after_the_pause(engine, server):
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "sglang:num_running_reqs")
    for version, metric in enumerate((*names, "sglang:num_queue_reqs"), 2):
        engine.seconds, engine.abort_seconds, engine.metric, engine.started = 15.0, 0.6, metric, 0
        async with run_calls(engine, server, 3) as running:
            state = await pause(server, wait=0.1, status=202, cut_after=0)
            found = (state["paused"], state["running"], state["cut"], state["in_flight"], engine.running)
            assert found == (True, 0, 3, 3, 3), metric
            assert (await pause(server, wait=10))["in_flight"] == engine.running == 0
            engine.version, engine.seconds = version, 0.0
        assert await asyncio.gather(*running) == [f"v{version}"] * 3
        assert engine.started == 6


async def test_waiting_again_does_not_revoke_the_cut(engine, server):
    engine.seconds = 15.0
    async with run_calls(engine, server, 1) as running:
        await pause(server, cut_after=0.3)
        state = await pause(server, wait=10)
        assert (state["cut"], state["in_flight"], engine.running) == (1, 0, 0)
        engine.seconds = 0.0
    assert await running[0] == "v1"


async def test_an_engine_that_tells_no_number_may_still_have_the_cut_calls(engine, server):
    engine.seconds, engine.metric = 15.0, "requests"
    async with run_calls(engine, server, 2) as running:
        state = await pause(server, wait=10, status=202, cut_after=0)
        assert (state["running"], state["in_flight"]) == (0, 2)
        engine.seconds = 0.0
        assert (await server.post("/resume")).json()["in_flight"] == 0
    assert await asyncio.gather(*running) == ["v1"] * 2


@pytest.mark.parametrize("metric", ["vllm:num_requests_running", "requests"])
async def test_wait_seconds_still_cuts_and_waits_and_names_the_new_parameters(engine, server, metric, caplog):
    engine.seconds, engine.abort_seconds, engine.metric = 15.0, 0.5, metric
    async with run_calls(engine, server, 2) as running:
        state = await pause(server, wait_seconds=0.1)
        assert (state["running"], state["cut"]) == (0, 2)
        assert engine.running == state["in_flight"] == (0 if metric.startswith("vllm") else 2)
        await pause(server, wait_seconds=0)
        assert caplog.text.count("POST /pause with wait_seconds is deprecated: send cut_after") == 1
        engine.seconds = 0.0
    await asyncio.gather(*running)


async def test_a_pause_without_resume_ends_by_itself_unless_a_second_pause_follows(engine, server):
    await pause(server, max_seconds=0.3)
    assert await call(server) == "v1"
    assert (await server.get("/pause")).json()["paused"] is False
    await pause(server, max_seconds=0.3)
    await pause(server, max_seconds=60)
    waiting = asyncio.ensure_future(call(server))
    await asyncio.sleep(0.6)
    assert not waiting.done()
    await server.post("/resume")
    assert await waiting == "v1"


async def test_a_client_that_leaves_during_a_pause_waits_no_longer(server):
    await pause(server)
    with pytest.raises(httpx.ReadTimeout):
        await server.post("/v1/responses", json=CALL, timeout=0.2)
    async with asyncio.timeout(10):
        while (await server.get("/pause")).json()["waiting"]:  # noqa: ASYNC110 - servers have no event for it
            await asyncio.sleep(0.02)
    await server.post("/resume")


async def test_an_invalid_pause_is_refused(server):
    bodies = [{"wait_seconds": -1}, {"cut_after": -1}, {"max_seconds": 0}, {"max_seconds": 1e9}, {"mode": "cut"}]
    for values in (*bodies, {"wait": -1}, {"wait": "nan"}, {"wait": "1e9"}, {"wait": ""}):
        for where in ("json", "params"):
            answer = await server.post("/pause", **({"json": {}} | {where: values}))
            assert (answer.status_code, next(iter(values)) in answer.text) == (422, True), (where, values)
    assert await call(server) == "v1"


async def test_an_agent_of_the_same_process_waits_too_and_a_rollout_that_spans_an_update_names_both_versions(engine):
    engine.calls_tool_first, name = True, "tool_call"
    async with serve_app(engine.app) as port:
        chosen = ModelServerConfig(name="vllm/policy", options={"base_url": f"http://127.0.0.1:{port}/v1"})
        async with (
            serve(deployment=Deployment(environments={name: {}}, model=chosen, port=0)) as running,
            connect(running.urls[f"{name}_simple_agent"]) as agent,
            connect(running.urls["policy_model"]) as policy,
        ):
            engine.seconds = 0.2
            playing = asyncio.ensure_future(agent.post("/run", json=next(load(name).tasks("train", seed=0)).row()))
            await wait_until(lambda: engine.running)
            await pause(policy, wait=10)
            await asyncio.sleep(0.3)
            assert (engine.started, playing.done()) == (1, False)
            engine.version = 2
            await policy.post("/resume")
            played = await playing
    await http.aclose()
    assert played.json()["gymsdk"]["weight_versions"] == ["v1", "v2"]
