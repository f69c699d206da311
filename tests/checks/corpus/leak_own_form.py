"""Fails semantic.no_solution_leakage: the prompt shows the answer in the form in which `solve` gives it."""

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
        yield Sum.ask(f"What is {one} + {other}? Write <<number>>, as in <<{one + other}>>.", total=one + other)


@hookimpl
def solve(task: Sum):
    return Message(content=f"I add the numbers.\nThe sum is <<{task.total}>>.")


@hookimpl
def verify(task: Sum, transcript):
    return Verdict(reward=float(transcript.reply.endswith(f"The sum is <<{task.total}>>.")))
