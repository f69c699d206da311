"""Fails runtime.load: a setting without a default is required."""

import random
from typing import Literal

from gymsdk import Config, Message, Task, Verdict, hookimpl


class Settings(Config):
    """How large the numbers are: *digits* of them."""

    digits: int


class Sum(Task):
    answer: int


@hookimpl
def tasks(split: Literal["train", "test"], seed, config: Settings):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(10**config.digits), rng.randrange(10**6)
        yield Sum.ask(f"What is {one} + {other}?", answer=one + other)


@hookimpl
async def verify(task: Sum, transcript):
    return Verdict(reward=float(transcript.reply.strip() == str(task.answer)))


@hookimpl
async def solve(task: Sum):
    return Message(content=str(task.answer))
