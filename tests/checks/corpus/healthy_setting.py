"""Fails nothing: a setting is required."""

import random
from typing import Literal

from gymsdk import Config, Message, Task, Verdict, hookimpl


class C(Config):
    """level: how many letters a word has."""

    level: int


class W(Task):
    """word"""

    word: str


@hookimpl
def tasks(split: Literal["train", "test"], seed, config: C):
    rng = random.Random(f"{split}:{seed}")
    while True:
        word = "".join(rng.choices("abcdefgh", k=config.level))
        yield W.ask(f"Write {word} backwards.", word=word[::-1])


@hookimpl
async def verify(task: W, transcript):
    return Verdict(reward=float(transcript.reply.strip() == task.word))


@hookimpl
def solve(task: W):
    return Message(content=task.word)
