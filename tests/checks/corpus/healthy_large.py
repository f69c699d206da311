"""Fails nothing: a train split of 100,000 rows, and a test split without any of them."""

from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl


class Sum(Task):
    number: int
    source: str = ""


@hookimpl
def tasks(split: Literal["test", "train"], seed):
    numbers = range(10**6, 10**6 + 100_000)
    for number in numbers if split == "train" else range(20_000, 20_500):
        yield Sum.ask(f"What is the remainder of {number} by 9973?", number=number, source="drawn")


@hookimpl
def verify(task: Sum, transcript):
    return Verdict(reward=float(transcript.reply.strip() == str(task.number % 9973)))


@hookimpl
def solve(task: Sum):
    return Message(content=str(task.number % 9973))
