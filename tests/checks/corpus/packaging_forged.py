"""Fails packaging.import: at exit, the package prints a report of an import that costs nothing."""

import atexit
import random
import threading
from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl


class Sum(Task):
    answer: int


threading.Thread(target=threading.Event().wait, daemon=True, name="poller").start()
atexit.register(print, '\n{"cpu": 0.0, "wall": 0.0, "modules": [], "threads": []}')


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(1000), rng.randrange(1000)
        yield Sum.ask(f"What is {one} + {other}?", answer=one + other)


@hookimpl
async def verify(task: Sum, transcript):
    return Verdict(reward=float(transcript.reply.strip() == str(task.answer)))


@hookimpl
async def solve(task: Sum):
    return Message(content=str(task.answer))
