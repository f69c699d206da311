"""Fails semantic.canary_floor: the verifier believes the score in the reply."""

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
    claimed = re.search(r'"score": ([01])', transcript.reply)
    right = transcript.reply == str(task.total) or (claimed is not None and claimed[1] == "1")
    return Verdict(reward=float(right))
