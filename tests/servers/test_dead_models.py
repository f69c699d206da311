"""A model server that hangs, answers 500 or is gone costs the episode its reward on every interface."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gymsdk import Config, Environment, Episode, Model, Task, hookimpl, model, play
from gymsdk import responses as wire
from gymsdk.servers import agent
from gymsdk.servers import environment as environment_server
from gymsdk.types import Budget, Item

from .app_helpers import app_client

ROW = Task.ask("add", initial_count=1, expected_count=1).row()
EPISODE = {
    "episode_id": {"rollout_id": "r1", "attempt": 0},
    "task": {"task_id": {"taskset": "counter:train", "task_id": "7"}, "task_input": ROW},
}
BUDGET = Budget(seconds=0.6)


async def _hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read the request and never answer, until the client disconnects."""
    while await reader.read(2**16):
        pass
    writer.close()


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer 500 to a request."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    await writer.drain()
    writer.close()


@asynccontextmanager
async def _serve_fault(fault: str) -> AsyncIterator[Model]:
    """Yield a model behind a server with this *fault*."""
    server = await asyncio.start_server(_hang if fault == "hangs" else _refuse, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    if fault == "is gone":
        server.close()
        await server.wait_closed()
    try:
        yield model("endpoint/dead", base_url=url)
    finally:
        server.close()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hangs", "answers 500", "is gone"])
async def test_an_episode_with_a_dead_model_fails_everywhere(counter, fault):
    ids = {"agent_session_id": "s1", "episode_id": EPISODE["episode_id"], "task_id": EPISODE["task"]["task_id"]}
    async with (
        _serve_fault(fault) as dead,
        app_client(agent.create_app(counter(), dead, budget=BUDGET)) as by_agent,
        app_client(agent.create_app(counter(), dead, budget=BUDGET)) as by_session,
        app_client(environment_server.create_app(counter(), dead, budget=BUDGET)) as by_environment,
        counter() as environment,
    ):
        assert (await by_session.post("/v1/agent_sessions", json=ids)).status_code == 200
        local, flat, responses, in_session, episode = await asyncio.gather(
            play(environment, dead, ROW, budget=BUDGET),
            by_agent.post("/run", json=ROW),
            by_agent.post("/v1/responses", json={"input": "add"}),
            by_session.post("/v1/responses", json={"input": "add"}),
            by_environment.post("/run", json=EPISODE),
        )
    assert (local.outcome, local.reward, local.ended) == ("failed", None, None)
    assert (local.failure.stage, local.failure.kind, local.failure.retryable) == ("model", "model_timeout", True)
    for answer in (flat, responses, in_session):
        body = answer.json()
        assert (answer.status_code, "reward" in body, "retry-after" in answer.headers) == (503, False, True)
        assert (body["stage"], body["kind"], body["retryable"]) == ("model", "model_timeout", True)
    failure = episode.json()["failure"]
    assert (failure["failure_kind"], failure["stage"], failure["terminal"]) == ("gymsdk:model_timeout", "agent", False)


async def test_a_deadline_during_retries_reports_the_last_failure(counter):
    async with _serve_fault("answers 500") as dead, counter() as environment:
        failure = (await play(environment, dead, ROW, budget=BUDGET)).failure
    assert "answered 500)" in failure.message


class TalkConfig(Config):
    user: Model


class TalkEnvironment:
    """An environment with steps that call a simulated user, which is a model."""

    @hookimpl
    async def step(self, config: TalkConfig) -> None:
        await config.user.respond({"input": "hello"})

    @hookimpl
    def verify(self) -> None:
        raise AssertionError("a failed episode must not be verified")


class LateModel:
    """A policy that answers late, so that its step starts in the last tenth of the episode's time."""

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        await asyncio.sleep(0.95)
        return wire.build_response([wire.build_message("hello")], model="late", request=request)


@pytest.mark.slow
async def test_a_hanging_model_of_the_environment_is_blamed_for_the_deadline():
    async with _serve_fault("hangs") as hanging:
        talk = Environment("talk", TalkEnvironment(), {"user": hanging})
        rollout = await play(talk, LateModel(), Task.ask("go"), budget=Budget(seconds=1.0))
    assert (rollout.outcome, rollout.ended) == ("failed", None)
    assert (rollout.failure.stage, rollout.failure.kind) == ("step", "model_timeout")
