"""The `close` hook: its arguments, its valid results, and the failures of invalid results."""

from __future__ import annotations

import pytest

from gymsdk import Environment, Failed, Reset, hookimpl

from .environments import Count, Judge, Question


async def test_close_receives_the_task_and_the_state_and_is_optional(recorded, recorder, task):
    episode = await recorded.reset(Question.ask("?"))
    await recorded.close(episode)
    assert recorder.given["close"] == {"task": episode.task, "state": episode.state, "shared": "index 3"}
    environment = Environment("judge", Judge())
    await environment.close(await environment.reset(task))


async def test_close_is_called_if_the_result_of_reset_is_invalid(task):
    closed = []

    class Grabs(Judge):
        @hookimpl
        def reset(self):
            return Reset(state=Count(), tools=["fly"])

        @hookimpl
        def close(self, state):
            closed.append(state)

    with pytest.raises(Failed, match="hook 'reset' offers tools that the environment does not have: fly"):
        await Environment("grabs", Grabs()).reset(task)
    assert closed == [Count()]
