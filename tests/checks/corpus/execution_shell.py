"""Fails semantic.code_execution: `verify` runs the reply as a shell command."""

import random
import subprocess
from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl


class Sum(Task):
    total: int


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, two = rng.randrange(100, 999), rng.randrange(100, 999)
        yield Sum.ask(f"Write a shell command that prints the sum of {one} and {two}.", total=one + two)


@hookimpl
def solve(task: Sum):
    return Message(content=f"echo {task.total}")


@hookimpl
def verify(task: Sum, transcript):
    ran = subprocess.run(transcript.reply, shell=True, capture_output=True, text=True, timeout=20, check=False)
    return Verdict(reward=float(ran.stdout.strip() == str(task.total)))
