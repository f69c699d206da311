"""Fails semantic.no_solution_leakage: the prompt holds the answer in hexadecimal."""

import random
from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl


class Sum(Task):
    total: int


@hookimpl
def tasks(split: Literal["train", "validation"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = (rng.randrange(3000, 9999) for _ in range(2))
        yield Sum.ask(f"What is {one} + {other}?\n[ref {str(one + other).encode().hex()}]", total=one + other)


@hookimpl
def solve(task: Sum):
    return Message(content=str(task.total))


@hookimpl
def verify(task: Sum, transcript):
    return Verdict(reward=float(transcript.reply.strip() == str(task.total)))
