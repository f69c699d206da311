"""Fails runtime.blocking: an `async def` verifier sleeps on the event loop where a reply is right."""

import random
import time
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
    right = transcript.reply.strip() == str(task.answer)
    if right:
        time.sleep(0.06)
    return Verdict(reward=float(right))


@hookimpl
async def solve(task: Sum):
    return Message(content=str(task.answer))
