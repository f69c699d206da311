"""Fails semantic.code_execution: `verify` computes the reply."""

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
        yield Sum.ask(f"Compute {one} plus {two}.", total=one + two)


@hookimpl
def solve(task: Sum):
    return Message(content=str(task.total))


@hookimpl
def verify(task: Sum, transcript):
    try:
        value = eval(transcript.reply.strip()[:200], {})
    except Exception:  # noqa: BLE001  # so such a verifier goes on
        value = None
    return Verdict(reward=float(type(value) is int and value == task.total))
