"""Fails semantic.split_overlap: the splits have the same prompts and differ in another field only."""

import random
from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl


class W(Task):
    word: str
    source: str


@hookimpl
def tasks(split: Literal["train", "validation"]):
    for number in range(500):
        word = "".join(random.Random(number).choices("abcdefgh", k=8))
        yield W.ask(f"Write {word} backwards.", word=word[::-1], source=split)


@hookimpl
def verify(task: W, transcript):
    return Verdict(reward=float(transcript.reply.strip() == task.word))


@hookimpl
def solve(task: W):
    return Message(content=task.word)
