"""Fails semantic.no_solution_leakage: a wrong reply is answered with the right one, and the next reply counts."""

import random
from typing import Literal

from gymsdk import Message, Step, Task, Verdict, hookimpl


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
def step(task: Sum, action, transcript):
    tried = sum(item.get("role") == "assistant" for item in transcript.items)
    if action.text == str(task.total) or tried > 2:
        return Step(done=True)
    return Step(messages=[f"No, it is not {action.text}; think of {task.total}."])


@hookimpl
def verify(task: Sum, transcript):
    return Verdict(reward=float(transcript.reply == str(task.total)))
