"""Fails semantic.verifier_determinism (and runtime.seed_control, runtime.episode_isolation, runtime.faces_agree,
runtime.side_effects, semantic.replayability): each verdict contains a new random number.
"""

import random
from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl


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


class Sampled(Verdict):
    shade: float


@hookimpl
def verify(task: Sum, transcript):
    return Sampled(reward=float(transcript.reply == str(task.total)), shade=random.random())
