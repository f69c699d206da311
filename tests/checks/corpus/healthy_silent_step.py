"""Fails nothing: a step answers nothing and waits for another reply."""

import random
from typing import Literal

from gymsdk import Message, Reset, State, Step, Task, Verdict, hookimpl


class Sum(Task):
    answer: int


class Heard(State):
    replies: list[str] = []


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(10**6), rng.randrange(10**6)
        yield Sum.ask(f"What is {one} + {other}? Reply with it, then once more.", answer=one + other)


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
    return Verdict(reward=float(state.replies == [str(task.answer)] * 2))


@hookimpl
async def solve(task: Sum):
    return Message(content=str(task.answer))
