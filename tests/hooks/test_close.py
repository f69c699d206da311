"""What `close` is given, what it may answer, what becomes of an answer that is wrong."""

from __future__ import annotations

from gymsdk import (
    Environment,
)

from .told import Judge, Question


async def test_close_is_given_the_task_and_the_state(recorded, recorder):
    episode = await recorded.reset(Question.ask("?"))
    await recorded.close(episode)
    assert recorder.given["close"] == {"task": episode.task, "state": episode.state, "shared": "index 3"}


async def test_close_may_be_left_out(task):
    environment = Environment("judge", Judge())
    await environment.close(await environment.reset(task))
