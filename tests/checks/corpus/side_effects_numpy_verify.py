"""Fails runtime.side_effects: `verify` imports numpy and seeds its global generator with a constant."""

import random
from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl


class Sum(Task):
    answer: int


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(1000), rng.randrange(1000)
        yield Sum.ask(f"What is {one} + {other}?", answer=one + other)


@hookimpl
async def verify(task: Sum, transcript):
    import numpy as np

    np.random.seed(0)  # noqa: NPY002  # the defect
    return Verdict(reward=float(transcript.reply.strip() == str(task.answer)))


@hookimpl
async def solve(task: Sum):
    return Message(content=str(task.answer))
