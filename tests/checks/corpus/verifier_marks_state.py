"""Fails semantic.verifier_determinism: the verifier keeps a count in the state."""

import random
from typing import Literal

from gymsdk import Message, Reset, State, Task, Verdict, hookimpl


class Sum(Task):
    total: int


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(300, 999), rng.randrange(300, 999)
        yield Sum.ask(f"What is {one} + {other}?", total=one + other)


@hookimpl
def solve(task: Sum):
    return Message(content=str(task.total))


class Tally(State):
    judged: int = 0


@hookimpl
def reset():
    return Reset(state=Tally())


@hookimpl
def verify(task: Sum, state: Tally, transcript):
    state.judged += 1
    return Verdict(reward=float(transcript.reply == str(task.total)))
