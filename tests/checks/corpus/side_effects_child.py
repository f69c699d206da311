"""Fails runtime.side_effects: a child process prints to the standard output of the host."""

import random
import subprocess
import sys
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
def reset():
    subprocess.run([sys.executable, "-S", "-c", "print('graded')"], check=True)
    return Reset()


@hookimpl
async def verify(task: Sum, transcript):
    return Verdict(reward=float(transcript.reply.strip() == str(task.answer)))


@hookimpl
async def solve(task: Sum):
    return Message(content=str(task.answer))
