"""Fails semantic.canary_floor (and semantic.floor_gap): a tool raises an exception for an unexpected value."""

import random
from typing import Annotated, Literal

from pydantic import Field

from gymsdk import Message, Task, Verdict, hookimpl


class Sum(Task):
    total: int


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(300, 999), rng.randrange(300, 999)
        yield Sum.ask(f"What is {one} + {other}?", total=one + other)


@hookimpl
def solve(task: Sum):
    return Message(content=str(task.total))


async def digit(
    of: Annotated[int, Field(description="The number.")],
    place: Annotated[int, Field(description="Which digit, from 0.")],
) -> str:
    """Give one digit of a number, counted from the left."""
    return str(of)[place]


@hookimpl
def tools():
    return [digit]


@hookimpl
def verify(task: Sum, transcript):
    return Verdict(reward=float(transcript.reply == str(task.total)))
