"""Fails semantic.floor_gap: the policy's reasoning is graded together with its reply."""

import random
from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl


class Sum(Task):
    total: int


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = (rng.randrange(10, 99) for _ in range(2))
        yield Sum.ask(f"What is {one} + {other}?", total=one + other)


@hookimpl
def solve(task: Sum):
    return Message(content=str(task.total))


@hookimpl
def verify(task: Sum, transcript):
    words = []
    for item in transcript.items:
        if item.get("type") == "reasoning":
            for part in item.get("summary") or []:
                words += part.get("text", "").split()
    words += transcript.reply.split()[:1] if transcript.reply.strip().isdecimal() else []
    return Verdict(reward=float(str(task.total) in words))
