"""Fails runtime.resources: every episode writes a temporary file and does not remove it."""

import os
import random
import tempfile
from typing import Literal

from gymsdk import Message, Reset, Task, Verdict, hookimpl


class Sum(Task):
    answer: int


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(1000), rng.randrange(1000)
        yield Sum.ask(f"What is {one} + {other}?", answer=one + other)


@hookimpl
async def reset():
    handle, _ = tempfile.mkstemp(prefix="episode-")
    os.close(handle)
    return Reset()


@hookimpl
async def verify(task: Sum, transcript):
    return Verdict(reward=float(transcript.reply.strip() == str(task.answer)))


@hookimpl
async def solve(task: Sum):
    return Message(content=str(task.answer))
