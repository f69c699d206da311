"""Fails semantic.split_overlap: rows of a train split of 100,000 are the test split under new ids."""

import random
from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl


class Sum(Task):
    number: int
    source: str = ""


@hookimpl
def tasks(split: Literal["test", "train"], seed):
    numbers = range(10**6, 10**6 + 100_000)
    rows = list(numbers)
    random.Random(f"{split}:{seed}").shuffle(rows)
    for place, number in enumerate(rows if split == "train" else sorted(rows)[40_000:40_200]):
        yield Sum.ask(f"What is the remainder of {number} by 9973?", number=number, row_id=f"{split}-{place}")


@hookimpl
def verify(task: Sum, transcript):
    return Verdict(reward=float(transcript.reply.strip() == str(task.number % 9973)))


@hookimpl
def solve(task: Sum):
    return Message(content=str(task.number % 9973))
