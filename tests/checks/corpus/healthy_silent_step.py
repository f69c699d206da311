"""Fails nothing: a step answers nothing and waits for another reply."""

from checks.bases.sums import *

PROMPT = "What is {one} + {other}? Reply with it, then once more."


class Heard(State):
    replies: list[str] = []


@hookimpl
async def reset():
    return Reset(state=Heard())


@hookimpl
async def step(state: Heard, action):
    if not isinstance(action, Message):
        return None
    state.replies.append(action.text.strip())
    return Step(done=len(state.replies) > 1)


@hookimpl
async def verify(task: Sum, state: Heard):
    return Verdict(reward=float(state.replies == [str(task.total)] * 2))
