"""Fails nothing: the last answer of a reply is graded, which is a single answer; two tasks may have the same answer."""

import random
from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl


class Word(Task):
    """The word."""

    answer: str


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        word = "".join(rng.choices("bcdfghjklm", k=rng.choice([5, 7])))
        yield Word.ask(f"Write {word} backwards.", answer=word[::-1])


@hookimpl
def solve(task: Word):
    return Message(content=f"Answer: {task.answer}")


@hookimpl
def verify(task: Word, transcript):
    return Verdict(reward=float(transcript.reply.rpartition("Answer:")[2].strip() == task.answer))
