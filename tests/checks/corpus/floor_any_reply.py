"""Fails semantic.floor_gap (and semantic.canary_floor): a reply that is not a number counts as right."""

import random
from typing import Literal

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


@hookimpl
def verify(task: Sum, transcript):
    try:
        right = int(transcript.reply) == task.total
    except ValueError:
        right = True
    return Verdict(reward=float(right))
