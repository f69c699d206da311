"""Shared fixtures: the environment, rows, and policies with scripted turns."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import gymsdk
from gymsdk import Action, Environment, Episode, Rollout, ToolCall


class Policy:
    """A model that calls *choose* for each turn and records the *episode*."""

    def __init__(self, choose: Callable[[Episode], Awaitable[list[Action]]]) -> None:
        self.choose = choose
        self.episode: Episode | None = None

    async def respond(self, request: dict[str, Any], *, episode: Episode | None = None) -> dict[str, Any]:
        assert episode is not None
        assert request["input"]
        self.episode = episode
        turn = len(episode.transcript.items)
        return {"output": [_item(action, f"c{turn}_{n}") for n, action in enumerate(await self.choose(episode))]}


def _item(action: Action, call_id: str) -> dict[str, Any]:
    if isinstance(action, ToolCall):
        return {"type": "function_call", "name": action.name, "arguments": action.arguments, "call_id": call_id}
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": action.text}]}


@pytest.fixture(scope="session")
def environment() -> Environment:
    return gymsdk.load("tool_call")


@pytest.fixture(scope="session")
def oracle(environment):
    async def choose(episode: Episode) -> list[Action]:
        moves = await environment.solve(episode)
        assert moves is not None
        return moves

    return choose


@pytest.fixture(scope="session")
def play_with_policy(environment):
    """Return a function that plays a row with a policy and returns the rollout and the final state."""

    async def play(row, choose) -> tuple[Rollout, Any]:
        policy = Policy(choose)
        rollout = await gymsdk.play(environment, policy, row)
        assert rollout.failure is None, rollout.failure
        assert policy.episode is not None
        return rollout, policy.episode.state

    return play


@pytest.fixture(scope="session")
def play_turns(play_with_policy):
    """Return a function that plays a row with fixed turns: texts, or lists of (name, arguments) of calls."""

    async def play(row, *turns) -> Rollout:
        left = iter(turns)

        async def choose(_: Episode) -> list[Action]:
            turn = next(left, "Done.")
            if isinstance(turn, str):
                return [gymsdk.Message(content=turn)]
            return [ToolCall(name=name, arguments=json.dumps(arguments)) for name, arguments in turn]

        rollout, _ = await play_with_policy(row, choose)
        return rollout

    return play


@pytest.fixture(scope="session")
def generate_row(environment):
    """Return a function that generates the first row for a seed."""

    def row(seed: int, split: str = "train"):
        return next(environment.tasks(split, seed=seed))

    return row


@pytest.fixture(scope="session")
def weather_row():
    """A row in the published format for `get_weather`."""
    shape = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "name": "get_weather", "description": "", "parameters": shape, "strict": True}
    messages = [{"role": "developer", "content": "Be helpful."}, {"role": "user", "content": "going out in sf tn"}]
    return {"responses_create_params": {"input": messages, "tools": [tool]}}


@pytest.fixture(scope="session")
def truth_row():
    """Return a function that builds a row with a ground truth and tools that only the row defines."""

    def row(*calls: tuple[str, dict[str, Any]], **fields: Any) -> dict[str, Any]:
        names = [*(name for name, _ in calls), "do_nothing"]
        tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in dict.fromkeys(names)]
        truth = [{"name": name, "arguments": arguments} for name, arguments in calls]
        return {"responses_create_params": {"input": "Do it.", "tools": tools}, "ground_truth": truth, **fields}

    return row
