"""Fails runtime.seed_control: tasks are drawn from a set of strings, whose order differs between processes."""

import random
from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl

CITIES = {"Lima", "Oslo", "Cairo", "Quito", "Hanoi", "Accra", "Dakar", "Minsk", "Seoul", "Sofia"}


class City(Task):
    city: str


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        city = list(CITIES)[rng.randrange(len(CITIES))]
        yield City.ask(f"Spell the capital with {rng.randrange(10**6)} letters backwards: {city}", city=city)


@hookimpl
async def verify(task: City, transcript):
    return Verdict(reward=float(transcript.reply.strip() == task.city[::-1]))


@hookimpl
async def solve(task: City):
    return Message(content=task.city[::-1])
