"""Fails semantic.floor_gap: a reply of the right length earns a small reward that is not claimed."""

import random
from typing import Literal

from gymsdk import Claims, Message, Task, Verdict, hookimpl


class Sum(Task):
    total: int


@hookimpl
def tasks(split: Literal["train", "validation", "test", "example"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(300, 999), rng.randrange(300, 999)
        yield Sum.ask(f"What is {one} + {other}?", total=one + other)


@hookimpl
def solve(task: Sum):
    return Message(content=str(task.total))


@hookimpl
def verify(task: Sum, transcript):
    reply = transcript.reply.strip()
    return Verdict(reward=1.0 if reply == str(task.total) else 0.2 * bool(reply))


@hookimpl
def claims():
    return Claims(chance=0.1)
