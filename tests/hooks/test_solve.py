"""The `solve` hook: its arguments, its valid results, and the failures of invalid results."""

from __future__ import annotations

import pytest

from gymsdk import Environment, Failed, Message, ToolCall, hookimpl

from .environments import Judge


class Solves(Judge):
    """An environment with given solutions."""

    def __init__(self, answer) -> None:
        self.answer = answer

    @hookimpl
    async def solve(self, task, state, transcript):
        return self.answer


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, None),
        (Message(content="42"), [Message(content="42")]),
        ([ToolCall(name="go")], [ToolCall(name="go")]),
        ((ToolCall(name="go"), ToolCall(name="stop")), [ToolCall(name="go"), ToolCall(name="stop")]),
    ],
)
async def test_solve_returns_one_perfect_turn(task, answer, expected):
    environment = Environment("solves", Solves(answer))
    assert await environment.solve(await environment.reset(task)) == expected


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ToolCall(name="go"), "hook 'solve' returned ToolCall, expected Message or list"),
        (5, "hook 'solve' returned int, expected Message or list"),
        (["go"], "hook 'solve' returned str, expected ToolCall"),
    ],
)
async def test_solve_must_return_actions(task, answer, message):
    environment = Environment("solves", Solves(answer))
    with pytest.raises(Failed, match=message) as caught:
        await environment.solve(await environment.reset(task))
    assert caught.value.stage == "solve"
