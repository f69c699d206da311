"""Fails runtime.verdicts: the verdict's distance is nan if the reply is not a number."""

import random
from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl


class Sum(Task):
    answer: int


class Graded(Verdict):
    off: float


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(10**6), rng.randrange(10**6)
        yield Sum.ask(f"What is {one} + {other}?", answer=one + other)


@hookimpl
async def verify(task: Sum, transcript):
    said = transcript.reply.strip()
    right = said == str(task.answer)
    return Graded(reward=float(right), off=0.0 if right else float("nan"))


@hookimpl
async def solve(task: Sum):
    return Message(content=str(task.answer))
