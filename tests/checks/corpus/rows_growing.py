"""Fails runtime.rows: a validator adds to a row at every read."""

import random
from typing import Literal

from pydantic import field_validator

from gymsdk import Message, Task, Verdict, hookimpl


class Sum(Task):
    answer: int
    notes: str = ""

    @field_validator("notes")
    @classmethod
    def _more(cls, notes):
        return f"{notes}!"


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(10**6), rng.randrange(10**6)
        yield Sum.ask(f"What is {one} + {other}?", answer=one + other, notes="sum")


@hookimpl
async def verify(task: Sum, transcript):
    return Verdict(reward=float(transcript.reply.strip() == str(task.answer)))


@hookimpl
async def solve(task: Sum):
    return Message(content=str(task.answer))
