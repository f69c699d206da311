"""Fails semantic.code_execution: `verify` pastes the reply into a shell command."""

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
        yield Sum.ask(f"Which number is the sum of {one} and {two}?", total=one + two)


@hookimpl
def solve(task: Sum):
    return Message(content=str(task.total))


@hookimpl
def verify(task: Sum, transcript):
    command = f"test '{transcript.reply}' -eq {task.total}"
    ran = subprocess.run(command, shell=True, capture_output=True, timeout=20, check=False)
    return Verdict(reward=float(ran.returncode == 0 and transcript.reply.strip() == str(task.total)))
