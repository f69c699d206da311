"""Fails semantic.oracle_max: `solve` and `verify` write the answer in different notations."""

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
    return Message(content=f"{task.total:,}")


@hookimpl
def verify(task: Sum, transcript):
    return Verdict(reward=float(transcript.reply == str(task.total)))
