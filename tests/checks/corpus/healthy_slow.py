"""Fails nothing: an episode takes a third of a second to open."""

import asyncio
import random
from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl


class W(Task):
    """word"""

    word: str


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        word = "".join(rng.choices("abcdefgh", k=8))
        yield W.ask(f"Write {word} backwards.", word=word[::-1])


@hookimpl
async def reset():
    await asyncio.sleep(0.3)


@hookimpl
def verify(task: W, transcript):
    return Verdict(reward=float(transcript.reply.strip() == task.word))


@hookimpl
def solve(task: W):
    return Message(content=task.word)
