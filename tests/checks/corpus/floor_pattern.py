"""Fails semantic.floor_gap (and semantic.canary_floor): the reply is used as a pattern."""

import random
import re
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
        found = re.fullmatch(transcript.reply[:100], str(task.total))
    except (re.error, RecursionError, OverflowError):
        found = None
    return Verdict(reward=float(found is not None))
