"""Fails semantic.no_solution_leakage: a sentence of the prompt contains the answer."""

import random
from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl


class Place(Task):
    town: str


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        land, town = ("".join(rng.choices("bdfglmnr", k=6)).title() for _ in range(2))
        yield Place.ask(f"What is the capital of {land}? Context: the capital is {town}.", town=town)


@hookimpl
def solve(task: Place):
    return Message(content=task.town)


@hookimpl
def verify(task: Place, transcript):
    return Verdict(reward=float(transcript.reply.strip() == task.town))
