"""Fails runtime.side_effects: `lifespan` seeds the global generator."""

import random
from contextlib import asynccontextmanager
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
def lifespan():
    return hold()


@asynccontextmanager
async def hold():
    random.seed(7)
    yield None


@hookimpl
async def verify(task: Sum, transcript):
    return Verdict(reward=float(transcript.reply.strip() == str(task.answer)))


@hookimpl
async def solve(task: Sum):
    return Message(content=str(task.answer))
