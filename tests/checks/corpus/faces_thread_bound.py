"""Fails runtime.faces_agree: its reply depends on the thread of the event loop."""

import random
import threading
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
    return Reset(messages=[f"Answer {threading.current_thread().name} with a number."])


@hookimpl
async def verify(task: Sum, transcript):
    return Verdict(reward=float(transcript.reply.strip() == str(task.answer)))


@hookimpl
async def solve(task: Sum):
    return Message(content=str(task.answer))
