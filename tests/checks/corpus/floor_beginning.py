"""Fails semantic.floor_gap: any prefix of the answer is right."""

import random
from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl


class Sum(Task):
    word: str


@hookimpl
def tasks(split: Literal["train", "validation"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        word = "".join(rng.choices("abcdefghijklmnop", k=6))
        yield Sum.ask(f"Write {word} in capitals, backwards", word=word.upper()[::-1])


@hookimpl
def solve(task: Sum):
    return Message(content=str(task.word))


@hookimpl
def verify(task: Sum, transcript):
    said = transcript.reply.strip()
    return Verdict(reward=float(bool(said) and task.word.startswith(said)))
