"""Fails semantic.floor_gap: the right option is always the second."""

import random
from typing import Literal

from gymsdk import Claims, Message, Task, Verdict, hookimpl


class Q(Task):
    letter: str


@hookimpl
def tasks(split: Literal["train", "validation"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(300, 999), rng.randrange(300, 999)
        w = [one + other + d for d in rng.sample([-30, -20, -10, 10, 20, 30], 3)]
        opts = [w[0], one + other, w[1], w[2]]
        text = "\n".join(f"{letter}) {shown}" for letter, shown in zip("ABCD", opts, strict=True))
        yield Q.ask(f"What is {one} + {other}? Answer with one letter.\n{text}", letter="B")


@hookimpl
def solve(task: Q):
    return Message(content=task.letter)


@hookimpl
def verify(task: Q, transcript):
    return Verdict(reward=float(transcript.reply.strip() == task.letter))


@hookimpl
def claims():
    return Claims(chance=0.25)
