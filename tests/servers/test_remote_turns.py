"""Servers of NeMo Gym's Gymnasium kind are played turn by turn, with the rewards that its `gymnasium_agent` gives."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from gymsdk import Task, play, responses
from gymsdk.servers import resources
from gymsdk.servers.remote import RemoteEnvironment
from gymsdk.servers.remote_turns import TurnEnvironment
from gymsdk.types import Budget, Episode, Item, extract_text

from .app_helpers import serve_app, serve_handler

ROW = Task.ask("Guess a number.", target=7, guesses=3).row()
COUNTER_ROW = Task.ask("add", initial_count=1, expected_count=3).row()


class Guessing:
    """A server as NeMo Gym's: each wrong guess costs 0.1, and the right one brings 1.

    Args:
        capabilities: The `info` of `/reset`.
        answer: Replaces the answers of `/step`.
        status: The status of the answers of `/step`.
    """

    def __init__(self, capabilities: Item | None = None, answer: Item | None = None, status: int = 200) -> None:
        self.requests: list[tuple[str, Item]] = []
        self._capabilities = capabilities or {}
        self._answer = answer
        self._status = status
        self._guesses = 0

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append((request.path, body))
        if request.path == "/reset":
            answer: Item = {"observation": f"Below {body['target'] + 10}.", "info": self._capabilities}
            response = web.json_response(answer)
            response.set_cookie("session", "s")
            return response
        if request.path == "/close":
            return web.json_response({})
        assert request.cookies["session"] == "s"
        return web.json_response(self._answer or self._judge(body), status=self._status)

    def _judge(self, body: Item) -> Item:
        output = body["response"]["output"]
        calls = [item for item in output if item["type"] == "function_call"]
        texts = [extract_text(item["content"]) for item in output if item["type"] == "message"]
        outputs = [{"call_id": call["call_id"], "output": json.dumps({"odd": True})} for call in calls]
        if calls and not texts:
            return {"observation": None, "reward": 0.0, "info": {"tool_outputs": outputs}}
        self._guesses += 1
        if str(body["target"]) in texts:
            return {"observation": "Right.", "reward": 1.0, "terminated": True, "info": {"guesses": self._guesses}}
        truncated = self._guesses == body["guesses"]
        return {"observation": "Wrong.", "reward": -0.1, "truncated": truncated, "info": {"tool_outputs": outputs}}


@asynccontextmanager
async def serve_guessing(server: Guessing) -> AsyncIterator[TurnEnvironment]:
    async with serve_handler(server.handle) as url:
        yield TurnEnvironment(url, "guessing")


def list_paths(server: Guessing) -> list[str]:
    return [path for path, _ in server.requests]


async def test_an_episode_is_the_conversation_of_turns_and_its_reward_their_sum(policy):
    server = Guessing()
    async with serve_guessing(server) as environment:
        rollout = await play(environment, policy("1", [("parity", {})], "7"), ROW)
    assert (rollout.outcome, rollout.ended, rollout.turns) == ("scored", "done", 3)
    assert rollout.reward == pytest.approx(-0.1 + 0.0 + 1.0)
    assert [extract_text(item["content"]) for item in rollout.opening] == ["Guess a number.", "Below 17."]
    said = [
        item["output"] if item["type"] == "function_call_output" else extract_text(item.get("content") or "")
        for item in rollout.response["output"]
    ]
    assert said == ["1", "Wrong.", "", '{"odd": true}', "7"], "no observation follows the end"
    fields = rollout.verdict.model_dump()
    assert (fields["terminated"], fields["truncated"], fields["info"]) == (True, False, {"guesses": 2})
    assert list_paths(server) == ["/reset", "/step", "/step", "/step"]
    assert all(body["target"] == 7 for _, body in server.requests)


async def test_the_server_or_a_limit_truncates_an_episode(policy):
    calls = [("parity", {}), ("parity", {})]
    for turns, budget, ended, count, reward in (
        (("1", "2", "3", "4"), Budget(), "turns", 3, -0.3),
        (("1", "2", "3"), Budget(turns=2), "turns", 2, -0.2),
        ((calls, calls, "7"), Budget(tools=3), "tools", 2, 0.0),
    ):
        async with serve_guessing(Guessing()) as environment:
            rollout = await play(environment, policy(*turns), ROW, budget=budget)
        assert (rollout.ended, rollout.turns, rollout.reward) == (ended, count, pytest.approx(reward))
        assert rollout.verdict.model_dump()["truncated"] or ended == "tools"
    server = Guessing(answer={"info": {"tool_outputs": [{"call_id": "c", "output": "x" * 5000}]}})
    async with serve_guessing(server) as environment:
        rollout = await play(environment, policy([("parity", {})]), ROW, budget=Budget(turns=1, output=1000))
    assert 1000 <= len(rollout.response["output"][-1]["output"]) < 2000


async def test_tools_in_another_form_are_those_of_the_row(policy):
    tool = {"type": "function", "name": "parity", "parameters": {}}
    row = {**ROW, "responses_create_params": {**ROW["responses_create_params"], "tools": [tool]}}
    for offered in (3, ["a"], [{"type": "function"}], {"name": "x"}):
        async with serve_guessing(Guessing({"tools": offered})) as environment:
            rollout = await play(environment, policy("7"), row)
        assert (rollout.tools, rollout.reward) == ([tool], 1.0), offered


@pytest.mark.parametrize("text", ["7", ""])
async def test_a_turn_that_the_token_limit_cut_off_is_played_too(text):
    class Cut:
        async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
            output = [responses.build_message(text)] if text else []
            return responses.build_response(output, model="cut", status="incomplete", request=request)

    server = Guessing()
    async with serve_guessing(server) as environment:
        rollout = await play(environment, Cut(), ROW)
    assert list_paths(server) == ["/reset", "/step"]
    assert (rollout.reward, rollout.ended) == ((1.0, "done") if text else (pytest.approx(-0.1), "tokens"))


@pytest.mark.parametrize("supported", [True, False, None])
async def test_only_what_the_server_offers_is_used(policy, supported):
    offered = {"supports_explicit_close": supported, "supports_step_idempotency": supported}
    server = Guessing({key: value for key, value in offered.items() if value is not None})
    async with serve_guessing(server) as environment:
        rollout = await play(environment, policy("1", "7"), ROW)
    assert rollout.reward == pytest.approx(0.9)
    assert list_paths(server) == ["/reset", "/step", "/step", *(["/close"] if supported else [])]
    ids = [body.get("_ng_step_request_id") for path, body in server.requests if path == "/step"]
    assert len(set(ids)) == 2 if supported else set(ids) == {None}


async def test_a_turn_without_a_valid_answer_is_no_reward(policy):
    answers = [{"reward": "much"}, {"reward": math.inf}]
    answers += [{"reward": 1.0, "info": {"tool_outputs": outputs}} for outputs in ([{"output": "1"}], 3)]
    for answer, status in (({"detail": "broken"}, 500), *((answer, 200) for answer in answers)):
        server = Guessing({"supports_explicit_close": True}, answer, status)
        async with serve_guessing(server) as environment:
            rollout = await play(environment, policy("7"), ROW)
        assert (rollout.outcome, rollout.reward, rollout.failure.stage) == ("failed", None, "step"), answer
        assert list_paths(server)[-1] == "/close"


async def test_our_own_server_gives_the_same_reward_by_turns(counter, policy):
    call = [("increment_counter", {"count": 2})]
    async with serve_app(resources.create_app(counter())) as url:
        by_actions = await play(RemoteEnvironment(url, "counter"), policy(call, "done"), COUNTER_ROW, seed=5)
        by_turns = await play(TurnEnvironment(url, "counter"), policy(call, "done"), COUNTER_ROW, seed=5)
    assert (by_turns.reward, by_turns.ended) == (by_actions.reward, by_actions.ended) == (1.5, "done")
    assert by_turns.tools == by_actions.tools
