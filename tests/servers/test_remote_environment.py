"""A remote environment over HTTP plays as in process, at gymsdk's resources server and at one like NeMo Gym's."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from aiohttp import web

from gymsdk import Environment, Task, Verdict, hookimpl, play
from gymsdk.errors import BadRow
from gymsdk.http.client import Retry
from gymsdk.servers import resources
from gymsdk.servers.remote import RemoteEnvironment
from gymsdk.types import Item

from .app_helpers import serve_app, serve_handler
from .nodes import metric

ROW = Task.ask("add", initial_count=1, expected_count=3).row()
ADD = [("increment_counter", {"count": 2})]
TOOLS = [{"type": "function", "name": name, "parameters": {}} for name in ("add", "verify", "break")]


async def test_an_episode_is_played_as_in_process_and_leaves_no_session(counter, policy):
    invalid = [[("increment_counter", arguments)] for arguments in ({"count": "x"}, "{torn")]
    async with serve_app(resources.create_app(counter())) as url, httpx.AsyncClient(base_url=url) as client:
        environment = RemoteEnvironment(url, "counter")
        for turn in (ADD, *invalid):
            local = await play(counter(), policy(turn, "done"), ROW, seed=5)
            remote = await play(environment, policy(turn, "done"), ROW, seed=5)
            assert (remote.reward, remote.components) == (local.reward, local.components)
            assert (remote.opening, remote.tools) == (local.opening, local.tools)
            assert remote.response["output"] == local.response["output"]
            if turn is ADD:
                assert (remote.reward, remote.components) == (1.5, {"verdict": 1.0, "steps": 0.5})
        assert metric((await client.get("/metrics")).text, "sessions_open", server="counter") == 0
        failed = await play(environment, policy([("stumble", {})]), ROW)
        assert (failed.outcome, failed.failure.kind, failed.failure.stage) == ("failed", "tool_raised", "step")
        with pytest.raises(BadRow, match="does not fit environment 'counter'"):
            await play(environment, policy("done"), ROW | {"initial_count": "many"})


async def test_hooks_behind_a_server_get_the_id_of_the_rollout(policy):
    ids: list[str] = []

    class Named:
        @hookimpl
        async def verify(self, episode_id: str) -> Verdict:
            ids.append(episode_id)
            return Verdict(reward=1.0)

    async with serve_app(resources.create_app(Environment("named", Named()))) as url:
        for name in ("r7.3.1.0", ""):
            await play(RemoteEnvironment(url, "named"), policy("done"), ROW, id=name)
    assert ids[0] == "r7.3.1.0"
    assert ids[1].startswith("episode_")


async def test_a_remote_failure_is_the_same_failure_locally(counter, policy):
    for judge in ("down", "lost"):
        local = await play(counter(judge=judge), policy("done"), ROW)
        async with serve_app(resources.create_app(counter(judge=judge))) as url:
            remote = await play(RemoteEnvironment(url, "counter"), policy("done"), ROW)
        assert (remote.outcome, remote.reward) == ("unscorable", None)
        assert (remote.failure.kind, remote.failure.stage) == (local.failure.kind, local.failure.stage)
    gone = RemoteEnvironment("http://127.0.0.1:9", "counter", retry=Retry(times=1, first=0.001))
    failure = (await play(gone, policy("done"), ROW)).failure
    assert (failure.stage, failure.kind, failure.retryable) == ("reset", "server_unreachable", True)


class NemoGymServer:
    """A resources server like NeMo Gym's: a cookie on every response, errors as tool outputs, no end of a session."""

    def __init__(self, verdict: Item | None = None) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        self.verdict = {"reward": 0.25, "extra": "yes"} if verdict is None else verdict

    async def answer(self, request: web.Request) -> web.StreamResponse:
        sent = await request.json()
        self.requests.append((request.path, request.headers.get("Cookie", ""), sent))
        row = sent if isinstance(sent, dict) else {}
        body: Any = {"/seed_session": {}, "/add": {"sum": 3}, "/verify": {**row, **self.verdict}}.get(request.path)
        status = 200 if body is not None else 500
        answer = web.json_response("RuntimeError('broke')" if body is None else body, status=status)
        answer.set_cookie("StrangeServer___s", f"session-{len(self.requests)}", path="/", httponly=True)
        return answer


TASK = {"responses_create_params": {"input": "add", "tools": TOOLS}, "own": 1}


async def test_a_nemo_gym_server_is_played_by_its_own_rules(policy):
    server = NemoGymServer()
    calls = [("add", {"a": 1}), ("add", "{torn"), ("verify", {}), ("break", [1])]
    async with serve_handler(server.answer) as url:
        rollout = await play(RemoteEnvironment(url, "sums"), policy(calls, "done"), TASK)
    outputs = [item["output"] for item in rollout.response["output"] if item["type"] == "function_call_output"]
    assert [path for path, _, _ in server.requests] == ["/seed_session", "/add", "/break", "/verify"]
    # The cookies of the last response go with the next request.
    sent = [cookie for _, cookie, _ in server.requests]
    assert sent == ["", *(f"StrangeServer___s=session-{number}" for number in (1, 2, 3))]
    assert outputs[0] == '{"sum": 3}'
    assert outputs[1].startswith('{"error": "Invalid tool call arguments: ')
    assert "There is no tool named 'verify'" in outputs[2]
    assert outputs[3] == "\"RuntimeError('broke')\""
    assert (rollout.reward, rollout.verdict and rollout.verdict.model_dump()["extra"]) == (0.25, "yes")


async def test_a_missing_reward_is_a_failure(policy):
    down = {"reward": 0.0, "_ng_failure_class": "judge_failed", "_ng_failure_judge_error": "x"}
    for verdict, outcome, kind in (
        (down, "unscorable", "judge_failed"),
        ({"reward": 0.0, "mask_sample": True, "failure_kind": "odd"}, "unscorable", "odd"),
        ({"reward": None}, "failed", "bad_answer"),
        ({"reward": "much"}, "failed", "bad_answer"),
        ({"reward": float("inf")}, "failed", "bad_answer"),
    ):
        async with serve_handler(NemoGymServer(verdict).answer) as url:
            rollout = await play(RemoteEnvironment(url, "sums"), policy("done"), TASK)
        assert (rollout.outcome, rollout.failure and rollout.failure.kind) == (outcome, kind), verdict
