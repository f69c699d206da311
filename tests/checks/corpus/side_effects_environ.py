"""Fails runtime.side_effects: the grader sets an environment variable, always to the same value."""

import os
import random
from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl


class Sum(Task):
    answer: int


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(10**6), rng.randrange(10**6)
        yield Sum.ask(f"What is {one} + {other}?", answer=one + other)


@hookimpl
def verify(task: Sum, transcript):
    os.environ["GRADED"] = "1"
    return Verdict(reward=float(transcript.reply.strip() == str(task.answer)))


@hookimpl
def solve(task: Sum):
    return Message(content=str(task.answer))
