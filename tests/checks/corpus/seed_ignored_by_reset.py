"""Fails runtime.seed_control (and runtime.episode_isolation, runtime.faces_agree): `reset` counts the episodes of the
process, and opens with the count.
"""

import random
from itertools import count
from typing import Literal

from gymsdk import Message, Reset, Task, Verdict, hookimpl

COUNT = count()


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
    return Reset(messages=[f"This is exercise {next(COUNT)}."])


@hookimpl
async def verify(task: Sum, transcript):
    return Verdict(reward=float(transcript.reply.strip() == str(task.answer)))


@hookimpl
async def solve(task: Sum):
    return Message(content=str(task.answer))
