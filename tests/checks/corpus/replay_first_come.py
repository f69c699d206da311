"""Fails semantic.replayability (and runtime.seed_control, runtime.episode_isolation, runtime.faces_agree): the
first call in the process gets the better answer, which the state keeps.
"""

import random
from contextlib import asynccontextmanager
from typing import Literal

from gymsdk import Message, Reset, State, Task, ToolCall, Verdict, hookimpl


class Secret(Task):
    number: int


class Memory(State):
    hints: int = 0


@hookimpl
@asynccontextmanager
async def lifespan():
    yield {"asked": 0}


async def hint(state: Memory, shared: dict) -> str:
    """Ask for a hint."""
    shared["asked"] += 1
    state.hints = shared["asked"]
    return f"You are number {shared['asked']} to ask."


@hookimpl
def tools():
    return [hint]


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        yield Secret.ask(f"Ask for a hint, then guess number {rng.randrange(10**6)}.", number=rng.randrange(10**5))


@hookimpl
async def reset():
    return Reset(state=Memory())


@hookimpl
async def verify(task: Secret, transcript):
    return Verdict(reward=float(transcript.reply.strip() == str(task.number)))


@hookimpl
async def solve(task: Secret, transcript):
    return Message(content=str(task.number)) if transcript.calls() else [ToolCall(name="hint")]
