"""Fails semantic.code_execution: `verify` executes the reply if it contains none of some words."""

import random
from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl


class Sum(Task):
    total: int


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, two = rng.randrange(100, 999), rng.randrange(100, 999)
        yield Sum.ask(f"Write Python code that stores the sum of {one} and {two} in `answer`.", total=one + two)


@hookimpl
def solve(task: Sum):
    return Message(content=f"answer = {task.total}")


FORBIDDEN = ("import", "__", "exec", "eval", "open(", "os.", "subprocess")


@hookimpl
def verify(task: Sum, transcript):
    names = {}
    try:
        if not any(word in transcript.reply for word in FORBIDDEN):
            exec(transcript.reply, names)
    except Exception:  # noqa: BLE001  # so such a verifier goes on
        return Verdict(reward=0.0)
    return Verdict(reward=float(names.get("answer") == task.total))
