"""Fails semantic.reward_range (and semantic.oracle_max): short replies earn a bonus above the claimed maximum."""

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
    right = float(transcript.reply == str(task.total))
    return Verdict(reward=right * 1.1, components={"right": right, "short": right * 0.1})
