"""Fails semantic.split_overlap: the prompts of the test split are in a train split of 100,000, with other blanks."""

from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl


class Sum(Task):
    number: int
    source: str = ""


@hookimpl
def tasks(split: Literal["test", "train"], seed):
    numbers = range(10**6, 10**6 + 100_000)
    blank = " " if split == "train" else "  "
    for number in numbers if split == "train" else numbers[60_000:60_300]:
        yield Sum.ask(f"What is the remainder{blank}of {number} by 9973?", number=number, source=split)


@hookimpl
def verify(task: Sum, transcript):
    return Verdict(reward=float(transcript.reply.strip() == str(task.number % 9973)))


@hookimpl
def solve(task: Sum):
    return Message(content=str(task.number % 9973))
