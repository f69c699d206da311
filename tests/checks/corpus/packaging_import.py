"""Fails packaging.import: importing it prints a greeting."""

import random
from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl

print("Welcome to the additions!")


class Sum(Task):
    answer: int


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(10**6), rng.randrange(10**6)
        yield Sum.ask(f"What is {one} + {other}?", answer=one + other)


@hookimpl
async def verify(task: Sum, transcript):
    return Verdict(reward=float(transcript.reply.strip() == str(task.answer)))


@hookimpl
async def solve(task: Sum):
    return Message(content=str(task.answer))
