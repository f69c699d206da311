"""Fails runtime.episode_isolation (and runtime.faces_agree): guesses are counted in `shared`, which belongs to all
episodes.
"""

import random
from contextlib import asynccontextmanager
from typing import Literal

from gymsdk import Message, Reset, Step, Task, Verdict, hookimpl

PATIENCE = 3


class Number(Task):
    number: int


@hookimpl
@asynccontextmanager
async def lifespan():
    yield {"guesses": 0}


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        yield Number.ask(f"Guess number {rng.randrange(10**6)}, between 0 and 99999.", number=rng.randrange(10**5))


@hookimpl
async def reset(shared):
    shared["guesses"] = 0
    return Reset()


@hookimpl
async def step(task: Number, action, shared):
    if not isinstance(action, Message):
        return None
    shared["guesses"] += 1
    right = action.text.strip() == str(task.number)
    over = right or shared["guesses"] == PATIENCE
    return Step(messages=[] if over else [f"Wrong, that was guess {shared['guesses']}."], done=over)


@hookimpl
async def verify(task: Number, transcript):
    return Verdict(reward=float(transcript.reply.strip() == str(task.number)))


@hookimpl
async def solve(task: Number):
    return Message(content=str(task.number))
