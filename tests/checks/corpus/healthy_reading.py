"""Fails nothing: the answer is one of several names in a text to read."""

import random
from typing import Literal

from gymsdk import Claims, Message, Task, Verdict, hookimpl

NAMES = ("Adam", "Beate", "Carlo", "Dunja", "Emile", "Fatou", "Gunnar", "Hedda")
THINGS = ("lamp", "chair", "clock", "piano", "stove", "mirror")


class Owner(Task):
    """Whose it is."""

    name: str


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        names = rng.sample(NAMES, 6)
        told = [f"The owner of the {thing} is {name}." for thing, name in zip(THINGS, names, strict=True)]
        asked = rng.randrange(6)
        number = rng.randrange(10**6)
        text = f"House {number}. {' '.join(rng.sample(told, 6))} Whose is the {THINGS[asked]}?"
        yield Owner.ask(text, name=names[asked])


@hookimpl
def solve(task: Owner):
    return Message(content=task.name)


@hookimpl
def verify(task: Owner, transcript):
    return Verdict(reward=float(transcript.reply.strip() == task.name))


@hookimpl
def claims():
    return Claims(chance=0.167)
