"""Fails runtime.episode_isolation (and semantic.oracle_max, runtime.faces_agree): the state of an episode
is kept in the module, where the next reset overwrites it.
"""

import random
from typing import Literal

from gymsdk import Message, Reset, Task, ToolCall, Verdict, hookimpl

BASKET: list[str] = []


class Errand(Task):
    fruit: str


async def put(fruit: str) -> str:
    """Put a fruit into the basket."""
    BASKET.append(fruit)
    return f"{len(BASKET)} in the basket"


@hookimpl
def tools():
    return [put]


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        fruit = rng.choice(["apple", "pear", "plum", "fig"]) + str(rng.randrange(100))
        yield Errand.ask(f"Put one {fruit} into the basket.", fruit=fruit)


@hookimpl
async def reset():
    BASKET.clear()
    return Reset()


@hookimpl
async def verify(task: Errand):
    return Verdict(reward=float(task.fruit in BASKET and len(BASKET) == 1))


@hookimpl
async def solve(task: Errand, transcript):
    return Message(content="Done.") if transcript.calls() else [ToolCall(name="put", arguments={"fruit": task.fruit})]
