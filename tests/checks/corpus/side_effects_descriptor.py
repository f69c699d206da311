"""Fails runtime.side_effects: `verify` writes to descriptor 1."""

import os
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
    os.write(1, b"reward: 1.0\n")
    return Verdict(reward=float(transcript.reply.strip() == str(task.answer)))


@hookimpl
async def solve(task: Sum):
    return Message(content=str(task.answer))
