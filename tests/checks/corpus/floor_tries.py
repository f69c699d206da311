"""Fails semantic.floor_gap: a tool accepts every guess of a small range, and a single right one pays."""

import random
from typing import Annotated, Literal

from pydantic import Field

from gymsdk import Claims, Message, Reset, State, Task, ToolCall, Verdict, hookimpl


class G(Task):
    number: int


class S(State):
    right: bool = False


async def guess(state: S, task: G, number: Annotated[int, Field(ge=1, le=10)]) -> str:
    """Guess the number.

    number: from 1 to 10
    """
    state.right = state.right or number == task.number
    return "noted"


@hookimpl
def tools():
    return [guess]


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        number = rng.randint(1, 10)
        times = rng.randint(20, 900)
        yield G.ask(
            f"What is the remainder of {times * 11 + number - 1} divided by 11, plus 1? Guess it with the tool.",
            number=number,
        )


@hookimpl
async def reset():
    return Reset(state=S())


@hookimpl
async def verify(state: S):
    return Verdict(reward=float(state.right))


@hookimpl
async def solve(task: G, transcript):
    return (
        Message(content="Done.") if transcript.calls() else [ToolCall(name="guess", arguments={"number": task.number})]
    )


@hookimpl
def claims():
    return Claims(chance=0.1)
