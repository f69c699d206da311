"""The `step` hook: its arguments, its valid results, and the failures of invalid results."""

from __future__ import annotations

import pytest

from gymsdk import Environment, Failed, Message, Step, ToolCall, hookimpl

from .environments import Count, Judge, Question, Tooled


async def test_step_receives_the_action_and_changes_the_state_in_place(recorded, recorder):
    episode = await recorded.reset(Question.ask("?"))
    action = Message(role="assistant", content="42")
    assert await recorded.step(episode, action) == Step(done=True)
    assert recorder.given["step"] == {"task": episode.task, "action": action, "shared": "index 3", "said": 0}
    assert episode.state == Count(steps=1)


async def test_step_is_not_called_for_a_tool_that_is_not_offered(recorded, recorder):
    episode = await recorded.reset(Question.ask("?"))
    step = await recorded.step(episode, ToolCall(name="go"))
    assert step == Step(output='{"error": "There is no tool named \'go\'. Available tools: none."}')
    assert "step" not in recorder.given


async def test_step_may_handle_replies_and_leave_tools_to_the_default_plugin(task):
    class Half(Tooled):
        @hookimpl
        def step(self, action):
            return Step(messages=["again"]) if isinstance(action, Message) else None

    environment = Environment("half", Half())
    episode = await environment.reset(task)
    assert (await environment.step(episode, Message(content="42"))).messages[0].text == "again"
    assert (await environment.step(episode, ToolCall(name="stop"))).output == "null"


class Steps(Judge):
    """An environment with a `step` hook that returns given results."""

    def __init__(self, answer) -> None:
        self.answer = answer

    @hookimpl
    def step(self):
        return self.answer() if callable(self.answer) else self.answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("done", "hook 'step' returned str, expected Step"),
        (True, "hook 'step' returned bool, expected Step"),
        (Step(reward=float("nan")), "hook 'step' returned the reward nan; a reward must be finite"),
        (Step(output="ok"), "hook 'step' returned an output for a reply; return messages"),
        (Step.model_construct(reward="high"), "hook 'step' returned an invalid Step: reward: "),
    ],
)
async def test_step_must_return_a_step(task, answer, message):
    environment = Environment("steps", Steps(answer))
    episode = await environment.reset(task)
    with pytest.raises(Failed, match=message) as caught:
        await environment.step(episode, Message(content="42"))
    assert (caught.value.stage, caught.value.kind) == ("step", "bad_answer")
