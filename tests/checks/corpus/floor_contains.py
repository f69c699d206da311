"""Fails semantic.floor_gap: a reply that contains the expected word is right, and so is a list of words."""

import random
from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl


class Word(Task):
    answer: str


def plain(text: str) -> str:
    return " ".join(text.lower().split())


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        word = "".join(rng.choices("bcdfghjklm", k=7))
        yield Word.ask(f"Write {word} backwards.", answer=word[::-1])


@hookimpl
def solve(task: Word):
    return Message(content=task.answer)


@hookimpl
def verify(task: Word, transcript):
    return Verdict(reward=float(plain(task.answer) in plain(transcript.reply)))
