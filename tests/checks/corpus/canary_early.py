"""Fails semantic.canary_floor: the verifier assumes that the transcript has a reply."""

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
    last = transcript.items[-1]
    text = last["content"][0]["text"] if last.get("content") else ""
    return Verdict(reward=float(text == str(task.total)))
