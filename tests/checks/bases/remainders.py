"""Remainders, with a train split of 100,000 rows."""

from checks.bases.sums import *

NUMBERS = range(10**6, 10**6 + 100_000)


class Sum(Task):
    number: int
    source: str = ""


@hookimpl
def tasks(split: Literal["test", "train"], seed):
    for number in NUMBERS if split == "train" else TEST:
        yield Sum.ask(f"What is the remainder of {number} by 9973?", number=number)


@hookimpl
def verify(task: Sum, transcript):
    return Verdict(reward=float(transcript.reply.strip() == str(task.number % 9973)))


@hookimpl
def solve(task: Sum):
    return Message(content=str(task.number % 9973))
