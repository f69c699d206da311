"""Fails semantic.code_execution: `verify` passes the reply to a new interpreter."""

import random
import subprocess
import sys
from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl


class Sum(Task):
    total: int


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, two = rng.randrange(100, 999), rng.randrange(100, 999)
        yield Sum.ask(f"Write a Python program that prints the sum of {one} and {two}.", total=one + two)


@hookimpl
def solve(task: Sum):
    return Message(content=f"print({task.total})")


@hookimpl
def verify(task: Sum, transcript):
    command = [sys.executable, "-c", transcript.reply]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return Verdict(reward=float(ran.stdout.strip() == str(task.total)))
